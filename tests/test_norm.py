# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxgpt.boxes.norm import LayerNorm, NoNorm, RMSNorm, _normalised
from jaxgpt.errors import ConfigError

X = jnp.asarray(np.random.default_rng(0).normal(3, 2, (2, 5, 16)), jnp.float32)
SCALE, BIAS = jnp.linspace(0.5, 2, 16), jnp.linspace(-1, 1, 16)


def norm(box, x=X, **params):
    return box.build().apply({"params": params}, x)


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_layer_norm_equals_the_formula(eps):
    want = reference.layer_norm(np.asarray(X, float), np.asarray(SCALE), np.asarray(BIAS), eps)
    np.testing.assert_allclose(norm(LayerNorm(eps), scale=SCALE, bias=BIAS), want, atol=2e-6)
    want = reference.layer_norm(np.asarray(X, float), np.asarray(SCALE), 0, eps)
    np.testing.assert_allclose(norm(LayerNorm(eps, use_bias=False), scale=SCALE), want, atol=2e-6)


@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_rms_norm_equals_the_formula(eps):
    want = reference.rms_norm(np.asarray(X, float), np.asarray(SCALE), eps)
    np.testing.assert_allclose(norm(RMSNorm(eps), scale=SCALE), want, atol=2e-6)


def test_one_plus_equals_the_formula():
    want = reference.rms_norm(np.asarray(X, float), 1 + np.asarray(BIAS, float))
    np.testing.assert_allclose(norm(RMSNorm(one_plus=True), scale=BIAS), want, atol=4e-6)


def test_no_norm_is_the_identity():
    assert np.array_equal(norm(NoNorm()), X)


@pytest.mark.parametrize(
    ("box", "fresh"),
    [
        (LayerNorm(), {"bias": 0, "scale": 1}),
        (LayerNorm(use_bias=False), {"scale": 1}),
        (RMSNorm(), {"scale": 1}),
        (RMSNorm(one_plus=True), {"scale": 0}),
        (NoNorm(), {}),
    ],
    ids=repr,
)
def test_fresh_parameters_are_ones_and_zeros(box, fresh):
    params = box.build().init(jax.random.key(0), X).get("params", {})
    assert params.keys() == fresh.keys()
    for name, vector in params.items():
        assert vector.shape == (16,) and (vector == fresh[name]).all()


def test_statistics_are_in_float32():
    x = jnp.asarray(X, jnp.bfloat16) + 100  # the mean of squares needs more than 8 bits
    want = reference.layer_norm(np.asarray(x, float))
    got = norm(LayerNorm(use_bias=False), x, scale=jnp.ones(16))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=2e-2)


def test_rms_norm_casts_before_it_multiplies():  # N06, the Llama order
    x, scale = jnp.array([[1.0, 2, 3, 4]], jnp.bfloat16), jnp.full(4, 1.01)
    y = reference.rms_norm(np.array([[1.0, 2, 3, 4]]))
    want = jnp.asarray(y, jnp.bfloat16) * jnp.asarray(scale, jnp.bfloat16)[None]
    assert np.array_equal(norm(RMSNorm(), x, scale=scale), want)


def test_one_plus_multiplies_before_it_casts():  # N06, the Gemma order
    x = jnp.array([[1.0, 2, 3, 4]], jnp.bfloat16)
    y = norm(RMSNorm(one_plus=True), x, scale=jnp.full(4, 0.01))
    assert y.dtype == jnp.bfloat16
    want = [0.36914, 0.73828, 1.10938, 1.47656]
    np.testing.assert_allclose(y[0].astype(jnp.float32), want, atol=1e-5)
    llama = norm(RMSNorm(), x, scale=jnp.full(4, 1.01))
    assert not np.array_equal(llama, y)


@pytest.mark.parametrize("box", [LayerNorm(), RMSNorm(), RMSNorm(one_plus=True)], ids=repr)
def test_the_scale_of_the_input_does_not_matter(box):
    params = box.build().init(jax.random.key(0), X)["params"]
    np.testing.assert_allclose(norm(box, 100 * X, **params), norm(box, **params), atol=1e-4)


@pytest.mark.parametrize("box", [LayerNorm, RMSNorm])
def test_eps_must_be_positive(box):
    with pytest.raises(ConfigError, match=r"eps=0\.0 must be positive"):
        box(eps=0.0)


def test_the_derivative_is_that_of_the_formula():
    x, dx, eps = *jax.random.normal(jax.random.key(0), (2, 3, 8)), 1e-2

    def formula(x):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps)

    got = jax.jvp(lambda x: _normalised(x, eps), (x,), (dx,))
    for a, b in zip(got, jax.jvp(formula, (x,), (dx,)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    back = jax.vjp(lambda x: _normalised(x, eps), x)[1](dx)[0]
    np.testing.assert_allclose(back, jax.vjp(formula, x)[1](dx)[0], rtol=1e-5, atol=1e-6)
