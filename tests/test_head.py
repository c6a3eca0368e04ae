# SPDX-License-Identifier: Apache-2.0
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.head import Tied, Untied
from jaxgpt.boxes.init import Normal
from jaxgpt.errors import ConfigError
from jaxgpt.model import forward
from jaxgpt.testing import jit_forward, jit_init, quick_jit, tiny

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 65, (4, 16)), jnp.int32)
HEADS = [Tied(), Untied(), Untied(use_bias=True), Tied(softcap=3.0)]


def padded(head, **boxes):
    cfg = tiny(vocab_size=65, head=head, **boxes)
    return cfg, jit_init(cfg, jax.random.key(0))


def mean_nats(params, cfg):
    logp = jax.nn.log_softmax(forward(cfg, params, TOKENS[:, :-1]).logits_BTV)
    return -jnp.take_along_axis(logp, TOKENS[:, 1:, None], -1).mean()


def unpadded(params):
    """The same parameters without the rows of padding."""
    return jax.tree.map(lambda p: p, params) | {
        "embed": {"embedding": params["embed"]["embedding"][:65]},
        **(
            {"head": {"out": {k: v[..., :65] for k, v in params["head"]["out"].items()}}}
            if "head" in params
            else {}
        ),
    }


@pytest.mark.parametrize("head", HEADS, ids=repr)
def test_padding_is_inert(head):  # S10
    cfg, params = padded(head)
    logits = jit_forward(cfg, params, TOKENS).logits_BTV
    assert logits.shape == (4, 16, 128)
    assert (logits[..., 65:] == -np.inf).all() and np.isfinite(logits[..., :65]).all()
    assert not jax.nn.softmax(logits)[..., 65:].any()
    grads = quick_jit(jax.grad(mean_nats), static_argnums=1)(params, cfg)
    filler = [grads["embed"]["embedding"][65:]]
    if "head" in grads:
        filler += [g[..., 65:] for g in grads["head"]["out"].values()]
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    assert not any(g.any() for g in filler)


@pytest.mark.parametrize("head", HEADS, ids=repr)
def test_padding_changes_no_logit(head):
    cfg, params = padded(head)
    true = tiny(vocab_size=65, head=head, vocab_multiple=1)
    want = jit_forward(true, unpadded(params), TOKENS).logits_BTV
    assert want.shape == (4, 16, 65)
    np.testing.assert_allclose(
        jit_forward(cfg, params, TOKENS).logits_BTV[..., :65], want, atol=2e-5
    )


@pytest.mark.parametrize("head", HEADS, ids=repr)
def test_a_fresh_model_is_as_good_as_chance_over_the_true_vocabulary(head):  # S10
    cfg, params = padded(head, init=Normal())
    loss = quick_jit(mean_nats, static_argnums=1)(params, cfg)
    assert abs(loss - math.log(65)) < 0.02  # ln 128 is 0.68 more


def test_draws_are_tokens():  # S10
    cfg, params = padded(Tied(), init=Normal())
    logits = jit_forward(cfg, params, TOKENS).logits_BTV[0, -1]
    draws = jax.random.categorical(jax.random.key(0), logits, shape=(10_000,))
    assert set(np.unique(draws)) == set(range(65))


def test_a_tied_head_reads_the_table_and_an_untied_one_does_not():
    for head, tied in ((Tied(), True), (Untied(), False)):
        cfg, params = padded(head)
        before = jit_forward(cfg, params, TOKENS).logits_BTV
        table = params["embed"]["embedding"]
        unused = next(t for t in range(65) if t not in np.asarray(TOKENS))
        params = params | {"embed": {"embedding": table.at[unused, 0].add(1.0)}}
        after = jit_forward(cfg, params, TOKENS).logits_BTV
        assert np.array_equal(np.delete(after, unused, -1), np.delete(before, unused, -1))
        assert (after[..., unused] != before[..., unused]).all() == tied


@pytest.mark.parametrize("head", [Tied, Untied])
def test_capped_logits_equal_the_formula(head):
    cfg, params = padded(head())
    plain = np.asarray(jit_forward(cfg, params, TOKENS).logits_BTV, float)[..., :65]
    capped = jit_forward(padded(head(softcap=3.0))[0], params, TOKENS).logits_BTV
    np.testing.assert_allclose(capped[..., :65], 3 * np.tanh(plain / 3), atol=1e-5)
    assert np.abs(plain).max() > 3 and (capped[..., 65:] == -np.inf).all()  # not -3


def test_a_cap_by_hand():
    """3 tanh(6 / 3) = 2.892083, the bias counted in."""
    cfg = tiny(vocab_size=2, vocab_multiple=1, head=Untied(use_bias=True, softcap=3.0), d_model=4)
    head = cfg.head.build(cfg.dims(), cfg.embed.build(cfg.dims()))
    out = {"kernel": jnp.ones((4, 2)), "bias": jnp.array([2.0, -4.0])}
    logits = head.apply({"params": {"out": out}}, jnp.ones((1, 1, 4)))
    np.testing.assert_allclose(logits[0, 0], [2.892083, 0.0], atol=1e-5)


@pytest.mark.parametrize("head", [Tied, Untied])
def test_a_cap_must_be_positive(head):
    with pytest.raises(ConfigError, match=r"softcap=0\.0 must be positive"):
        head(softcap=0.0)


def test_an_untied_bias_is_added():
    cfg, params = padded(Untied(use_bias=True))
    before = jit_forward(cfg, params, TOKENS).logits_BTV
    params["head"]["out"]["bias"] += 1.0
    after = jit_forward(cfg, params, TOKENS).logits_BTV
    np.testing.assert_allclose(after[..., :65], before[..., :65] + 1, atol=1e-5)
