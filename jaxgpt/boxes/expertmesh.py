# SPDX-License-Identifier: Apache-2.0
"""Experts on a mesh: each device works with its share of them, on the tokens of its neighbours.

Devices along `expert` gather each other's tokens, run the experts that they hold on the choices
that fall to these, and send the sums back: shapes do not depend on the router, and no choice is
dropped. Sorting is local to a device, where over the whole batch it would gather all tokens.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxgpt.boxes.experts import Experts, Sorted
from jaxgpt.placing import ROWS, Layout

EXPERT, TENSOR = "expert", "tensor"


def spread_experts(
    layout: Layout,
    experts: Experts,
    params: Mapping[str, Any],
    x_BTD: Float[Array, "B T D"],
    valid_BT: Bool[Array, "B T"],
    choice_BTk: Int[Array, "B T k"],
    weight_BTk: Float[Array, "B T k"],
) -> Float[Array, "B T D"]:
    """What `Sorted` and `experts` do on one device, on a mesh.

    Args:
      layout: The mesh; its expert axis divides the experts, its tensor axis their hidden units.
      experts: The module, of the whole size, unbound.
      params: Its parameters.
      x_BTD: Tokens, zero where they are padding.
      valid_BT: False for padding.
      choice_BTk: Experts of each token.
      weight_BTk: Their weights.

    Cost: each device along `expert` gathers and scatters the tokens of all of them.
    """
    parts = layout.size(TENSOR)
    width = experts.expert.width(experts.dims) // parts
    local = Experts(
        dataclasses.replace(experts.expert, d_ff=width),
        experts.n_experts // layout.size(EXPERT),
        experts.dims,
        parent=None,
    )

    def work(params: Any, x: Array, valid: Array, choice: Array, weight: Array) -> Array:
        if layout.size(EXPERT) > 1:
            x, valid, choice, weight = (
                jax.lax.all_gather(a, EXPERT, tiled=True) for a in (x, valid, choice, weight)
            )
        here = choice - jax.lax.axis_index(EXPERT) * local.n_experts
        here = jnp.where((here >= 0) & (here < local.n_experts), here, local.n_experts)
        way = Sorted.of(here, valid, local.n_experts)
        y: Any = local.apply(
            {"params": _once(params)}, way.rows(x), way.multiply, lambda hidden: hidden
        )
        y = jax.lax.psum(way.combine(y, weight), TENSOR) if parts > 1 else way.combine(y, weight)
        if layout.size(EXPERT) > 1:
            y = jax.lax.psum_scatter(y, EXPERT, tiled=True)
        return y

    rows = PartitionSpec(ROWS, "context")
    specs = jax.tree_util.tree_map_with_path(lambda path, leaf: _spec(path, leaf.ndim), params)
    return jax.shard_map(
        work,
        mesh=layout.mesh,
        in_specs=(specs, rows, rows, rows, rows),
        out_specs=rows,
        check_vma=False,
    )(params, x_BTD, valid_BT, choice_BTk, weight_BTk)


def _spec(path: Any, ndim: int) -> PartitionSpec:
    """Experts over their axis; hidden units over `tensor`, which are the rows of `down`."""
    if path[0].key != "down":
        return PartitionSpec(EXPERT, *[None] * (ndim - 2), TENSOR)
    return PartitionSpec(EXPERT, TENSOR if ndim == 3 else None)


def _once(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The bias of the sums over hidden units counts on one of the devices that share these."""
    down = params["down"]
    if "bias" not in down:
        return params
    first = jax.lax.axis_index(TENSOR) == 0
    return {**params, "down": {**down, "bias": jnp.where(first, down["bias"], 0)}}
