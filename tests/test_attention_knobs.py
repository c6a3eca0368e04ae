# SPDX-License-Identifier: Apache-2.0
"""What the parity families ask of GQA beside heads: scale, softcap, sinks, norms of q and k."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.norm import LayerNorm, RMSNorm
from jaxgpt.boxes.position import NoPosition
from jaxgpt.errors import ConfigError
from jaxgpt.masks import Visibility
from jaxgpt.testing import quick_jit, tiny

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 16)), jnp.float32)
GROUPED = functools.partial(GQA, n_heads=4, n_kv_heads=2, use_bias=False)


def built(box):
    return box.build(tiny(position=NoPosition(), attention=box).dims())


def fresh(box):
    """The module and its fresh parameters."""
    module = built(box)
    return module, quick_jit(module.init)(jax.random.key(0), X, Visibility.full(2, 6))["params"]


def drawn(box):
    """The module and parameters of which no two are alike; fresh scales are ones."""
    module, rng = built(box), np.random.default_rng(1)
    shapes = jax.eval_shape(module.init, jax.random.key(0), X, Visibility.full(2, 6))["params"]
    return module, jax.tree.map(lambda p: rng.normal(0, 0.4, p.shape).astype("f4"), shapes)


def prefilled(module, params, x=X):
    return quick_jit(module.apply)({"params": params}, x, Visibility.full(*x.shape[:2]))[0]


def decoded(module, params, x=X):
    """The outputs of one token after the other."""
    (B, T, _), ys, step = x.shape, [], quick_jit(module.apply)
    cache = module.box.init_cache(module.dims, B, T + 2, jnp.float32)
    for t in range(T):
        visibility = Visibility.of(jnp.full((B, 1), t))
        y, cache = step({"params": params}, x[:, t : t + 1], visibility, cache)
        ys.append(y)
    return jnp.concatenate(ys, 1)


def formula(params, norm=lambda y_BTNH, name: y_BTNH, **knobs):
    """GROUPED in NumPy, from the parameters."""
    p = jax.tree.map(lambda a: np.asarray(a, float), params)
    q, k, v = (
        reference.split(reference.dense(p[name], np.asarray(X, float)), n)
        for name, n in (("q", 4), ("k", 2), ("v", 2))
    )
    y_BTNH = reference.attention(norm(q, "q_norm"), norm(k, "k_norm"), v, **knobs)
    return reference.dense(p["out"], y_BTNH.reshape(2, 6, 16))


def assert_close(got, want):
    np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())


# --- scores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [prefilled, decoded])
@pytest.mark.parametrize(
    "knobs",
    [
        {"scale": 0.7},
        {"softcap": 1.5},
        {"sinks": True},
        {"scale": 0.7, "softcap": 1.5, "sinks": True, "window": 3},
    ],
    ids=str,
)
def test_knobs_of_the_scores_equal_the_formula(knobs, run):
    module, params = drawn(GROUPED(**knobs))
    distance = np.subtract.outer(np.arange(6), np.arange(6))
    call = {k: v for k, v in knobs.items() if k in ("scale", "softcap")}
    call["seen_TS"] = (distance >= 0) & (distance < knobs.get("window", 99))
    if "sinks" in knobs:
        assert params["sinks"].shape == (4,)
        call["sinks_N"] = np.asarray(params["sinks"], float)
    want = formula(params, **call)
    assert_close(run(module, params), want)
    plain = formula(params, seen_TS=call["seen_TS"])
    assert np.abs(plain - want).max() > 0.05 * np.abs(want).max()  # the knobs matter here


@pytest.mark.parametrize("run", [prefilled, decoded])
@pytest.mark.parametrize(("sink", "extra"), [(0.0, 1.0), (math.log(2), 2.0), (-1e4, 0.0)])
def test_a_sink_is_so_many_keys_without_a_value(sink, extra, run):
    """With equal scores, query t has t + 1 keys of one and `extra` keys of nothing."""
    module = built(GQA(n_heads=1, use_bias=False, sinks=True))
    zero, eye = {"kernel": jnp.zeros((16, 16))}, {"kernel": jnp.eye(16)}
    params = {"q": zero, "k": zero, "v": eye, "out": eye, "sinks": jnp.array([sink])}
    y = run(module, params, jnp.ones((1, 3, 16)))
    np.testing.assert_allclose(y[0, :, 0], [n / (n + extra) for n in (1, 2, 3)], atol=1e-6)


def test_fresh_sinks_are_zeros_and_are_trained():
    module, params = fresh(GROUPED(sinks=True))
    assert not params["sinks"].any()

    def size(params):
        return (module.apply({"params": params}, X, Visibility.full(2, 6))[0] ** 2).sum()

    assert (quick_jit(jax.grad(size))(params)["sinks"] < 0).all()  # a sink makes outputs smaller


def test_an_inverse_scale_undoes_larger_queries():
    module, params = drawn(GROUPED(scale=0.5 / 3))
    thrice = params | {"q": {"kernel": 3 * params["q"]["kernel"]}}
    assert_close(prefilled(module, thrice), formula(params))  # 0.5 is 4 ** -0.5, the usual one


@pytest.mark.parametrize("knob", ["scale", "softcap"])
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_factors_must_be_positive(knob, value):
    with pytest.raises(ConfigError, match=f"{knob}={value} must be positive"):
        GQA(**{knob: value})


# --- norms of queries and keys --------------------------------------------------------------------

SHAPES = {"head": [(4,), (4,)], "each_head": [(4, 4), (2, 4)], "all": [(16,), (8,)]}  # of q and k


@pytest.mark.parametrize("of", SHAPES)
@pytest.mark.parametrize(
    ("box", "norm"),
    [(RMSNorm(), reference.rms_norm), (LayerNorm(), reference.layer_norm)],
    ids=["RMSNorm", "LayerNorm"],
)
def test_norms_of_heads_equal_the_formula(of, box, norm):
    module, params = drawn(GROUPED(qk_norm=box, qk_norm_of=of))
    for name, shape in zip(("q_norm", "k_norm"), SHAPES[of], strict=True):
        assert {leaf.shape for leaf in params[name].values()} == {shape}

    def normed(y_BTNH, name):
        p = {k: np.asarray(v, float) for k, v in params[name].items()}
        y = y_BTNH.reshape(2, 6, -1) if of == "all" else y_BTNH
        return norm(y, **p).reshape(y_BTNH.shape)  # [H] or [N, H] are the last axes

    assert_close(prefilled(module, params), formula(params, normed))


def test_norms_of_heads_before_training_differ_only_in_what_they_average():
    """Of each head or of all heads with one scale: the same. Over the whole width: another."""
    ys = []
    for of in ("head", "each_head", "all"):
        module, params = fresh(GROUPED(qk_norm=RMSNorm(), qk_norm_of=of))
        assert (params["q_norm"]["scale"] == 1).all()
        ys.append(prefilled(module, params))
    np.testing.assert_allclose(ys[0], ys[1], atol=1e-6)
    assert not np.allclose(ys[0], ys[2], atol=1e-2)


def test_a_normed_query_does_not_grow_with_its_input():
    module, params = drawn(GROUPED(qk_norm=RMSNorm(), qk_norm_of="all"))
    loud = params | {"q": {"kernel": 100 * params["q"]["kernel"]}}
    np.testing.assert_allclose(prefilled(module, loud), prefilled(module, params), atol=1e-4)
