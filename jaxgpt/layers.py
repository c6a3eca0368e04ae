# SPDX-License-Identifier: Apache-2.0
"""The boxes of one layer, and edits of some layers: how a stack becomes mixed."""

import dataclasses
from typing import Any

from jaxgpt.boxes.base import (
    AttentionBox,
    BlockBox,
    FFNBox,
    NormBox,
    PositionBox,
    check_positive,
)
from jaxgpt.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Layer:
    """The boxes of one block."""

    block: BlockBox
    norm: NormBox
    attention: AttentionBox
    ffn: FFNBox
    position: PositionBox


@dataclasses.dataclass(frozen=True)
class LayerEdit:
    """Replaces boxes, or fields of boxes, in layers start, start + every, ... below stop.

    `LayerEdit(every=2, start=1, set={"attention.window": 4096})` changes a field of the base box;
    `LayerEdit(start=3, ffn=GatedMLP())` replaces a box. Later edits see earlier ones.
    """

    every: int = 1
    start: int = 0
    stop: int | None = None  # None: to the last layer
    block: BlockBox | None = None
    norm: NormBox | None = None
    attention: AttentionBox | None = None
    ffn: FFNBox | None = None
    position: PositionBox | None = None  # rotation and score bias; not what the embedding gets
    set: dict[str, Any] = dataclasses.field(default_factory=dict)  # "box.field" -> value

    def __post_init__(self) -> None:
        check_positive(every=self.every)

    def __hash__(self) -> int:  # a dict is not hashable, and configs are static arguments of jit
        return hash(
            (self.every, self.start, self.stop, self.attention, self.ffn, frozenset(self.set))
        )

    def apply(self, layer: Layer, index: int) -> Layer:
        """The layer after this edit; unchanged where the edit does not reach it.

        Raises:
          ConfigError: `set` names a box or a field that is not there, or a value that is wrong.
        """
        stop = index + 1 if self.stop is None else self.stop
        if not self.start <= index < stop or (index - self.start) % self.every:
            return layer
        boxes = {f.name: getattr(self, f.name) for f in dataclasses.fields(Layer)}
        layer = dataclasses.replace(layer, **{k: v for k, v in boxes.items() if v is not None})
        for path, value in self.set.items():
            name, _, field = path.partition(".")
            box: Any = getattr(layer, name, None)
            fields = [f.name for f in dataclasses.fields(box)] if name in boxes else []
            if field not in fields:
                known = [f"{name}.{f}" for f in fields] or list(boxes)
                raise ConfigError(f"layer edit sets {path!r}", fix=f"one of {known}")
            try:
                box = dataclasses.replace(box, **{field: value})
            except ConfigError as error:
                raise ConfigError(
                    error.what, where=f"layer edit sets {path!r}", fix=error.fix
                ) from None
            layer = dataclasses.replace(layer, **{name: box})
        return layer
