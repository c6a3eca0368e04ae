# SPDX-License-Identifier: Apache-2.0
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.losses import (
    Score,
    aux_loss,
    chunked_terms,
    next_token_loss,
    perplexity,
    token_nats,
    token_terms,
)


def test_token_nats_are_the_negative_log_softmax():
    logits = jax.random.normal(jax.random.key(0), (2, 5, 11)) * 3
    targets = jax.random.randint(jax.random.key(1), (2, 5), 0, 11)
    expected = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), targets[..., None], -1)
    np.testing.assert_allclose(token_nats(logits, targets), expected[..., 0], atol=1e-5)


def test_token_terms_are_nats_and_the_log_sum_exp():
    """Softmax of log(1), log(3) times 2: the sum is 8, and padding is not in it."""
    logits = jnp.log(jnp.array([[[2.0, 6.0, 0.0]]]))
    nats, log_z = token_terms(logits, jnp.array([[1]]))
    assert nats[0, 0] == pytest.approx(math.log(8 / 6), abs=1e-6)
    assert log_z[0, 0] == pytest.approx(math.log(8), abs=1e-6)
    grad = jax.grad(lambda x: (token_terms(x, jnp.array([[1]]))[1] ** 2).sum())(logits)
    expected = 2 * math.log(8) * np.array([0.25, 0.75, 0.0])  # 2 log(Z) p
    np.testing.assert_allclose(grad[0, 0], expected, atol=1e-5)


def test_bfloat16_logits_are_summed_in_float32():
    logits = jax.random.normal(jax.random.key(0), (1, 4, 1000)).astype(jnp.bfloat16)
    targets = jnp.zeros((1, 4), jnp.int32)
    nats = token_nats(logits, targets)
    assert nats.dtype == jnp.float32
    np.testing.assert_allclose(nats, token_nats(logits.astype(jnp.float32), targets), atol=1e-5)


def test_vocabulary_padding_takes_no_probability():
    logits = jnp.full((1, 1, 128), -jnp.inf).at[..., :65].set(0.0)
    targets = jnp.array([[64]])
    assert token_nats(logits, targets)[0, 0] == pytest.approx(math.log(65), abs=1e-5)
    grad = jax.grad(lambda x: token_nats(x, targets).sum())(logits)
    assert jnp.isfinite(grad).all() and (grad[..., 65:] == 0).all()


@pytest.mark.parametrize("chunk", [3, 100])
def test_chunks_change_nothing_but_rounding(chunk):
    """Seven tokens in pieces that are filled up; values and gradients, of the head's matrix too."""
    x = jax.random.normal(jax.random.key(0), (2, 7, 5))
    w = jax.random.normal(jax.random.key(1), (5, 11)) * 3
    targets = jax.random.randint(jax.random.key(2), (2, 7), 0, 11)
    weights = jax.random.normal(jax.random.key(3), (2, 7))
    sizes = []

    def read(w, x):
        sizes.append(x.shape[1])
        return jnp.tanh(x @ w)

    def whole(x, w):
        nats, log_z = token_terms(read(w, x), targets)
        return ((nats + log_z**2) * weights).sum(), (nats, log_z)

    def pieces(x, w):
        nats, log_z = chunked_terms(lambda x: read(w, x), x, targets, chunk)
        return ((nats + log_z**2) * weights).sum(), (nats, log_z)

    want = jax.value_and_grad(whole, (0, 1), has_aux=True)(x, w)
    sizes.clear()
    got = jax.value_and_grad(pieces, (0, 1), has_aux=True)(x, w)
    assert max(sizes) == {3: 3, 100: 7}[chunk], "equal pieces"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_a_target_outside_the_vocabulary_is_never_another_tokens_loss():
    logits = jnp.array([[[5.0, 1.0, -jnp.inf, -jnp.inf]]])
    assert token_nats(logits, jnp.array([[2]]))[0, 0] == jnp.inf
    assert token_nats(logits, jnp.array([[-1]]))[0, 0] > 5.0


def test_the_mean_counts_tokens_not_rows():
    """Case D08: segment numbers are no weights; case C7: no tokens, no NaN."""
    logits = jnp.log(jnp.array([[[0.5, 0.5], [0.25, 0.75], [0.9, 0.1]]]))
    targets = jnp.zeros((1, 3), jnp.int32)
    weights = jnp.array([[1.0, 1.0, 0.0]])
    expected = (math.log(2) + math.log(4)) / 2
    assert next_token_loss(logits, targets, weights) == pytest.approx(expected, abs=1e-5)
    assert next_token_loss(logits, targets, 0 * weights) == 0.0


def test_denominators_have_names():
    """Case D15: 30 nats over 10 tokens and 6 words; uniform bytes are 8 bits each."""
    assert perplexity(30.0, 10) == pytest.approx(20.086, abs=1e-3)
    assert perplexity(30.0, 6) == pytest.approx(148.413, abs=1e-3)
    metrics = Score(nats=6 * math.log(256), n_tokens=6, n_chars=2, n_bytes=6).metrics()
    assert metrics["val_bits_per_byte"] == pytest.approx(8.0, abs=1e-9)
    assert metrics["val_bits_per_char"] == pytest.approx(24.0, abs=1e-9)
    assert metrics["val_token_perplexity"] == pytest.approx(256.0)


def test_only_entries_named_loss_are_trained_on():
    aux = {"block_0": {"balance_loss": jnp.array(0.5), "load": jnp.array(9.0)}, "block_1": {}}
    assert aux_loss(aux) == 0.5
    assert aux_loss({}) == 0.0
