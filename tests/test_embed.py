# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.embed import Embed
from jaxgpt.testing import tiny

DIMS = tiny(vocab_multiple=8).dims()  # 31 tokens, 32 rows
TABLE = jnp.arange(32 * 16.0).reshape(32, 16)


def embed(tokens, box=Embed(), **call):
    return box.build(DIMS).apply({"params": {"embedding": TABLE}}, jnp.asarray(tokens), **call)


def test_tokens_are_rows():
    assert np.array_equal(embed([[0, 30, 5]]), TABLE[jnp.array([[0, 30, 5]])])


@pytest.mark.parametrize("token", [-1, 31, 32, 1000])
def test_an_id_outside_the_vocabulary_is_nan(token):
    y = embed([[3, token]])
    assert np.isfinite(y[0, 0]).all() and np.isnan(y[0, 1]).all()


def test_the_factor_is_the_root_of_the_width_in_the_dtype_of_the_activations():  # N06
    assert np.array_equal(embed([[7]], Embed(scale=True)), 4 * embed([[7]]))
    for width, factor in ((3072, 55.5), (2048, 45.25)):
        dims, table = tiny(d_model=width).dims(), jnp.ones((128, width))
        module = Embed(scale=True).build(dims)
        y = module.apply({"params": {"embedding": table}}, jnp.array([[0]]), jnp.bfloat16)
        assert y.dtype == jnp.bfloat16 and (y == factor).all()


def test_the_compute_dtype_is_that_of_the_call_or_of_the_table():
    assert embed([[1]]).dtype == jnp.float32
    assert embed([[1]], dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_attend_multiplies_by_every_row():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16)), jnp.float32)
    y = Embed().build(DIMS).apply({"params": {"embedding": TABLE}}, x, method="attend")
    np.testing.assert_allclose(y, np.asarray(x) @ np.asarray(TABLE).T, rtol=1e-5)


def test_the_rows_past_the_vocabulary_are_fresh_zeros():
    table = Embed().build(DIMS).init(jax.random.key(0), jnp.array([[0]]))["params"]["embedding"]
    assert table.shape == (32, 16) and table[:31].all() and not table[31:].any()
