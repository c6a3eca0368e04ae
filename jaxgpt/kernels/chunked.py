# SPDX-License-Identifier: Apache-2.0
"""Exact attention whose memory grows with T + S and not with T * S, on any device.

Queries are served in blocks, one after the other: each is a call of the reference with the keys
that it can see, and the backward pass computes it again. Whatever the reference can do, this can.
Left out: keys are not cut into blocks, so a block holds whole rows of scores.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxgpt.kernels import reference
from jaxgpt.masks import Visibility
from jaxgpt.shapes import Key, wide

BLOCK_BYTES = 2**27  # scores of one block, as long as it has more than the fewest queries
FEWEST, MOST = 16, 128  # queries of a block
TRIANGLE = 4  # runs of blocks that a causal mask without a window is cut into


def block_length(rows: int, queries: int) -> int:
    """Queries of one block.

    Args:
      rows: B * N * S: one query of all rows and heads has that many scores.
      queries: T.
    """
    length = MOST
    while length > FEWEST and 4 * rows * length > BLOCK_BYTES:
        length //= 2
    return min(length, queries)


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKP: Float[Array, "B S K P"],
    visibility: Visibility,
    *,
    dropout_key: Key | None = None,
    **options: Any,
) -> Float[Array, "B T N P"]:
    """As `reference.attend`, without its taps, and equal to it but for the order of sums.

    Dropout is drawn block by block: the same key gives the same result, but not the reference's.

    Numerics: gradients of keys and values are added up over the blocks in float32.
    Cost: forward as the reference, backward a third more, both down to 5/8 where a plain causal
      mask leaves out keys, or to (window + block) / S with a window; 4 B N S block bytes.
    Source: Rabe & Staats 2021, https://arxiv.org/abs/2112.05682, blocks of queries only.
    """
    (B, T, N, _), S = q_BTNH.shape, k_BSKH.shape[1]
    C = block_length(B * N * S, T)
    n_blocks = -(-T // C)

    def blocks(x: Array | None, fill: int) -> Array | None:
        """(b, T, ...) -> (block, b, C, ...), filled up behind T."""
        if x is None:
            return None
        filled = [(0, 0), (0, n_blocks * C - T), *[(0, 0)] * (x.ndim - 2)]
        x = jnp.pad(x, filled, constant_values=fill)
        return x.reshape(len(x), n_blocks, C, *x.shape[2:]).swapaxes(0, 1)

    q_pos, k_pos = visibility.q_pos_BT, visibility.k_pos_BS
    if visibility.plain:
        q_pos, k_pos = (jnp.arange(n)[None] for n in (T, S))
    # Wide, because their gradients are sums over blocks; each block casts them back.
    keys = wide(k_BSKH), wide(v_BSKP), k_pos, visibility.k_segment_BS
    queries = blocks(q_BTNH, 0), blocks(q_pos, -1), blocks(visibility.q_segment_BT, 0)

    def serve(index: Array, queries: Any, keys: Any) -> Array:
        (q, q_pos, q_segment), (k, v, k_pos, k_segment) = queries, keys
        seen = Visibility(q_pos, k_pos, q_segment, k_segment, visibility.prefix_B)
        seen = dataclasses.replace(seen, causal=visibility.causal, window=visibility.window)
        key = None if dropout_key is None else jax.random.fold_in(dropout_key, index)
        k, v = k.astype(k_BSKH.dtype), v.astype(v_BSKP.dtype)
        return reference.attend(q, k, v, seen, dropout_key=key, **options)

    def run(first: int, last: int, end: int, length: int) -> Array:
        """Blocks first..last - 1 over the last `length` of the keys that end with theirs."""
        some = jax.tree.map(lambda x: x[:, :end], keys)

        def block(x: Any) -> Array:
            index, queries = x
            start = jnp.maximum((index + 1) * C - length, 0)
            seen = jax.tree.map(
                lambda a: jax.lax.dynamic_slice_in_dim(a, start, length, axis=1), some
            )
            return serve(index, queries, some if length == end else seen)

        xs = jnp.arange(first, last), jax.tree.map(lambda x: x[first:last], queries)
        return jax.lax.map(jax.checkpoint(block, prevent_cse=False), xs)

    y = jnp.concatenate([run(*part) for part in _parts(visibility, n_blocks, C, S)])
    return y.swapaxes(0, 1).reshape(B, n_blocks * C, N, -1)[:, :T]


def _parts(
    visibility: Visibility, n_blocks: int, C: int, S: int
) -> Iterator[tuple[int, int, int, int]]:
    """Runs of blocks, each with the end and the number of the keys that one of its blocks needs."""
    if not (visibility.plain and visibility.causal):
        yield 0, n_blocks, S, S
    elif visibility.window is not None and C + visibility.window - 1 < S:
        yield 0, n_blocks, S, C + visibility.window - 1
    else:
        n_parts = min(TRIANGLE, n_blocks)
        for i in range(n_parts):
            first, last = (n_blocks * j // n_parts for j in (i, i + 1))
            end = min(last * C, S)
            yield first, last, end, end
