# SPDX-License-Identifier: Apache-2.0
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxgpt.kernels import attend, dropout
from jaxgpt.kernels import reference as kernel
from jaxgpt.masks import Visibility


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def qkv(B=2, T=6, N=4, K=2, H=8):
    q, k, v = draw(B, T, N, H), draw(B, T, K, H, seed=1), draw(B, T, K, H, seed=2)
    return jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)


run = jax.jit(functools.partial(attend, scale=8**-0.5), static_argnames="softcap")
KNOBS = [{}, {"softcap": 0.7, "sinks_N": jnp.linspace(-1.0, 2.0, 4)}]


@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 3])
def test_equals_the_formula(K, window):
    q, k, v = qkv(K=K)
    seen = np.tri(6, dtype=bool) & ~np.tri(6, k=-(window or 6), dtype=bool)
    visibility = Visibility.full(2, 6).replace(window=window)
    want = reference.attention(q, k, v, seen)
    np.testing.assert_allclose(run(q, k, v, visibility), want, atol=1e-6)
    np.testing.assert_allclose(run(q, k, v, visibility.replace(plain=False)), want, atol=1e-6)


@pytest.mark.parametrize("knobs", KNOBS, ids=["plain", "capped"])
@pytest.mark.parametrize("one_row", [False, True])
def test_rows_in_parts_equal_all_at_once(one_row, knobs, monkeypatch):
    """Parts of 2 and 3 rows, with padding, documents and a bias by positions."""
    arrays = qkv(B=5)
    pos = jnp.maximum(jnp.arange(6)[None] - jnp.array([[0], [0], [2], [1], [0]]), -1)
    segments = jnp.array([[0, 0, 0, 1, 1, 1]] * 2 + [[0] * 6] * 3)
    visibility = Visibility.of(pos[:1]) if one_row else Visibility.of(pos, segments)

    def bias(q_pos, k_pos):
        return -0.5 * jnp.abs(q_pos[:, None, :, None] - k_pos[:, None, None, :]).astype(jnp.float32)

    def both(q, k, v):
        def loss(*qkv):
            y = kernel.attend(*qkv, visibility, scale=0.3, bias=bias, **knobs)
            return (y * jnp.arange(y.size).reshape(y.shape)).sum(), y

        (_, y), slopes = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return y, *slopes

    want = jax.jit(both)(*arrays)
    monkeypatch.setattr(kernel, "PART_BYTES", 5 * 4 * 6 * 6 * 4 // 2)
    parted = jax.jit(lambda *arrays: both(*arrays))  # traced anew
    text = parted.lower(*arrays).as_text()
    assert "tensor<2x4x6x6xf32>" in text and "tensor<3x4x6x6xf32>" in text
    for got, known in zip(parted(*arrays), want, strict=True):
        np.testing.assert_allclose(got, known, rtol=1e-5, atol=1e-5)
    cached = visibility.replace(cached=True)
    assert (
        kernel.in_parts(*arrays[:2], visibility) == 2 and kernel.in_parts(*arrays[:2], cached) == 1
    )


def test_a_bias_is_added_to_the_scores():
    q, k, v = qkv()

    def bias(q_pos, k_pos):
        return -0.5 * jnp.abs(q_pos[:, None, :, None] - k_pos[:, None, None, :]).astype(jnp.float32)

    y = attend(q, k, v, Visibility.full(2, 6), scale=8**-0.5, bias=bias)
    distance = np.abs(np.subtract.outer(np.arange(6), np.arange(6)))
    bias_BNTS = np.broadcast_to(-0.5 * distance, (2, 4, 6, 6))
    np.testing.assert_allclose(y, reference.attention(q, k, v, bias_BNTS=bias_BNTS), atol=1e-6)


@pytest.mark.parametrize(("bias", "want"), [(0.0, 2.746068), (1.0, 2.898432)])
def test_scores_are_scaled_capped_biased_and_masked_in_this_order(bias, want):
    """By hand: q k is 8 for the second key, 2 tanh(0.5 * 8 / 2) = 1.928055; values are 1 and 3.

    Capped before scaled it would be 1 (2.462), capped after masked the first query would see 3.
    """
    q, k, v = (jnp.array(x).reshape(1, 2, 1, 1) for x in ([1.0, 1.0], [0.0, 8.0], [1.0, 3.0]))
    y = attend(
        q,
        k,
        v,
        Visibility.full(1, 2),
        scale=0.5,
        softcap=2.0,
        bias=lambda q_pos, k_pos: bias * k_pos[:, None, None, :].astype(jnp.float32),
    )
    np.testing.assert_allclose(y[0, :, 0, 0], [1.0, want], atol=1e-5)


@pytest.mark.parametrize("K", [1, 2, 4])
def test_softcap_and_sinks_equal_the_formula(K):
    q, k, v = qkv(K=K)
    knobs = {"softcap": 0.7, "sinks_N": np.linspace(-1.0, 2.0, 4)}
    want = reference.attention(q, k, v, **knobs)
    y = run(q, k, v, Visibility.full(2, 6), **KNOBS[1])
    np.testing.assert_allclose(y, want, atol=1e-6)
    assert not np.allclose(y, run(q, k, v, Visibility.full(2, 6)), atol=1e-2)


def test_query_heads_share_key_heads_in_runs():  # N09: 0,0,1,1 and not 0,1,0,1
    v = jnp.broadcast_to(jnp.array([1.0, 2.0])[None, None, :, None], (1, 3, 2, 8))
    y = run(jnp.zeros((1, 3, 4, 8)), jnp.zeros((1, 3, 2, 8)), v, Visibility.full(1, 3))
    assert y[0, :, :, 0].tolist() == [[1, 1, 2, 2]] * 3


@pytest.mark.parametrize(
    ("window", "want"),
    [
        (1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (4, [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5]),
        (8, [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]),
        (100, [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]),
    ],
)
def test_a_window_of_w_keys_has_w_keys(window, want):  # N07
    zeros = jnp.zeros((1, 8, 1, 8))
    v = jnp.broadcast_to(jnp.arange(8.0)[None, :, None, None], (1, 8, 1, 8))
    y = run(zeros, zeros, v, Visibility.full(1, 8).replace(window=window))
    np.testing.assert_allclose(y[0, :, 0, 0], want, atol=1e-6)


@pytest.mark.parametrize("knobs", KNOBS, ids=["plain", "capped"])
def test_a_query_that_sees_nothing_gives_zero_and_finite_gradients(knobs):
    q, k, v = qkv()
    visibility = Visibility.of(jnp.array([[-1, -1, 0, 1, 2, 3]] * 2))
    assert not run(q, k, v, visibility, **knobs)[:, :2].any()
    loss = jax.grad(lambda *qkv: (run(*qkv, visibility, **knobs) ** 2).sum(), argnums=(0, 1, 2))
    for grad in loss(q, k, v):
        assert np.isfinite(grad).all() and not grad[:, :2].any() and grad[:, 2:].any()


@pytest.mark.parametrize("knobs", KNOBS, ids=["plain", "capped"])
@pytest.mark.parametrize("rubbish", [np.nan, np.inf, 1e4])
def test_empty_slots_have_no_influence(rubbish, knobs):
    q, k, v = qkv()
    visibility = Visibility.of(jnp.array([[0, 1, 2, 3, -1, -1]] * 2))
    want = run(q, k, v, visibility, **knobs)
    k, v = k.at[:, 4:].set(rubbish), v.at[:, 4:].set(rubbish)
    assert np.array_equal(run(q, k, v, visibility, **knobs), want)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("rubbish", [0.0, np.nan, -np.inf, 1e4])
@pytest.mark.parametrize("queries", [2, 40])
def test_no_back_end_lets_empty_slots_of_a_cache_count(backend, rubbish, queries):
    probs, v = jnp.asarray(draw(4, queries, 6)), jnp.asarray(draw(4, 6, 8, seed=1))
    pos = jnp.array([[0, 1, 2, -1, -1, -1], [-1, 0, 1, 2, 3, -1]])
    filled = np.repeat(np.asarray(pos) >= 0, 2, axis=0)
    probs = jnp.where(filled[:, None], probs, 0)
    want = np.einsum("jqs,jsp->jqp", probs, np.where(filled[..., None], v, 0))
    v = jnp.where(filled[..., None], v, rubbish)
    cached = Visibility.of(pos[:, :1]).onto(pos)
    np.testing.assert_allclose(kernel._mixed(probs, v, cached, backend), want, atol=1e-5)


@pytest.mark.parametrize("knobs", KNOBS, ids=["plain", "capped"])
def test_scores_far_apart_stay_finite(knobs):
    q, k, v = qkv()
    y = run(1e4 * q, 1e4 * k, v, Visibility.full(2, 6), **knobs)
    assert np.isfinite(y).all()


def test_attention_over_4096_equal_keys_sums_to_one_in_bfloat16():
    one = jnp.ones((1, 4096, 1, 8), jnp.bfloat16)
    last = Visibility(jnp.full((1, 1), 4095), jnp.arange(4096)[None])
    y = run(jnp.zeros((1, 1, 1, 8), jnp.bfloat16), one, one, last)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), 1, atol=1e-3)


