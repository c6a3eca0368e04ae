# SPDX-License-Identifier: Apache-2.0
"""Where arrays live on the mesh: one table of parameter paths, and what follows from it.

    python train.py --mesh.fsdp=4 --mesh.tensor=2

Rows of a batch are split over `data`, `fsdp` and `expert`, their tokens over `context` (keys and
values are gathered: Llama Team 2024, section 3.3.2, https://arxiv.org/abs/2407.21783). A parameter
is stored in pieces and used in larger ones: what is split over `fsdp` (Zhao et al. 2023,
https://arxiv.org/abs/2304.11277; Rajbhandari et al. 2019, ZeRO-3, https://arxiv.org/abs/1910.02054)
is gathered before it is used, and what is split over `tensor` (Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053) or `expert` (Lepikhin et al. 2020,
https://arxiv.org/abs/2006.16668) is not. Moments are stored as the parameter that they belong to.

Left out: pipeline parallelism.
"""

import fnmatch
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig, param_shapes
from jaxgpt.placing import ROWS, Layout, placing
from jaxgpt.train.config import MeshConfig
from jaxgpt.train.digest import by_path

AXES = ("data", "fsdp", "expert", "context", "tensor")  # neighbours in `tensor` are close

GATHERED = ("fsdp", "expert", "context")  # stored over all of them, whole when it is used
SPREAD = (*GATHERED, "tensor")  # the same, where tensor parallelism has no use for pieces

TABLE: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("embed/embedding", ("tensor", GATHERED)),
    ("embed/project_*/kernel", (SPREAD, None)),
    ("position/embedding", (None, SPREAD)),
    ("head/out/kernel", (GATHERED, "tensor")),
    ("block/attention/*_down/kernel", (SPREAD, None)),  # to MLA's latents
    ("block/attention/out/kernel", ("tensor", GATHERED)),
    ("block/attention/*/kernel", (GATHERED, "tensor")),  # q, k, v; of MLA q, q_up and kv_up
    ("block/ffn/router/kernel", (SPREAD, None)),
    ("block/ffn/experts/down/kernel", ("expert", "tensor", ("fsdp", "context"))),
    ("block/ffn/experts/down/bias", ("expert", None)),
    ("block/ffn/experts/*/kernel", ("expert", ("fsdp", "context"), "tensor")),
    ("block/ffn/experts/*/bias", ("expert", "tensor")),
    ("block/ffn/*down/kernel", ("tensor", GATHERED)),  # shared/down too
    ("block/ffn/*/kernel", (GATHERED, "tensor")),
)
"""Pattern of a path -> axes of the mesh for each dimension, the first match; block is any of them.

A tuple of axes is gathered when the parameter is used, a single name is not, None is whole. Vectors
(biases, scales, sinks) are whole everywhere: they are few, and too short to be worth a message.
"""


WIDE = ("block/ffn/router/kernel",)
"""Patterns of ours that are computed with in float32, and so are gathered in it too."""


