# SPDX-License-Identifier: Apache-2.0
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.position import NoPosition
from jaxgpt.boxes.rope import RoPE
from jaxgpt.errors import ConfigError
from jaxgpt.masks import Visibility
from jaxgpt.testing import quick_jit, tiny

PLAIN = GQA(n_heads=4, use_bias=False)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 16)), jnp.float32)


def fresh(box, position=NoPosition(), **around):
    module = box.build(tiny(position=position, attention=box, **around).dims())
    params = module.init(jax.random.key(0), X, Visibility.full(2, 6))["params"]
    return module, params


def run(module, params, x=X, visibility=None, cache=None):
    visibility = Visibility.full(*x.shape[:2]) if visibility is None else visibility
    return quick_jit(module.apply)({"params": params}, x, visibility, cache)


def exact(tree):
    return jax.tree.map(lambda p: np.asarray(p, float), tree)


def test_one_head_equals_the_numpy_of_the_note():
    module, params = fresh(GQA(n_heads=1, use_bias=False))
    params["out"]["kernel"] = jnp.eye(16)
    w_q, w_k, w_v = (exact(params[name]["kernel"]) for name in "qkv")
    want = reference.note_self_attention(exact(X), w_q, w_k, w_v)
    np.testing.assert_allclose(run(module, params)[0], want, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("n_kv_heads", [None, 2, 1])
@pytest.mark.parametrize(("use_bias", "head_dim"), [(True, None), (False, 6)])
def test_many_heads_equal_the_formula(n_kv_heads, use_bias, head_dim):
    box = GQA(n_heads=4, n_kv_heads=n_kv_heads, use_bias=use_bias, head_dim=head_dim)
    module, params = fresh(box)
    params = jax.tree.map(lambda p: p + 0.1, params)  # biases are fresh zeros
    p, (K, H) = exact(params), (n_kv_heads or 4, head_dim or 4)
    q, k, v = (
        reference.dense(p[name], exact(X)).reshape(2, 6, n, H)
        for name, n in (("q", 4), ("k", K), ("v", K))
    )
    want = reference.dense(p["out"], reference.attention(q, k, v).reshape(2, 6, 4 * H))
    np.testing.assert_allclose(run(module, params)[0], want, atol=2e-6 * np.abs(want).max())


def test_head_norms_and_rotations_come_before_the_scores():
    module, params = fresh(GQA(n_heads=4, qk_norm=RMSNorm(), use_bias=False), RoPE())
    params["q_norm"]["scale"] = jnp.array([1.0, 2.0, 0.5, 1.0])
    p, pos = exact(params), jnp.broadcast_to(jnp.arange(6), (2, 6))

    def rotated(name):
        x = reference.dense(p[name], exact(X)).reshape(2, 6, 4, 4)
        x = reference.rms_norm(x, p[f"{name}_norm"]["scale"])
        return exact(RoPE().rotate(jnp.asarray(x, jnp.float32), pos))

    v = reference.dense(p["v"], exact(X)).reshape(2, 6, 4, 4)
    y = reference.attention(rotated("q"), rotated("k"), v).reshape(2, 6, 16)
    want = reference.dense(p["out"], y)
    np.testing.assert_allclose(run(module, params)[0], want, atol=2e-6 * np.abs(want).max())


def test_as_many_key_heads_as_query_heads_is_multi_head_attention():
    module, params = fresh(PLAIN)
    same = dataclasses.replace(PLAIN, n_kv_heads=4).build(module.dims)
    assert np.array_equal(run(module, params)[0], run(same, params)[0])


@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_grouped_heads_equal_repeated_key_heads(n_kv_heads):  # N09
    module, params = fresh(dataclasses.replace(PLAIN, n_kv_heads=n_kv_heads))
    full = dict(params)
    for name in "kv":
        kernel = params[name]["kernel"].reshape(16, n_kv_heads, 4)
        full[name] = {"kernel": jnp.repeat(kernel, 4 // n_kv_heads, axis=1).reshape(16, 16)}
    want = run(PLAIN.build(module.dims), full)[0]
    np.testing.assert_allclose(run(module, params)[0], want, atol=1e-5)


@pytest.mark.parametrize("decode", [False, True])
def test_query_heads_share_key_heads_in_runs(decode):  # N09
    box = GQA(n_heads=4, n_kv_heads=2, use_bias=False)
    module, params = fresh(box)
    values = jnp.repeat(jnp.array([1.0, 2.0]), 4)
    params = {
        "q": {"kernel": jnp.zeros((16, 16))},
        "k": {"kernel": jnp.zeros((16, 8))},
        "v": {"kernel": jnp.broadcast_to(values / 16, (16, 8))},
        "out": {"kernel": jnp.eye(16)},
    }
    ones = jnp.ones((1, 3, 16))
    cache = box.init_cache(module.dims, 1, 5, jnp.float32)
    assert cache.k_BSKH.shape == (1, 5, 2, 4)  # K heads, not N
    if decode:
        y = decoded(module, params, ones, cache)
    else:
        y = run(module, params, ones)[0]
    np.testing.assert_allclose(y[0, :, ::4], [[1, 1, 2, 2]] * 3, atol=1e-6)


def decoded(module, params, x, cache):
    """The outputs of one token after the other."""
    ys, step = [], quick_jit(module.apply)
    for t in range(x.shape[1]):
        visibility = Visibility.of(jnp.full((1, 1), t))
        y, cache = step({"params": params}, x[:, t : t + 1], visibility, cache)
        ys.append(y)
    return jnp.concatenate(ys, 1)


@pytest.mark.parametrize(
    ("window", "want"),
    [
        (1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (4, [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5]),
        (8, [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]),
        (100, [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]),
        (None, [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]),
    ],
)
def test_a_window_in_prefill_and_in_decoding(window, want):  # N07
    module, params = counting(GQA(n_heads=1, use_bias=False, window=window))
    x = jnp.broadcast_to(jnp.arange(8.0)[None, :, None], (1, 8, 16))
    np.testing.assert_allclose(run(module, params, x)[0][0, :, 0], want, atol=1e-5)
    cache = module.box.init_cache(module.dims, 1, 9, jnp.float32)
    np.testing.assert_allclose(decoded(module, params, x, cache)[0, :, 0], want, atol=1e-5)


def counting(box):
    """Attention with equal scores whose values are its inputs."""
    module, _ = fresh(box)
    zero, eye = {"kernel": jnp.zeros((16, 16))}, {"kernel": jnp.eye(16)}
    return module, {"q": zero, "k": zero, "v": eye, "out": eye}


def test_one_token_decoding_sees_all_keys():  # S05
    module, params = counting(GQA(n_heads=1, use_bias=False))
    x = jnp.broadcast_to(jnp.array([1.0, 2, 3])[None, :, None], (1, 3, 16))
    cache = module.box.init_cache(module.dims, 1, 3, jnp.float32)
    np.testing.assert_allclose(decoded(module, params, x, cache)[0, :, 0], [1, 1.5, 2], atol=1e-6)


def test_without_positions_and_mask_attention_is_permutation_equivariant():
    module, params = fresh(PLAIN)
    order = jnp.array([3, 0, 5, 1, 4, 2])
    free = Visibility.full(2, 6).replace(causal=False)
    y, _ = run(module, params, X, free)
    shuffled, _ = run(module, params, X[:, order], free)
    np.testing.assert_allclose(shuffled, y[:, order], atol=1e-5)
    causal = run(module, params)[0]
    assert not np.allclose(run(module, params, X[:, order])[0], causal[:, order], atol=1e-2)


def test_an_output_bias_may_differ_from_the_others():
    for use_bias, use_out_bias, want in ((True, False, "qkv"), (False, True, ("out",))):
        _, params = fresh(GQA(n_heads=4, use_bias=use_bias, use_out_bias=use_out_bias))
        assert {name for name, p in params.items() if "bias" in p} == set(want)


def test_heads_must_divide_the_width():  # E2
    match = (
        r"d_model=16 is not divisible by n_heads=3 \(layer 0\); fix: n_heads of \[1, 2, 4, 8, 16\]"
    )
    with pytest.raises(ConfigError, match=match):
        tiny(attention=GQA(n_heads=3))
    tiny(attention=GQA(n_heads=3, head_dim=5))


def test_key_heads_must_divide_heads():  # E2
    match = r"n_heads=6 is not divisible by n_kv_heads=4; fix: n_kv_heads of \[1, 2, 3, 6\]"
    with pytest.raises(ConfigError, match=match):
        GQA(n_heads=6, n_kv_heads=4)


@pytest.mark.parametrize("knob", ["n_heads", "n_kv_heads", "head_dim", "window"])
@pytest.mark.parametrize("value", [0, -2])
def test_sizes_must_be_positive(knob, value):  # E3
    with pytest.raises(ConfigError, match=f"{knob}={value} must be positive"):
        GQA(**{knob: value})


def test_the_norm_of_heads_is_checked_too():
    @dataclasses.dataclass(frozen=True)
    class Picky(RMSNorm):
        def check(self, dims):
            raise ConfigError("never")

    with pytest.raises(ConfigError, match="never"):
        tiny(attention=GQA(n_heads=4, qk_norm=Picky()))