def test_dropout_keeps_half_and_doubles_it():  # T09
    x = jnp.ones((200, 200))
    y = dropout(x, 0.5, jax.random.key(0))
    assert set(np.unique(y)) == {0.0, 2.0}
    assert abs(float((y > 0).mean()) - 0.5) < 0.02
    assert (y != dropout(x, 0.5, jax.random.key(1))).any()
    assert dropout(x.astype(jnp.bfloat16), 0.3, jax.random.key(0)).dtype == jnp.bfloat16


def test_dropout_without_a_key_or_a_rate_is_the_identity():
    x = jnp.ones((3, 3))
    assert dropout(x, 0.5, None) is x and dropout(x, 0.0, jax.random.key(0)) is x


def test_dropout_falls_on_the_probabilities_behind_the_tap():
    q, k, v = qkv()
    seen = {}

    def tap(name, x):
        seen[name] = x
        return x

    call = functools.partial(kernel.attend, q, k, v, Visibility.full(2, 6), scale=1.0)
    y = call(dropout_rate=0.5, dropout_key=jax.random.key(0), tap=tap)
    np.testing.assert_allclose(seen["probs"].sum(-1), 1, atol=1e-5)
    assert not np.allclose(y, call())


@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_derivative_of_the_softmax_is_that_of_its_formula(with_sinks):
    scores, up = jax.random.normal(jax.random.key(0), (2, 2, 3, 4, 4))
    seen = jnp.tril(jnp.ones((1, 1, 4, 4), bool)).at[..., 0, :].set(False)  # one sees nothing
    sinks = jnp.array([0.3, -1.0, 2.0]).reshape(1, 3, 1, 1) if with_sinks else None

    def gradients(softmax):
        return jax.grad(lambda *given: (softmax(given[0], seen, given[1]) * up).sum(), (0, 1))(
            scores, sinks
        )

    plain = gradients(lambda *given: kernel._shares(*given)[0])
    pairs = map(jax.tree.leaves, (gradients(kernel._softmax), plain))
    for got, want in zip(*pairs, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("knobs", KNOBS, ids=["plain", "capped"])
def test_parts_stay_parts_when_looked_at_or_patched(knobs, monkeypatch):
    """Three programs, one result to the bit; the scores are whole only where they are looked at."""
    qkv_4, visibility = qkv(B=4), Visibility.full(4, 6)
    monkeypatch.setattr(kernel, "PART_BYTES", 1)

    def run(arrays, look=(), put=None):
        seen = {}

        def tap(name, x):
            seen.update({name: x} if name in look else {})
            return (put or {}).get(name, x)

        asked = tap if look or put else None
        y = kernel.attend(*arrays, visibility, scale=0.3, tap=asked, **knobs)
        return y, seen

    sites = ("scores", "probs")
    plain = jax.jit(run)
    text = plain.lower(qkv_4).as_text()
    assert "tensor<2x4x6x6xf32>" in text and "tensor<4x4x6x6xf32>" not in text
    want, _ = plain(qkv_4)
    got, seen = jax.jit(run, static_argnames="look")(qkv_4, sites)
    assert np.array_equal(got, want) and seen["probs"].shape == (4, 4, 6, 6)
    assert np.all((seen["probs"].sum(-1) < 0.999) == ("sinks_N" in knobs))
    put_back = jax.jit(lambda arrays, put: run(arrays, put=put)[0])
    for site in sites:
        assert np.array_equal(put_back(qkv_4, {site: seen[site]}), want), site
        assert not np.allclose(put_back(qkv_4, {site: seen[site][::-1]}), want)
