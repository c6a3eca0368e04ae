# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.head import Tied, Untied
from jaxgpt.errors import ConfigError
from jaxgpt.model import param_shapes
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
        y = module.apply({"params": {"embedding": table}}, jnp.array([[0]]))
        np.testing.assert_allclose(y, width**0.5, rtol=1e-6)  # of 3072: 55.4256


def test_the_compute_dtype_is_that_of_the_call_or_of_the_table():
    assert embed([[1]]).dtype == jnp.float32
    assert embed([[1]], dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_attend_multiplies_by_every_row():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16)), jnp.float32)
    y = Embed().build(DIMS).apply({"params": {"embedding": TABLE}}, x, method="attend")
    np.testing.assert_allclose(y, np.asarray(x) @ np.asarray(TABLE).T, rtol=1e-5)


def test_a_table_of_another_width_is_projected_and_back():  # OPT-350M
    rng = np.random.default_rng(0)
    table, into, out = (rng.normal(size=s).astype("f4") for s in ((32, 6), (6, 16), (16, 6)))
    params = {"embedding": table, "project_in": {"kernel": into}, "project_out": {"kernel": out}}
    module = Embed(width=6, scale=True).build(DIMS)
    tokens = np.array([[0, 30, 5]])
    y = module.apply({"params": params}, jnp.asarray(tokens))
    np.testing.assert_allclose(y, 4 * table[tokens] @ into, rtol=1e-4, atol=1e-4)
    x = jnp.asarray(rng.normal(size=(2, 3, 16)), jnp.float32)
    logits = module.apply({"params": params}, x, method="attend")
    np.testing.assert_allclose(logits, np.asarray(x) @ out @ table.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("head", "names"),
    [
        (Tied(), ["embedding", "project_in", "project_out"]),
        (Untied(), ["embedding", "project_in"]),
    ],
    ids=repr,
)
def test_the_way_back_is_there_where_a_head_takes_it(head, names):
    shapes = param_shapes(tiny(embed=Embed(width=6), head=head))
    assert sorted(shapes["embed"]) == names
    assert shapes["embed"]["embedding"].shape == (128, 6)
    if isinstance(head, Untied):
        assert shapes["head"]["out"]["kernel"].shape == (16, 128)


def test_the_width_of_the_model_needs_no_projection():
    assert list(param_shapes(tiny(embed=Embed(width=16)))["embed"]) == ["embedding"]
    with pytest.raises(ConfigError, match="width=0 must be positive"):
        Embed(width=0)


def test_the_rows_past_the_vocabulary_are_fresh_zeros():
    table = Embed().build(DIMS).init(jax.random.key(0), jnp.array([[0]]))["params"]["embedding"]
    assert table.shape == (32, 16) and table[:31].all() and not table[31:].any()
