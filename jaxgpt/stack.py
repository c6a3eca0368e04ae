# SPDX-License-Identifier: Apache-2.0
"""The stack of blocks for training: recomputed in the backward pass, scanned where it repeats.

Blocks are called as functions of their own parameters, which stay one set per layer: a scan stacks
them inside the compiled step, so that checkpoints and parameter paths do not know of it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxgpt.masks import Visibility
from jaxgpt.placing import place, use
from jaxgpt.shapes import Key, Params

Aux = dict[str, Array]
Remat = Literal["none", "dots", "full"]
"""What the backward pass computes again instead of reading what the forward pass kept.

none: nothing. dots: all but the products of activations with weights, the bulk of the work, so that
norms, activation functions and attention are computed twice. full: all of a block but its input.
"""


@dataclasses.dataclass(frozen=True)
class Stack:
    """Blocks of a model with all that they share.

    Attributes:
      build: Index of a layer -> its block.
      params: Parameters of each layer.
      visibility: Who sees whom.
      dropout_key: The model's; layer i gets fold(key, i), scanned or not.
      remat: What the backward pass computes again.
    """

    build: Callable[[int], nn.Module]
    params: Sequence[Params]
    visibility: Visibility
    dropout_key: Key | None
    remat: Remat

    def run(self, x_BTD: Array, layers: Sequence[Any] | None) -> tuple[Array, list[Aux]]:
        """All layers in order; a scan goes over the `repeating_unit` of `layers`, if given."""
        unit = None if layers is None else repeating_unit(layers)
        prefix, width, repeats = unit or (len(self.params), 1, 0)
        aux: list[Aux] = []
        for i in range(prefix):
            x_BTD, out = self._call(i, self.params[i], x_BTD, i)
            aux.append(out)
        if repeats:
            x_BTD, outs = self._scan(x_BTD, prefix, width, repeats)
            aux += [jax.tree.map(lambda a, r=r: a[r], out) for r in range(repeats) for out in outs]
        for i in range(prefix + width * repeats, len(self.params)):
            x_BTD, out = self._call(i, self.params[i], x_BTD, i)
            aux.append(out)
        return x_BTD, aux

    def _scan(self, x_BTD: Array, prefix: int, width: int, repeats: int) -> tuple[Array, list[Aux]]:
        """The repeating layers; each entry of aux has a leading axis of repeats."""

        def body(x_BTD: Array, repeat: tuple[list[Params], Array]) -> tuple[Array, list[Aux]]:
            params, first = repeat
            outs = []
            for j in range(width):
                x_BTD, out = self._call(prefix + j, params[j], x_BTD, first + j)
                outs.append(out)
            return x_BTD, outs

        stop = prefix + width * repeats
        stacked = [
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *self.params[prefix + j : stop : width])
            for j in range(width)
        ]
        return jax.lax.scan(body, x_BTD, (stacked, jnp.arange(prefix, stop, width)))

    def _call(
        self, like: int, params: Params, x_BTD: Array, index: int | Array
    ) -> tuple[Array, Aux]:
        """The block of layer `like`, with the parameters and dropout of layer `index`."""

        def call(params: Params, x_BTD: Array, key: Key | None) -> tuple[Array, Aux]:
            block, params = self.build(like), use(params, f"block_{like}/", x_BTD.dtype)
            x_BTD, _, aux = block.apply({"params": params}, x_BTD, self.visibility, None, key)  # type: ignore[misc]
            return place(x_BTD, "BTD"), aux

        if self.remat != "none":
            policies = jax.checkpoint_policies
            kept = {
                "dots": policies.dots_with_no_batch_dims_saveable,
                "full": policies.nothing_saveable,
            }
            call = jax.checkpoint(call, policy=kept[self.remat])
        return call(params, x_BTD, fold(self.dropout_key, index))


def repeating_unit(layers: Sequence[Any]) -> tuple[int, int, int] | None:
    """(prefix, width, repeats) that covers most: behind a prefix, `width` layers `repeats` times.

    Ties go to the shorter unit. None where nothing repeats.
    """
    n, best = len(layers), None
    for width in range(1, n // 2 + 1):
        for prefix in range(n - 2 * width + 1):
            first = tuple(layers[prefix : prefix + width])
            repeats = 1
            while tuple(layers[prefix + repeats * width :][:width]) == first:
                repeats += 1
            if repeats > 1 and (best is None or repeats * width > best[1] * best[2]):
                best = (prefix, width, repeats)
    return best


def used(
    params: Params,
    *,
    dtype: DTypeLike | None = None,
    remat: Remat = "none",
    scan: bool = False,
    **_: Any,
) -> Params:
    """`jaxgpt.placing.use` of a model's parameters; without blocks where `Stack` does theirs."""
    stacked = scan or remat != "none"
    blocks = {k: v for k, v in params.items() if k.startswith("block_") and stacked}
    others = {k: v for k, v in params.items() if k not in blocks}
    return {**use(others, dtype=dtype), **blocks}


def fold(key: Key | None, index: int | Array) -> Key | None:
    """The key of one part, or None without a key."""
    return None if key is None else jax.random.fold_in(key, index)
