# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.shapes import rounded, wide


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_wide_is_float32(dtype):
    assert wide(jnp.ones(3, dtype)).dtype == jnp.float32


def test_a_rounded_product_is_rounded_before_the_sum():
    """In one program as in three; numpy rounds each."""
    a, b, c = np.random.default_rng(0).normal(size=(3, 64, 256)).astype(np.float32)
    got = jax.jit(lambda a, b, c: rounded(a * b) + c)(a, b, c)
    assert np.array_equal(got, a * b + c)


def test_rounded_is_the_identity():
    x = jnp.array([0.0, -0.0, 1e-40, 3.0, jnp.inf, -jnp.inf, jnp.nan])
    for y in (rounded(x), jax.jit(rounded)(x)):
        assert np.array_equal(y, x, equal_nan=True) and y.dtype == x.dtype
        assert np.array_equal(np.signbit(y[:6]), np.signbit(x[:6]))
    assert rounded(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert np.array_equal(jax.grad(lambda x: (2 * rounded(x)).sum())(x), np.full(7, 2.0))
    slope = jax.jvp(jax.grad(lambda x: rounded(x) ** 3), (jnp.float32(2.0),), (jnp.float32(1.0),))
    assert slope == (12.0, 12.0)