def make_mesh(cfg: MeshConfig) -> Mesh:
    """All devices, of all processes, arranged as `cfg` says.

    Axes are Auto: flax's modules do not run under the Explicit axes that are jax's default. Axes of
    size 1 stay, so that the table holds for every mesh.

    Raises:
      ConfigError: The product of the axes is not the number of devices.
    """
    devices, inner = jax.device_count(), cfg.fsdp * cfg.expert * cfg.context * cfg.tensor
    data = cfg.data if cfg.data is not None else max(devices // inner, 1)
    if data * inner != devices:
        axes = " x ".join(f"{name}={getattr(cfg, name) or data}" for name in AXES)
        fits = devices // inner if devices % inner == 0 else 0
        others = f"the product of the others a divisor of {devices}"
        raise ConfigError(
            f"the mesh {axes} is for {data * inner} devices, and there are {devices}",
            fix=f"--mesh.data={fits}" if fits else others,
        )
    sizes = data, cfg.fsdp, cfg.expert, cfg.context, cfg.tensor
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def param_specs(
    model: ModelConfig, sizes: Mapping[str, int]
) -> tuple[dict[str, PartitionSpec], list[str]]:
    """How parameters are stored, by path, and those whose box does not say.

    The latter are of boxes of one's own that have no attribute `sharding`, a dict of the last part
    of a path -> axes as in `TABLE`; they are split over fsdp along their largest dimension that
    divides.

    Args:
      model: The model.
      sizes: Devices along each axis of the mesh.

    Raises:
      ConfigError: A dimension, or the heads, do not split over the devices of their axis; or a
        parameter of ours is not in the table.
    """
    stored: dict[str, PartitionSpec] = {}
    guessed = []
    for path, leaf in by_path(param_shapes(model)).items():
        axes = _declared(path, model)
        if axes is None and leaf.ndim > 1:
            axes = _guess(sizes, leaf.shape)
            guessed.append(path)
        stored[path] = _checked(sizes, path, leaf.shape, axes or ())
    if model.context_length % sizes["context"]:
        fits = [n for n in range(1, sizes["context"] + 1) if model.context_length % n == 0]
        raise ConfigError(
            f"context_length={model.context_length} does not split over context={sizes['context']}",
            fix=f"--mesh.context one of {fits}",
        )
    for layer in model.layers:
        _check_heads(sizes["tensor"], layer.attention)
    return stored, guessed


def narrow_paths(model: ModelConfig) -> frozenset[str]:
    """Paths of parameters whose box casts them to the dtype of the computation: ours, but `WIDE`.

    What a box of one's own does with its parameters is not known.
    """
    named = {path: _name(path, model) for path in by_path(param_shapes(model))}
    return frozenset(
        path
        for path, name in named.items()
        if name is not None and not any(fnmatch.fnmatchcase(name, wide) for wide in WIDE)
    )


def make_layout(
    mesh: Mesh | AbstractMesh,
    stored: Mapping[str, PartitionSpec],
    narrow: frozenset[str] = frozenset(),
) -> Layout:
    """The layout of parameters that are stored so; `narrow` as from `narrow_paths`."""
    used = {
        path: PartitionSpec(*(axis if isinstance(axis, str) else None for axis in spec))
        for path, spec in stored.items()
    }
    return Layout(mesh, stored, used, narrow)


def state_shardings(layout: Layout, abstract: Any) -> Any:
    """`abstract` (shapes) with a sharding on each leaf.

    A leaf whose path ends in that of a parameter of the same shape (its moments, its mean) is
    stored like it, the others are whole. jit would otherwise put optimizer moments, which depend on
    no input, on one device.
    """
    shapes = {path: leaf.shape for path, leaf in by_path(abstract.params).items()}
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)

    def with_sharding(path: Any, leaf: Any) -> Any:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        for start in range(len(names)):
            param = "/".join(names[start:])
            if param in layout.stored and shapes.get(param) == leaf.shape:
                sharding = NamedSharding(layout.mesh, layout.stored[param])
                break
        else:
            sharding = NamedSharding(layout.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_unflatten(tree, [with_sharding(*pair) for pair in leaves])


def placed(function: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """A function to jit, traced for the layout."""

    def traced(*args: Any) -> Any:
        with placing(layout):
            return function(*args)

    return traced


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch and their tokens over the axes that share them."""
    return NamedSharding(mesh, PartitionSpec(ROWS, "context"))


def check_rows(batch_size: int, accumulate: int, sizes: Mapping[str, int]) -> None:
    """Each micro-batch must split evenly over the devices that share the rows.

    Args:
      batch_size: Rows of a batch.
      accumulate: Micro-batches that it is split into.
      sizes: Devices along each axis of the mesh.

    Raises:
      ConfigError: It does not; the message gives the nearest sizes that do.
    """
    groups = math.prod(sizes[axis] for axis in ROWS)
    unit = accumulate * groups
    if batch_size % unit:
        below, above = batch_size // unit * unit, -(-batch_size // unit) * unit
        choices = " or ".join(str(n) for n in (below, above) if n)
        raise ConfigError(
            f"batch_size={batch_size} does not split over {groups} devices"
            + (f" in {accumulate} micro-batches" if accumulate > 1 else ""),
            fix=f"--train.batch_size={choices}",
        )


# --- the table, read ------------------------------------------------------------------------------


def _declared(path: str, model: ModelConfig) -> tuple[Any, ...] | None:
    """Axes of a parameter by the table, or by the box that it belongs to; None: nobody says."""
    name = _name(path, model)
    rules: Mapping[str, tuple[Any, ...]] = dict(TABLE)
    if name is None:
        declared = getattr(_owner(path, model)[0], "sharding", {})
        rules = {f"*{suffix}": axes for suffix, axes in declared.items()}
    for pattern, axes in rules.items():
        if fnmatch.fnmatchcase(name or path, pattern):
            return axes
    if name is None or name.rpartition("/")[2] not in ("kernel", "embedding"):
        return None if name is None else ()
    raise ConfigError(f"{path} is not in the sharding table", where="jaxgpt/train/sharding.py")


def _name(path: str, model: ModelConfig) -> str | None:
    """A path as patterns have it, of any block; None where a foreign box owns the parameter."""
    owner, rest = _owner(path, model)
    if type(owner).__module__.partition(".")[0] != __name__.partition(".")[0]:
        return None
    return "block/" + rest if path.startswith("block_") else path


def _owner(path: str, model: ModelConfig) -> tuple[Any, str]:
    """The box that a parameter belongs to, and its path within the model or the block."""
    first, _, rest = path.partition("/")
    if not first.startswith("block_"):
        return getattr(model, first, None), path
    layer = model.layers[int(first.removeprefix("block_"))]
    part = rest.partition("/")[0]
    default = layer.norm if "norm" in part else layer.block
    return getattr(layer, part, default), rest


def _guess(sizes: Mapping[str, int], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """The axes of fsdp on the largest dimension that divides; whole where none does."""
    parts = math.prod(sizes[axis] for axis in GATHERED)
    fit = [(size, -i) for i, size in enumerate(shape) if size % parts == 0]
    axes: list[Any] = [None] * len(shape)
    if fit:
        axes[-max(fit)[1]] = GATHERED
    return tuple(axes)


def _checked(
    sizes: Mapping[str, int], path: str, shape: tuple[int, ...], axes: tuple[Any, ...]
) -> PartitionSpec:
    for size, axis in zip(shape, axes, strict=False):
        names = (axis,) if isinstance(axis, str) else axis or ()
        parts = math.prod(sizes[name] for name in names)
        if size % parts:
            split = [name for name in names if sizes[name] > 1]
            over = " x ".join(f"{name}={sizes[name]}" for name in split)
            fits = [n for n in range(1, parts + 1) if size % n == 0]
            raise ConfigError(
                f"{path} has a dimension of {size}, which does not split over {over}",
                fix=f"--mesh.{' * --mesh.'.join(split)} one of {fits}",
            )
    return PartitionSpec(*axes)


def _check_heads(parts: int, attention: Any) -> None:
    """Query heads must divide; key/value heads must divide, or be divided by, the devices."""
    n_heads = getattr(attention, "n_heads", None)
    kv_heads = getattr(attention, "kv_heads", n_heads)
    if n_heads is None or kv_heads is None:
        return

    def fit(n: int) -> bool:
        return n_heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    if not fit(parts):
        raise ConfigError(
            f"n_heads={n_heads} with n_kv_heads={kv_heads} does not split over tensor={parts}",
            fix=f"--mesh.tensor one of {[n for n in range(1, n_heads + 1) if fit(n)]}",
        )
