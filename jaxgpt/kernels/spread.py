# SPDX-License-Identifier: Apache-2.0
"""Attention on a mesh: each device runs a kernel on its own rows and heads, and nothing is sent.

The partitioner would gather heads where a kernel reshapes them, and cannot look into fused kernels.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxgpt.kernels.reference import ScoreBias
from jaxgpt.masks import Visibility
from jaxgpt.placing import ROWS, Layout, active

TENSOR, CONTEXT = "tensor", "context"


def spread(
    kernel: Callable[..., Array],
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKP: Array,
    visibility: Visibility,
    *,
    bias: ScoreBias | None = None,
    sinks_N: Array | None = None,
    **options: Any,
) -> Array:
    """`kernel` with these arguments, split over the mesh of the active layout, if there is one.

    Queries stay where their tokens are, and meet all keys. With fewer key/value heads than devices
    along `tensor`, each of these takes the one that its query heads read. Where rows, tokens or
    heads do not divide, the partitioner decides.

    Args:
      kernel: An attention kernel, as in `jaxgpt.kernels.dispatch`.
      q_BTNH: Queries.
      k_BSKH: Keys.
      v_BSKP: Values.
      visibility: Who sees whom.
      bias: Scores to add, for all heads.
      sinks_N: Logits of the sinks.
      **options: Passed on.
    """
    more = {"bias": bias, "sinks_N": sinks_N}
    more = {name: value for name, value in more.items() if value is not None}
    layout = active()
    n_heads, kv_heads = q_BTNH.shape[2], k_BSKH.shape[2]
    if layout is None or not _divides(layout, q_BTNH, kv_heads):
        return kernel(q_BTNH, k_BSKH, v_BSKP, visibility, **more, **options)
    parts = layout.size(TENSOR)
    shared = kv_heads % parts != 0  # several devices read one key/value head

    def local(q: Array, k: Array, v: Array, visibility: Visibility, sinks: Array | None) -> Array:
        part = jax.lax.axis_index(TENSOR)
        if shared:
            head = part * kv_heads // parts
            k, v = (jax.lax.dynamic_slice_in_dim(x, head, 1, axis=2) for x in (k, v))
        if layout.size(CONTEXT) > 1:
            visibility = dataclasses.replace(visibility, plain=False)
        mine: dict[str, Any] = {} if sinks is None else {"sinks_N": sinks}
        if bias is not None:
            mine["bias"] = _of_heads(bias, part, n_heads // parts)
        return kernel(q, k, v, visibility, **mine, **options)

    rows, queries = PartitionSpec(ROWS), PartitionSpec(ROWS, CONTEXT)
    heads = PartitionSpec(ROWS, CONTEXT, TENSOR)
    kv = rows if shared else PartitionSpec(ROWS, None, TENSOR)
    seen = jax.tree_util.tree_map_with_path(
        lambda path, _: queries if path[0].name.startswith("q_") else rows, visibility
    )
    sinks = None if sinks_N is None else PartitionSpec(TENSOR)
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(heads, kv, kv, seen, sinks),
        out_specs=heads,
        check_vma=False,
    )(q_BTNH, k_BSKH, v_BSKP, visibility, sinks_N)


def _divides(layout: Layout, q_BTNH: Array, kv_heads: int) -> bool:
    (B, T, n_heads, _), parts = q_BTNH.shape, layout.size(TENSOR)
    heads = n_heads % parts == 0 and (kv_heads % parts == 0 or parts % kv_heads == 0)
    return B % layout.size(*ROWS) == 0 and T % layout.size(CONTEXT) == 0 and heads


def _of_heads(bias: ScoreBias, part: Array, n_heads: int) -> ScoreBias:
    """The bias of some heads, from that of all of them (or from one for all)."""

    def local(q_pos_BT: Array, k_pos_BS: Array) -> Array:
        scores_BNTS = bias(q_pos_BT, k_pos_BS)
        if scores_BNTS.shape[1] == 1:
            return scores_BNTS
        return jax.lax.dynamic_slice_in_dim(scores_BNTS, part * n_heads, n_heads, axis=1)

    return local
