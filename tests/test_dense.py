# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.dense import Dense, padded
from jaxgpt.boxes.init import TorchDefault
from jaxgpt.testing import tiny

DIMS = tiny().dims()


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 4, 3)])
@pytest.mark.parametrize("use_bias", [True, False])
def test_multiplies_the_last_axis(shape, use_bias):
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    y, variables = Dense(5, DIMS, use_bias).init_with_output(jax.random.key(0), x)
    params = variables["params"]
    assert params["kernel"].shape == (3, 5) and set(params) == {"kernel", "bias"} - (
        set() if use_bias else {"bias"}
    )
    np.testing.assert_allclose(y, np.asarray(x) @ np.asarray(params["kernel"]), atol=1e-5)


def test_the_bias_is_added():
    params = {"kernel": jnp.eye(3), "bias": jnp.array([1.0, 2, 3])}
    y = Dense(3, DIMS).apply({"params": params}, jnp.ones((2, 2, 3)))
    assert (y == jnp.array([2.0, 3, 4])[None, None]).all()


def test_parameters_stay_in_float32_and_the_product_in_the_dtype_of_x():
    x = jnp.ones((2, 3), jnp.bfloat16)
    y, variables = Dense(5, DIMS).init_with_output(jax.random.key(0), x)
    assert y.dtype == jnp.bfloat16
    assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(variables))


def test_padding_is_zero_behind_the_same_true_kernel():
    dims = tiny(init=TorchDefault()).dims()
    x = jnp.ones((2, 3))
    true = Dense(5, dims).init(jax.random.key(0), x)["params"]
    wide = Dense(5, dims, padding=3).init(jax.random.key(0), x)["params"]
    for name in ("kernel", "bias"):
        assert np.array_equal(wide[name][..., :5], true[name]) and true[name].any()
        assert wide[name].shape[-1] == 8 and not wide[name][..., 5:].any()


def test_an_initialiser_without_padding_is_itself():
    init = jax.nn.initializers.ones
    assert padded(init, (0, 0)) is init
