# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix multiplication: rows sorted by group, each times the matrix of its group.

`jax.lax.ragged_dot` does it on GPU and TPU. On CPU that multiplies every row by every matrix, so
there the rows of each group are cut into blocks, which are multiplied one after the other: the work
does not grow with the number of groups, but for one block each that is not full. Left out: who
sorts the rows, which is `boxes/moe.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

Method = Literal["blocks", "ragged"]

# Rows of a block, at most: on a CPU with AVX-512 more rows did not make the product faster, and
# fewer leave less of the last block of a group empty. The sum over rows of the backward pass adds
# a whole matrix for each block, so it takes more rows at a time.
PRODUCT_ROWS, SUM_ROWS = 32, 64


def default_method() -> Method:
    """What `grouped_matmul` uses on the default device."""
    return "blocks" if jax.default_backend() == "cpu" else "ragged"


def grouped_matmul(
    x_MI: Float[Array, "M I"],
    w_EIO: Float[Array, "E I O"],
    size_E: Int[Array, " E"],
    method: Method | None = None,
) -> Float[Array, "M O"]:
    """Row m of x times the matrix of its group: the first size_E[0] rows are of group 0, and so on.

    Rows behind the last group give zero and have no influence, NaN included. With "blocks" no row
    depends, bit for bit, on what stands in the others or on how many are of its group.

    Args:
      x_MI: Rows, sorted by group.
      w_EIO: A matrix for each group; cast to the dtype of x.
      size_E: Rows of each group; their sum is at most M.
      method: "blocks" or "ragged" (`jax.lax.ragged_dot`); None: by the device.

    Numerics: in the dtype of x; with "blocks" the gradient of w is summed in float32.
    Cost: with "blocks" `block_rows` rows at most are multiplied by I * O numbers each, and the
      matrices of groups without rows are not read.
    Gradients: with "blocks" in reverse mode only, of any order; with "ragged" of first order, which
      is how far JAX's go.
    """
    if (method or default_method()) == "blocks":
        return _product(x_MI, w_EIO, size_E, False)
    inside_M1 = (jnp.arange(len(x_MI)) < size_E.sum())[:, None]
    # Selected before and after: what comes out for rows of no group, and what their gradient is,
    # is not said anywhere.
    y_MO = lax.ragged_dot(jnp.where(inside_M1, x_MI, 0), w_EIO.astype(x_MI.dtype), size_E)
    return jnp.where(inside_M1, y_MO, 0)


def block_rows(n_rows: int, n_groups: int) -> int:
    """Most rows that the blocks of a product have together, full or not, whatever the sizes."""
    rows = _rows(n_rows, n_groups, PRODUCT_ROWS)
    return (n_rows + min(n_rows, n_groups) * (rows - 1)) // rows * rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x_MI: Array, w_EIO: Array, size_E: Array, transposed: bool) -> Array:
    """Rows times the matrices, or times the transposed ones; block after block."""
    rows = _rows(len(x_MI), len(w_EIO), PRODUCT_ROWS)
    inner, width = (1, w_EIO.shape[1]) if transposed else (0, w_EIO.shape[2])

    def group(e: Array, start: Array, stop: Array, y_MO: Array) -> Array:
        w_IO = lax.dynamic_index_in_dim(w_EIO, e, keepdims=False).astype(x_MI.dtype)

        def block(i: Array | int, y_MO: Array) -> Array:
            first, mine_r1 = _place(start + i * rows, stop, rows, len(x_MI))
            x_rI = lax.dynamic_slice_in_dim(x_MI, first, rows)
            new_rO = lax.dot_general(x_rI, w_IO, (((1,), (inner,)), ((), ())))
            old_rO = lax.dynamic_slice_in_dim(y_MO, first, rows)
            new_rO = jnp.where(mine_r1, new_rO, old_rO)
            return lax.dynamic_update_slice_in_dim(y_MO, new_rO, first, 0)

        return lax.fori_loop(0, -(-(stop - start) // rows), block, y_MO)

    return _each_group(size_E, group, jnp.zeros((len(x_MI), width), x_MI.dtype))


@jax.custom_vjp
def _summed(x_MI: Array, y_MO: Array, size_E: Array) -> Array:
    """For each group the sum over its rows of x_m^T y_m, (E, I, O) in float32."""
    rows = _rows(len(x_MI), len(size_E), SUM_ROWS)
    dtype = jnp.promote_types(x_MI.dtype, jnp.float32)

    def group(e: Array, start: Array, stop: Array, sum_EIO: Array) -> Array:
        def block(i: Array | int, sum_IO: Array) -> Array:
            first, mine_r1 = _place(start + i * rows, stop, rows, len(x_MI))
            x_rI, y_rO = (
                jnp.where(mine_r1, lax.dynamic_slice_in_dim(a, first, rows), 0)
                for a in (x_MI, y_MO)
            )
            product = functools.partial(lax.dot_general, preferred_element_type=dtype)
            return sum_IO + product(x_rI, y_rO, (((0,), (0,)), ((), ())))

        zero_IO = jnp.zeros(sum_EIO.shape[1:], dtype)
        sum_IO = lax.fori_loop(0, -(-(stop - start) // rows), block, zero_IO)
        return lax.dynamic_update_index_in_dim(sum_EIO, sum_IO, e, 0)

    shape = (len(size_E), x_MI.shape[1], y_MO.shape[1])
    return _each_group(size_E, group, jnp.zeros(shape, dtype))


# The two are bilinear, and each is the other's gradient; loops of unknown length have none of
# their own.


def _product_fwd(x_MI: Array, w_EIO: Array, size_E: Array, transposed: bool) -> tuple[Array, Any]:
    return _product(x_MI, w_EIO, size_E, transposed), (x_MI, w_EIO, size_E)


def _product_bwd(transposed: bool, saved: tuple, dy_MO: Array) -> tuple[Any, Any, None]:
    x_MI, w_EIO, size_E = saved
    left_right = (dy_MO, x_MI) if transposed else (x_MI, dy_MO)
    dw_EIO = _summed(*left_right, size_E).astype(w_EIO.dtype)
    return _product(dy_MO, w_EIO, size_E, not transposed), dw_EIO, None


def _summed_fwd(x_MI: Array, y_MO: Array, size_E: Array) -> tuple[Array, Any]:
    return _summed(x_MI, y_MO, size_E), (x_MI, y_MO, size_E)


def _summed_bwd(saved: tuple, dsum_EIO: Array) -> tuple[Any, Any, None]:
    x_MI, y_MO, size_E = saved  # both of one dtype
    dx_MI = _product(y_MO, dsum_EIO, size_E, True)
    return dx_MI, _product(x_MI, dsum_EIO, size_E, False), None


_product.defvjp(_product_fwd, _product_bwd)
_summed.defvjp(_summed_fwd, _summed_bwd)


def _each_group(
    size_E: Array, body: Callable[[Array, Array, Array, Array], Array], start: Array
) -> Array:
    """Fold `body(group, its first row, the row behind its last, carry)` over groups with rows."""
    filled_E = jnp.argsort(size_E == 0, stable=True)  # those with rows first
    stop_E = jnp.cumsum(size_E)

    def step(i: Array | int, carry: Array) -> Array:
        e = filled_E[i]
        return body(e, stop_E[e] - size_E[e], stop_E[e], carry)

    return lax.fori_loop(0, (size_E > 0).sum(), step, start)


def _place(at: Array, stop: Array, rows: int, n_rows: int) -> tuple[Array, Array]:
    """Where to cut a block that begins at row `at`, and which of its rows are meant: (rows, 1).

    The last block of all may begin earlier than asked, so as not to pass the end.
    """
    first = jnp.minimum(at, n_rows - rows)
    row_r1 = first + jnp.arange(rows)[:, None]
    return first, (row_r1 >= at) & (row_r1 < stop)


def _rows(n_rows: int, n_groups: int, most: int) -> int:
    """Rows of a block: as many as a group has in the mean, at most `most`."""
    return min(most, -(-n_rows // n_groups))


# --- sorting --------------------------------------------------------------------------------------


@jax.custom_vjp
def permute(
    x_MI: Float[Array, "M I"], order_M: Int[Array, " M"], inverse_M: Int[Array, " M"]
) -> Float[Array, "M I"]:
    """x[order], for a permutation and its inverse; its gradient is a gather, not a scatter."""
    return x_MI[order_M]


def _permute_fwd(x_MI: Array, order_M: Array, inverse_M: Array) -> tuple[Array, Any]:
    return permute(x_MI, order_M, inverse_M), (order_M, inverse_M)


def _permute_bwd(saved: tuple, dy_MI: Array) -> tuple[Array, None, None]:
    order_M, inverse_M = saved
    return permute(dy_MI, inverse_M, order_M), None, None


permute.defvjp(_permute_fwd, _permute_bwd)
