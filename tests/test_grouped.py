# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.kernels import grouped
from jaxgpt.kernels.grouped import block_rows, default_method, grouped_matmul, permute

METHODS = ["blocks", "ragged"]
SIZES = {  # rows of each group, and how many there are in all
    "even": ([4, 4, 4], 12),
    "empty groups": ([0, 7, 0, 5, 0], 12),
    "rows of no group": ([3, 0, 5], 12),
    "one group of three": ([0, 12, 0], 12),
    "no rows": ([0, 0], 5),
    "one row": ([0, 1], 1),
    "one group": ([9], 9),
    "blocks that are not full": ([70, 1, 33, 40], 150),
    "more groups than rows": ([0, 1, 0, 0, 1, 0, 1, 0], 4),
}


def draw(sizes, n_rows, inner=6, outer=10, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(n_rows, inner)), rng.normal(size=(len(sizes), inner, outer))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(sizes)


def formula(x, w, sizes):
    """Every row times every matrix, and the one of its group kept."""
    group_M = (jnp.arange(len(x))[:, None] >= jnp.cumsum(sizes)[None]).sum(1)
    hot = jax.nn.one_hot(group_M, len(w))
    return jnp.einsum("me,mi,eio->mo", hot, x, w)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SIZES)
def test_products_and_their_gradients_equal_the_formula(name, method):
    args, size = draw(*SIZES[name])[:2], jnp.asarray(SIZES[name][0])

    def loss(product):
        return lambda x, w: (jnp.sin(product(x, w)) * jnp.arange(1.0, 11.0)[None]).sum()

    got = lambda x, w: grouped_matmul(x, w, size, method)  # noqa: E731
    want = lambda x, w: formula(x, w, size)  # noqa: E731
    np.testing.assert_allclose(jax.jit(got)(*args), want(*args), atol=1e-5)
    for a, b in zip(*(jax.jit(jax.grad(loss(f), (0, 1)))(*args) for f in (got, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, abs(b).max()))


def test_gradients_of_gradients_equal_the_formula():
    x, w, size = draw([3, 0, 5], 12)

    def slope(product):  # a number that depends on both gradients
        grads = jax.grad(lambda x, w: jnp.sin(product(x, w, size)).sum(), (0, 1))
        return lambda x, w: sum(jnp.sin(g).sum() for g in grads(x, w))

    got = jax.grad(slope(lambda *args: grouped_matmul(*args, "blocks")), (0, 1))(x, w)
    for a, b in zip(got, jax.grad(slope(formula), (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, abs(b).max()))


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_no_group_are_zero_and_have_no_influence(method):
    x, w, size = draw([3, 0, 5], 12)

    def run(x):
        y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, size, method), x, w)
        return y, *back(jnp.ones_like(y).at[8:].set(x[8, 0]))

    clean, dirty = run(x), run(x.at[8:].set(jnp.nan))
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (clean[0][8:] == 0).all() and (clean[1][8:] == 0).all() and (clean[0][:8] != 0).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(16, 64), (100, 30), (256, 512)])
def test_no_row_depends_on_its_place_or_its_neighbours(dtype, inner, outer):
    """Bit for bit: where a row stands in a block follows from what other tokens choose."""
    _, w, _ = draw([1] * 3, 1, inner, outer, dtype)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(150, inner)), dtype)
    run = jax.jit(lambda x, size: grouped_matmul(x, w, size, "blocks"))
    want = run(x, jnp.array([150, 0, 0]))[0].astype(jnp.float32)
    again = jax.jit(lambda x, size: grouped_matmul(x, w[::-1], size, "blocks"))
    for place, before in [(1, 0), (31, 0), (32, 7), (90, 60), (149, 111)]:
        others = jnp.asarray(rng.normal(size=(150, inner)), dtype)
        # The row's group is the first one above and the last one here.
        size = jnp.array([before, 0, 150 - before])
        y = again(others.at[place].set(x[0]), size)
        np.testing.assert_array_equal(y[place].astype(jnp.float32), want)


@given(st.lists(st.integers(0, 90), min_size=1, max_size=9), st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_blocks_have_no_more_rows_than_said(sizes, unused):
    n_rows = max(1, sum(sizes) + unused)
    rows = grouped._rows(n_rows, len(sizes), grouped.PRODUCT_ROWS)
    assert 1 <= rows <= min(n_rows, grouped.PRODUCT_ROWS)
    used = sum(-(-size // rows) * rows for size in sizes)
    assert used <= block_rows(n_rows, len(sizes)) <= n_rows + len(sizes) * rows


@pytest.mark.parametrize("name", ["empty groups", "blocks that are not full"])
def test_what_is_multiplied_is_what_is_said(name, monkeypatch):
    x, w, size = draw(*SIZES[name])
    real, seen = jax.lax.dot_general, []

    def counting(a, b, *args, **kwargs):
        seen.append(len(a))
        return real(a, b, *args, **kwargs)

    monkeypatch.setattr(grouped.lax, "dot_general", counting)
    with jax.disable_jit():  # loops run in Python, once for each block
        grouped_matmul(x, w, size, "blocks")
    rows = grouped._rows(len(x), len(w), grouped.PRODUCT_ROWS)
    assert set(seen) == {rows}
    assert len(seen) == sum(-(-n // rows) for n in SIZES[name][0])
    assert sum(seen) <= block_rows(len(x), len(w)) < len(x) + len(w) * rows


def test_weights_of_another_dtype_are_cast_and_their_gradient_is_summed_in_float32():
    x, w, size = draw([300, 100], 400)
    ones = jnp.ones_like(x, jnp.bfloat16)
    y, back = jax.vjp(lambda w: grouped_matmul(ones, w, size, "blocks"), w)
    assert y.dtype == jnp.bfloat16
    (dw,) = back(jnp.ones_like(y))
    assert dw.dtype == jnp.float32
    assert (dw[0] == 300).all() and (dw[1] == 100).all()  # bfloat16 counts to 256


def test_blocks_on_cpu(monkeypatch):
    assert default_method() == "blocks"
    x, w, size = draw([4, 4], 8)
    assert "ragged_dot" not in str(jax.make_jaxpr(lambda *args: grouped_matmul(*args))(x, w, size))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert default_method() == "ragged"
    assert "ragged_dot" in str(jax.make_jaxpr(lambda *args: grouped_matmul(*args))(x, w, size))


def test_permutations_and_their_gradients_are_gathers():
    x = jnp.arange(12.0).reshape(4, 3)
    order = jnp.array([2, 0, 3, 1])
    inverse = jnp.argsort(order)
    y, back = jax.vjp(lambda x: permute(x, order, inverse), x)
    np.testing.assert_array_equal(y, x[order])
    np.testing.assert_array_equal(back(y)[0], x)
    assert "scatter" not in str(jax.make_jaxpr(lambda y: back(y))(y))
