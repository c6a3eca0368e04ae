# SPDX-License-Identifier: Apache-2.0
"""Where arrays live while a model is traced for a mesh of devices; without one, nothing happens.

Boxes do not know of devices. The few places that the partitioner would decide badly ask here: the
residual stream and the logits (`place`), attention heads and experts (`active`), and parameters,
which are stored in more pieces than they are used in (`use`). Which parameter is split how is the
table of `jaxgpt.train.sharding`.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxgpt.shapes import Params

ROWS = ("data", "fsdp", "expert")
"""The axes of the mesh that share the rows of a batch."""

LETTERS = {"B": ROWS, "T": "context", **dict.fromkeys("NKFV", "tensor")}
"""Axes of the mesh by the letter of a dimension; the others are whole."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and how it holds the parameters.

    Attributes:
      mesh: With the axes data, fsdp, expert, context and tensor, all of them Auto; an abstract one
        for shapes alone.
      stored: How each parameter is stored, by path.
      used: How each is held while it is computed with.
      narrow: Paths of those that are computed with in the dtype of the computation.
    """

    mesh: Mesh | AbstractMesh
    stored: Mapping[str, PartitionSpec]
    used: Mapping[str, PartitionSpec]
    narrow: frozenset[str] = frozenset()

    @property
    def many(self) -> bool:
        """Whether there is more than one device."""
        return self.mesh.size > 1

    def size(self, *axes: str) -> int:
        """Devices along some axes together."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def sharding(self, *axes: str | tuple[str, ...] | None) -> NamedSharding:
        """The sharding of an array whose dimensions are split over these axes."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))


_active: ContextVar[Layout | None] = ContextVar("layout", default=None)


def active() -> Layout | None:
    """The layout that the model is traced for; None on one device."""
    return _active.get()


@contextmanager
def placing(layout: Layout | None) -> Iterator[None]:
    """Trace for this layout; enter it inside the function that is traced."""
    token = _active.set(layout if layout is not None and layout.many else None)
    try:
        yield
    finally:
        _active.reset(token)


def place(x: Array, letters: str) -> Array:
    """The array, split as `LETTERS` says, for dimensions of these letters."""
    layout = active()
    if layout is None:
        return x
    axes = (LETTERS.get(letter) for letter in letters)
    return jax.lax.with_sharding_constraint(x, layout.sharding(*axes))


def flat(x: Array) -> Array:
    """The array with its leading axes in one, but where that would gather tokens."""
    layout = active()
    if layout is not None and layout.size("context") > 1:
        return x
    return x.reshape(-1, x.shape[-1])


def use(params: Params, prefix: str = "", dtype: DTypeLike | None = None) -> Params:
    """Parameters as they are computed with: gathered from the devices that share their storage.

    Their gradients go straight back into pieces. Call it where the whole should begin to exist: for
    all at once, or for a block inside the scan or the recomputation that it belongs to.

    They come as float32 and are gathered in the dtype of the computation, where their box casts
    them to it anyhow: with bfloat16 devices send each other half as much. What comes out is float32
    again, of these values, so that gradients are added up as if nothing had been cast.

    Args:
      params: A dict of parameters or of dicts.
      prefix: Its path in the whole tree, `block_3/`; parameters without an entry are left alone.
      dtype: Of the computation; None: that of the parameters.
    """
    layout = active()
    if layout is None:
        return params

    def gather(path: tuple, x: Array) -> Array:
        name = prefix + jax.tree_util.keystr(path, simple=True, separator="/")
        stored, used = layout.stored.get(name), layout.used.get(name)
        if stored is None or used is None or stored == used:
            return x
        sent = jnp.dtype(dtype) if dtype is not None and name in layout.narrow else x.dtype
        return _gathered(x, layout.sharding(*stored), layout.sharding(*used), sent)

    return jax.tree_util.tree_map_with_path(gather, params)


def _gathered(x: Array, stored: NamedSharding, used: NamedSharding, sent: jnp.dtype) -> Array:
    """The array in another sharding; its gradient, summed into pieces, in the first one."""

    @jax.custom_vjp
    def gathered(x: Array) -> Array:
        if sent == x.dtype:
            return jax.lax.with_sharding_constraint(x, used)
        # Said on both sides of the cast: else it may be the wide array that travels.
        narrow = jax.lax.with_sharding_constraint(x.astype(sent), stored)
        return jax.lax.with_sharding_constraint(narrow, used).astype(x.dtype)

    def fwd(x: Array) -> tuple[Array, None]:
        return gathered(x), None

    def bwd(_: None, dx: Array) -> tuple[Array]:
        return (jax.lax.with_sharding_constraint(dx, stored),)

    gathered.defvjp(fwd, bwd)
    return gathered(x)
