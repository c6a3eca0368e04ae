# SPDX-License-Identifier: Apache-2.0
"""Bytes of the training state on one device, by the project's own shardings of abstract arrays.

What `jaxgpt.train.sharding` would do on the mesh is done on an abstract one, leaf by leaf. Equal
layers are looked at once and counted as often as there are.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from jaxgpt.layers import LayerEdit
from jaxgpt.model import ModelConfig
from jaxgpt.study.planning.setting import Setting
from jaxgpt.train import lora as adapters
from jaxgpt.train import sharding
from jaxgpt.train.digest import by_path
from jaxgpt.train.optim import optimizer
from jaxgpt.train.step import TrainState, init_state

FLOAT = 4.0  # bytes of a parameter and of its gradient


@dataclasses.dataclass(frozen=True)
class Param:
    """A parameter, or the same one of several equal layers.

    Attributes:
      path: Of the first of them.
      layers: How many layers have it; 0 where it is in none.
      trained: Whether it gets a gradient.
      stored: Bytes of one of them on a device, float32.
      parts: Devices that it is gathered from before it is computed with; 1: nothing is gathered.
      number: Bytes of a number of it as it is sent: those of the dtype of computation where its
        box casts it.
      split: Axes of the mesh that it is gathered over.
      held: Axes that it stays split over while it is computed with.
    """

    path: str
    layers: int
    trained: bool
    stored: float
    parts: int
    number: float
    split: tuple[str, ...]
    held: tuple[str, ...]

    @property
    def times(self) -> int:
        """How many of them there are."""
        return max(self.layers, 1)

    @property
    def whole(self) -> float:
        """Bytes of one as it is computed with, in float32: of its gradient before it is split."""
        return self.stored * self.parts

    @property
    def used(self) -> float:
        """Bytes of one as it is sent and computed with."""
        return self.whole * self.number / FLOAT

    @property
    def in_block(self) -> bool:
        """Whether a layer has it."""
        return self.layers > 0


@dataclasses.dataclass(frozen=True)
class State:
    """The training state on one device, in bytes.

    Attributes:
      params: All parameters, adapters included.
      moments: Of the optimizer.
      average: The moving average of the weights.
    """

    params: tuple[Param, ...]
    moments: float
    average: float

    @functools.cached_property
    def parameters(self) -> float:
        """Of all parameters, stored."""
        return sum((p.stored * p.times for p in self.params), 0.0)

    @functools.cached_property
    def trained(self) -> float:
        """Of the parameters that get a gradient, stored: what all gradients take."""
        return sum((p.stored * p.times for p in self.params if p.trained), 0.0)


def one_of_each(cfg: ModelConfig) -> tuple[ModelConfig, list[int]]:
    """The model with one of each kind of layer, and how many of each there are."""
    kinds = Counter(cfg.layers)
    edits = tuple(LayerEdit(start=i, stop=i + 1, **vars(kind)) for i, kind in enumerate(kinds))
    return dataclasses.replace(cfg, n_layers=len(kinds), edits=edits), list(kinds.values())


def abstract_state(setting: Setting, model: ModelConfig) -> TrainState:
    """Shapes and shardings of the state of a model, on a mesh that does not exist.

    Raises:
      ConfigError: Something does not split over the mesh.
    """
    sizes = setting.sizes
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
    stored, _ = sharding.param_specs(model, sizes)
    layout = sharding.make_layout(mesh, stored, sharding.narrow_paths(model))
    optim = dataclasses.replace(setting.optim, multipliers={})  # they name layers
    tx = optimizer(optim, setting.train.steps, model.dims().width_ratio)
    ema = setting.train.ema_decay is not None
    init = functools.partial(init_state, model, tx, 0, lora=setting.lora, ema=ema)
    return sharding.state_shardings(layout, jax.eval_shape(init))


def shard_bytes(leaf: Any) -> float:
    """Of an abstract array with a sharding, on one device."""
    if not isinstance(leaf.sharding, NamedSharding):
        return float(leaf.size * leaf.dtype.itemsize)
    return float(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize)


def state_of(setting: Setting) -> State:
    """The state of a run on one device; quick, and for models of any size.

    Raises:
      ConfigError: Something does not split over the mesh, or `vocab_size` is None.
    """
    one, counts = one_of_each(setting.model)
    abstract = abstract_state(setting, one)
    narrow = sharding.narrow_paths(one)

    def layers(path: str) -> int:
        block = re.search(r"block_(\d+)/", path)
        return counts[int(block[1])] if block else 0

    def total(tree: Any) -> float:
        leaves = by_path(tree)
        return sum((shard_bytes(x) * max(layers(path), 1) for path, x in leaves.items()), 0.0)

    params = []
    for path, leaf in by_path(abstract.params).items():
        axes = [axis for entry in leaf.sharding.spec for axis in _names(entry) if entry is not None]
        held = [entry for entry in leaf.sharding.spec if isinstance(entry, str)]
        size = setting.sizes
        split = tuple(axis for axis in axes if axis not in held and size[axis] > 1)
        params.append(
            Param(
                path=path,
                layers=layers(path),
                trained=setting.lora.rank is None or path.startswith(f"{adapters.NAME}/"),
                stored=shard_bytes(leaf),
                parts=math.prod(size[axis] for axis in split),
                number=setting.number if path in narrow and split else FLOAT,
                split=split,
                held=tuple(axis for axis in held if size[axis] > 1),
            )
        )
    return State(
        params=tuple(params),
        moments=total(abstract.opt_state),
        average=total(abstract.extra.get("ema", {})),
    )


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
