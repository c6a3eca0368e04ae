# SPDX-License-Identifier: Apache-2.0
"""What is planned: a model, how it is trained, and the devices; and what follows for one of them.

Nothing is computed and no device is started: a mesh is a table of sizes here.
"""

import dataclasses
import functools
import math

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import PositionBox
from jaxgpt.boxes.mla import MLA
from jaxgpt.costs import BYTES
from jaxgpt.errors import ConfigError
from jaxgpt.kernels.choice import Call, choose
from jaxgpt.layers import Layer
from jaxgpt.model import ModelConfig
from jaxgpt.placing import ROWS
from jaxgpt.stack import Remat, repeating_unit
from jaxgpt.study.planning.chips import Chip
from jaxgpt.train.config import LoraConfig, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.train.sharding import AXES


@dataclasses.dataclass(frozen=True)
class Setting:
    """A run on some devices.

    Attributes:
      model: Its `vocab_size` is a number.
      optim: The optimizer.
      train: `batch_size`, `accumulate`, `dtype`, `remat`, `scan`, `loss_chunk`, `kernel`,
        `ema_decay`; the rest does not matter.
      mesh: How many devices along each axis; `data` None: 1.
      chip: One device.
      lora: Adapters, where they alone are trained.
      packed: Whether documents in a row do not see each other.
    """

    model: ModelConfig
    optim: OptimConfig
    train: TrainConfig
    mesh: MeshConfig
    chip: Chip
    lora: LoraConfig = LoraConfig()
    packed: bool = False

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis of the mesh."""
        return {axis: getattr(self.mesh, axis) or 1 for axis in AXES}

    @property
    def devices(self) -> int:
        """Of the whole mesh."""
        return math.prod(self.sizes.values())

    @property
    def groups(self) -> int:
        """Devices among which the rows of a batch are split."""
        return math.prod(self.sizes[axis] for axis in ROWS)

    @property
    def number(self) -> float:
        """Bytes of a number in the dtype of computation."""
        return BYTES[self.train.dtype]

    @property
    def rows(self) -> int:
        """Rows of a micro-batch on one device.

        Raises:
          ConfigError: The batch does not split so.
        """
        unit = self.groups * self.train.accumulate
        if self.train.batch_size % unit:
            near = max(1, round(self.train.batch_size / unit)) * unit
            raise ConfigError(
                f"batch_size={self.train.batch_size} does not split over {self.groups} devices in "
                f"{self.train.accumulate} micro-batches",
                fix=f"--train.batch_size={near}",
            )
        return self.train.batch_size // unit

    def at(self, rows: int) -> "Setting":
        """The same with so many rows of a micro-batch on each device."""
        batch = rows * self.groups * self.train.accumulate
        train = dataclasses.replace(self.train, batch_size=batch, batch_sizes=None)
        return dataclasses.replace(self, train=train)

    @property
    def remat(self) -> Remat:
        """What the backward pass really computes again.

        XLA's CPU back end drops the barriers that hold a recomputation back until it is needed;
        without a scan everything is then computed again at once, and as much memory is taken as
        without.
        """
        unheld = self.chip.platform == "cpu" and self.unit is None
        return "none" if unheld else self.train.remat

    @functools.cached_property
    def unit(self) -> tuple[int, int, int] | None:
        """(prefix, width, repeats) of the scan; None without one."""
        return repeating_unit(self.model.layers) if self.train.scan else None

    @property
    def scanned(self) -> slice:
        """Layers that are scanned."""
        prefix, width, repeats = self.unit or (0, 0, 0)
        return slice(prefix, prefix + width * repeats)

    @property
    def tokens(self) -> int:
        """Of one row, on one device."""
        return self.model.context_length // self.sizes["context"]

    def kernel(self, layer: Layer, rows: int) -> str:
        """The attention kernel that a layer gets, by the rule of `jaxgpt.kernels.choice`.

        Args:
          layer: The layer.
          rows: Of a micro-batch on one device.

        Raises:
          ConfigError: The one that was asked for cannot serve it.
        """
        box, cfg = layer.attention, self.model
        if isinstance(box, GQA):
            heads, width, value = box.n_heads, box.width(cfg.dims(layer)), None
        elif isinstance(box, MLA):
            heads, width, value = box.n_heads, box.nope_dim + box.rope_dim, box.v_dim
        else:
            return "its own"
        extras = {
            "softcap": getattr(box, "softcap", None) is not None,
            "sinks": getattr(box, "sinks", False),
            "bias": type(layer.position).bias is not PositionBox.bias,
            "dropout": cfg.dropout > 0,
        }
        call = Call(
            batch=rows,
            queries=self.tokens,
            keys=cfg.context_length,
            n_heads=-(-heads // self.sizes["tensor"]),
            head_dim=width,
            value_dim=value,
            dtype=self.train.dtype,
            plain=not self.packed and self.sizes["context"] == 1,
            extras=frozenset(name for name, used in extras.items() if used),
            kernel=self.train.kernel,
            device=self.chip.platform,
            capability=self.chip.capability,
        )
        return choose(call).kernel
