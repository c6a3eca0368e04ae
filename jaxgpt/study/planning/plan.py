# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: does it fit, what is the largest batch, what would make it fit, what it costs.

plan = make_plan(Setting(model, optim, train, mesh, chip("h100")), tokens=300e9, price=2.5)
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxgpt.errors import ConfigError
from jaxgpt.flops import count_active_params
from jaxgpt.study.planning.memory import Memory, step_memory
from jaxgpt.study.planning.setting import Setting
from jaxgpt.study.planning.state import State, state_of
from jaxgpt.study.planning.timing import Efficiency, Step, step_time

RESERVE = 0.1
"""Of a device's memory, for the runtime, libraries and what fragments leave unused."""
MOST_ROWS = 1 << 20
DAY_S = 86_400.0
HINT = 20
"""Tokens for each parameter. Source: Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556"""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run needs.

    Attributes:
      setting: The run.
      memory: Of a device at the worst moment.
      available: Bytes of a device that may be used.
      largest: Rows of a batch, over all devices, that fit; 0: not even one a device.
      fixes: Options that would make it fit where it does not, and the bytes then.
      step: Its time.
      tokens: To train on; None: not asked.
      price: Of a device for an hour; None: not asked.
    """

    setting: Setting
    memory: Memory
    available: float
    largest: int
    fixes: tuple[tuple[str, float], ...]
    step: Step
    tokens: float | None = None
    price: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the batch that was asked for does."""
        return self.memory.bytes <= self.available

    @property
    def days(self) -> float | None:
        """To all tokens, without evaluation, checkpoints and failures."""
        return None if self.tokens is None else self.tokens / self.step.tokens_per_s / DAY_S

    @property
    def cost(self) -> float | None:
        """Of all devices for so many days."""
        if self.days is None or self.price is None:
            return None
        return self.days * 24 * self.price * self.setting.devices

    @property
    def hint_tokens(self) -> float:
        """The tokens that would be compute-optimal for the parameters."""
        return float(HINT * count_active_params(self.setting.model))


def make_plan(
    setting: Setting,
    *,
    memory_bytes: float | None = None,
    reserve: float = RESERVE,
    efficiency: Efficiency | None = None,
    tokens: float | None = None,
    price: float | None = None,
) -> Plan:
    """Plan a run; about a second, whatever the size of the model.

    Args:
      setting: The run.
      memory_bytes: Of a device; None: what its maker says.
      reserve: Share of it that is left alone.
      efficiency: Of the rates; None: that of the platform.
      tokens: To train on.
      price: Of a device for an hour.

    Raises:
      ConfigError: The batch, or something of the model, does not split over the mesh.
    """
    available = (memory_bytes or setting.chip.memory_bytes) * (1 - reserve)
    state = state_of(setting)
    memory = step_memory(setting, state)
    rows = largest_rows(setting, state, available)
    fits = memory.bytes <= available
    return Plan(
        setting=setting,
        memory=memory,
        available=available,
        largest=rows * setting.groups * setting.train.accumulate,
        fixes=() if fits else tuple(_fixes(setting, state, available)),
        step=step_time(setting, state, efficiency),
        tokens=tokens,
        price=price,
    )


def largest_rows(setting: Setting, state: State, available: float) -> int:
    """The most rows of a micro-batch on each device that fit; one more does not. 0: none do."""

    def fits(rows: int) -> bool:
        return step_memory(setting, state, rows).bytes <= available

    low, high = 0, 1
    while high <= MOST_ROWS and (fits(high) or (low == 0 and high < 4)):
        low, high = (high if fits(high) else low), 2 * high
    if low == 0:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _fixes(setting: Setting, state: State, available: float) -> Iterator[tuple[str, float]]:
    """The changes by which it fits, cheapest first: at most two, of different kinds."""
    found = 0
    for options, changed in _changes(setting):
        try:
            same = changed.mesh == setting.mesh
            needs = step_memory(changed, state if same else state_of(changed)).bytes
        except ConfigError:  # it does not split so
            continue
        if needs <= available:
            yield options, needs
            found += 1
            if found == 2:
                return


def _changes(setting: Setting) -> Iterator[tuple[str, Setting]]:
    """Ways to need less, those that cost least time first."""
    train, rows, T = setting.train, setting.rows, setting.model.context_length
    for parts in (n for n in (2, 4, 8, 16, 32, 64) if n <= rows and rows % n == 0):
        yield _with(setting, accumulate=train.accumulate * parts)
    smaller: dict[str, Any] = {}
    if rows > 1:
        smaller["accumulate"] = train.accumulate * rows
    if train.loss_chunk is None and T > 128:
        smaller["loss_chunk"] = 128
        yield _with(setting, **smaller)
    scan = {} if train.scan else {"scan": True}
    for remat in ("dots", "full"):
        if remat != train.remat:
            yield _with(setting, remat=remat, **smaller, **scan)
    smaller |= {"remat": "full", **scan}
    for axis in ("fsdp", "tensor"):
        for factor in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
            more = {axis: setting.sizes[axis] * factor}
            words, changed = _with(setting, **smaller)
            mesh = dataclasses.replace(setting.mesh, **more)
            changed = dataclasses.replace(changed, mesh=mesh)
            changed = _splitting(changed)
            batch = changed.train.batch_size
            if batch != train.batch_size:
                words += f" --train.batch_size={batch}"
            yield f"--mesh.{axis}={more[axis]} {words}".strip(), changed


def _with(setting: Setting, **train: Any) -> tuple[str, Setting]:
    """The setting with other options of training, and these as words."""
    words = " ".join(f"--train.{k}={str(v).lower()}" for k, v in train.items())
    new = dataclasses.replace(setting.train, **train, batch_sizes=None)
    return words, dataclasses.replace(setting, train=new)


def _splitting(setting: Setting) -> Setting:
    """With one row for each device where the batch would not split."""
    unit = setting.groups
    if setting.train.batch_size % unit == 0 and setting.train.batch_size >= unit:
        accumulate = min(setting.train.accumulate, setting.train.batch_size // unit)
        if setting.train.batch_size % (unit * accumulate) == 0:
            train = dataclasses.replace(setting.train, accumulate=accumulate)
            return dataclasses.replace(setting, train=train)
    train = dataclasses.replace(setting.train, batch_size=unit, accumulate=1)
    return dataclasses.replace(setting, train=train)
