# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxgpt.boxes.ffn import ACTIVATIONS, MLP, GatedMLP
from jaxgpt.errors import ConfigError
from jaxgpt.testing import tiny

FORMULAS = {
    "gelu": reference.gelu,
    "gelu_tanh": reference.gelu_tanh,
    "gelu_sigmoid": reference.gelu_sigmoid,
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
    "silu": reference.silu,
}
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16)), jnp.float32)


def run(box):
    module = box.build(tiny().dims())
    (y, aux), variables = module.init_with_output(jax.random.key(0), X, jnp.ones((2, 3), bool))
    assert aux == {}
    return y, jax.tree.map(lambda p: np.asarray(p, float), variables["params"])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_their_formulas(name):
    x = jnp.linspace(-6, 6, 241)
    want = FORMULAS[name](np.asarray(x, float))
    np.testing.assert_allclose(ACTIVATIONS[name](x), want, atol=1e-5)


def test_the_two_gelus_differ():
    x = jnp.linspace(-6, 6, 241)
    assert 1e-4 < np.abs(ACTIVATIONS["gelu"](x) - ACTIVATIONS["gelu_tanh"](x)).max() < 1e-3


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("use_bias", [True, False])
def test_mlp_equals_the_formula(activation, use_bias):
    y, p = run(MLP(d_ff=24, activation=activation, use_bias=use_bias))
    h = FORMULAS[activation](reference.dense(p["up"], np.asarray(X, float)))
    np.testing.assert_allclose(y, reference.dense(p["down"], h), atol=1e-5)
    assert ("bias" in p["up"]) == ("bias" in p["down"]) == use_bias


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_gated_mlp_equals_the_formula(activation, use_bias):
    y, p = run(GatedMLP(d_ff=24, activation=activation, use_bias=use_bias))
    x = np.asarray(X, float)
    h = FORMULAS[activation](reference.dense(p["gate"], x)) * reference.dense(p["up"], x)
    np.testing.assert_allclose(y, reference.dense(p["down"], h), atol=1e-5)
    assert ("bias" in p["gate"]) == use_bias


def test_a_limited_gate_by_hand():  # gpt-oss: clip, gate, then the offset
    box = GatedMLP(activation="gelu_sigmoid", limit=7.0, up_offset=1.0)
    gate, up = jnp.array([-9.0, 2.0, 8.0, 2.0]), jnp.array([1.0, 3.0, 9.0, -8.0])
    want = [0.0, 7.742634, 55.999625, -11.613952]  # of 2: 2 / (1 + e^-3.404) = 1.935659
    np.testing.assert_allclose(box.hidden(gate, up), want, atol=1e-5)


def test_limit_and_offset_equal_the_formula():
    y, p = run(GatedMLP(d_ff=24, activation="gelu_sigmoid", limit=0.5, up_offset=1.0))
    gate, up = (reference.dense(p[name], np.asarray(X, float)) for name in ("gate", "up"))
    assert (gate > 0.5).any() and (up > 0.5).any() and (up < -0.5).any() and (gate < -0.5).any()
    h = reference.gelu_sigmoid(np.minimum(gate, 0.5)) * (np.clip(up, -0.5, 0.5) + 1)
    np.testing.assert_allclose(y, reference.dense(p["down"], h), atol=1e-5)


def test_no_limit_and_no_offset_is_a_wide_limit():
    plain, wide = GatedMLP().hidden(X, X[::-1]), GatedMLP(limit=100.0).hidden(X, X[::-1])
    assert np.array_equal(plain, wide)


@pytest.mark.parametrize(("d_model", "d_ff"), [(16, 64), (96, 256), (768, 2048), (4096, 10944)])
def test_the_default_widths(d_model, d_ff):
    dims, x = tiny(d_model=d_model).dims(), jnp.zeros((1, 1, d_model))
    for box, width in ((GatedMLP(), d_ff), (MLP(), 4 * d_model)):
        init = box.build(dims).init
        shapes = jax.eval_shape(init, jax.random.key(0), x, jnp.ones((1, 1), bool))["params"]
        assert shapes["up"]["kernel"].shape == (d_model, width)
        assert shapes["down"]["kernel"].shape == (width, d_model)


@pytest.mark.parametrize("box", [MLP, GatedMLP])
def test_a_width_must_be_positive(box):
    with pytest.raises(ConfigError, match="d_ff=0 must be positive"):
        box(d_ff=0)
    with pytest.raises(ConfigError, match=r"limit=-1\.0 must be positive"):
        GatedMLP(limit=-1.0)


@pytest.mark.parametrize("name", ["gelu_tanh", "gelu"])
def test_the_slope_of_gelu_is_that_of_its_formula(name):
    x = jnp.linspace(-6, 6, 241)
    formula = lambda x: jax.nn.gelu(x, approximate=name == "gelu_tanh")  # noqa: E731
    second = lambda f: jax.grad(jax.grad(f))  # noqa: E731
    for order, atol in ((jax.grad, 5e-6), (second, 1e-4)):  # 1 - tanh^2 cancels in float32
        got, want = (jax.vmap(order(f))(x) for f in (ACTIVATIONS[name], formula))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=atol)


def test_how_close_gelu_is_to_its_formula():
    x = np.linspace(-100, 100, 400_001).astype(np.float32)
    want = reference.gelu(x.astype(float))
    np.testing.assert_allclose(jax.jit(ACTIVATIONS["gelu"])(x), want, rtol=2e-7, atol=1.1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gelu_of_narrow_numbers_is_rounded_once(dtype):
    x = jnp.linspace(-6, 6, 1001).astype(dtype)
    y = jax.jit(ACTIVATIONS["gelu"])(x)
    assert y.dtype == dtype and jax.grad(lambda x: ACTIVATIONS["gelu"](x).sum())(x).dtype == dtype
    want = reference.gelu(np.asarray(x, float))
    np.testing.assert_allclose(y.astype(float), want, rtol=float(jnp.finfo(dtype).eps), atol=1.1e-6)
