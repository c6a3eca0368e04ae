# SPDX-License-Identifier: Apache-2.0
"""Configurations in which every two settings of boxes and knobs meet: a pairwise covering set.

Settings come from the dataclasses: a field that holds a box has one for each box of its kind, and
each box brings the settings of its own knobs. Two settings are a pair unless one box excludes the
other (a knob of GQA and one of MLA); a pair that a `ConfigError` forbids has to be named.

Source: Cohen et al. 1997 (AETG), https://doi.org/10.1109/32.605761: rows one at a time, each the
  best of several greedy ones.
Differs from the paper: settings of a box exist only where the box is chosen.
"""

import dataclasses
import functools
import itertools
import random
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxgpt.boxes.base import Box
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig

TRIES = 12  # greedy rows of which the best is kept
ROOT = -1  # stands for the model among the numbers of settings
ROUNDS = 10  # of tries, before a pair counts as impossible


@dataclasses.dataclass(frozen=True)
class Setting:
    """One value of one field.

    Attributes:
      field: "attention(GQA).window": the field of a box in a field of the model.
      value: The value; a class where the field holds a box.
      box: The setting that chose the box with this field; None for fields of the model.
    """

    field: str
    value: Any
    box: "Setting | None" = None

    def __str__(self) -> str:
        value = self.value.__name__ if isinstance(self.value, type) else repr(self.value)
        return f"{self.field}={value}"

    @functools.cached_property
    def chain(self) -> tuple["Setting", ...]:
        """This setting and those that it needs."""
        return (self,) if self.box is None else (*self.box.chain, self)


def settings(
    boxes: Collection[type[Box]], levels: Mapping[str, Sequence[Any]]
) -> tuple[Setting, ...]:
    """All settings of a model's fields and of the boxes in them.

    Args:
      boxes: What may be chosen.
      levels: Values by name: of a knob, "GQA.window", or of a knob of a box inside of another,
        "MoE.expert.activation", which comes first. Bools, literals and boxes need none.

    Raises:
      LookupError: A knob without values, by name.
    """
    found: list[Setting] = []

    def add(cls: type, box: Setting | None, inside: str) -> None:
        for name, hint in typing.get_type_hints(cls).items():
            if name not in {f.name for f in dataclasses.fields(cls)}:
                continue
            place = f"{box.field}({cls.__name__}).{name}" if box else name
            values = levels.get(f"{inside}.{name}") or levels.get(f"{cls.__name__}.{name}")
            values = values or automatic(hint, boxes)
            if not values:
                raise LookupError(f"no levels for {cls.__name__}.{name}, a new knob?")
            for value in values:
                found.append(Setting(place, value, box))
                nested = box and value in [s.value for s in box.chain]  # MoE in MoE: no end
                if isinstance(value, type) and not nested:
                    add(value, found[-1], f"{cls.__name__}.{name}")

    add(ModelConfig, None, "")
    return tuple(found)


def automatic(hint: Any, boxes: Collection[type[Box]]) -> list[Any]:
    """Values that follow from the type of a field; none where it is a number."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [v for arg in args if arg is not type(None) for v in automatic(arg, boxes)]
        return [None, *inner] if inner and type(None) in args else inner
    if typing.get_origin(hint) is typing.Literal:
        return list(args)
    if isinstance(hint, type) and issubclass(hint, Box):
        return [box for box in boxes if issubclass(box, hint)]
    return [False, True] if hint is bool else []


def build(row: Iterable[Setting]) -> ModelConfig:
    """The model with these settings; fields without one have their default."""
    chosen: dict[Setting | None, dict[str, Setting]] = {}
    for setting in row:
        chosen.setdefault(setting.box, {})[setting.field.rpartition(".")[2]] = setting
    return _make(ModelConfig, None, chosen)


def _make(cls: type, box: Setting | None, chosen: dict[Setting | None, dict[str, Setting]]) -> Any:
    fields = {}
    for name, setting in chosen.get(box, {}).items():
        value = setting.value
        fields[name] = _make(value, setting, chosen) if isinstance(value, type) else value
    return cls(**fields)


@typing.no_type_check  # its inner functions are called a million times
class Pairs:
    """The pairs of some settings, and rows of settings in which they all meet.

    Settings are numbered; bit i of a mask stands for setting i.

    Args:
      known: From `settings`.
      excluded: Pairs that no model can have, as strings.
    """

    def __init__(self, known: Sequence[Setting], excluded: Iterable[tuple[str, str]] = ()):
        self.known = known
        number = self.number = {str(setting): i for i, setting in enumerate(known)}
        self.fields: dict[str, list[int]] = {}  # the settings of each field
        self.below: dict[int, list[str]] = {ROOT: []}  # the fields of each chosen box
        for i, setting in enumerate(known):
            self.fields.setdefault(setting.field, []).append(i)
            box = ROOT if setting.box is None else number[str(setting.box)]
            fields = self.below.setdefault(box, [])
            fields += [setting.field] * (setting.field not in fields)
        self.chain = [sum(1 << number[str(s)] for s in setting.chain) for setting in known]
        self.clash = [0] * len(known)
        others = [pair for ids in self.fields.values() for pair in itertools.permutations(ids, 2)]
        for i, j in [*others, *((number[a], number[b]) for a, b in excluded)]:
            self.clash[i] |= 1 << j
            self.clash[j] |= 1 << i
        against = [functools.reduce(int.__or__, self._of(self.clash, mask)) for mask in self.chain]
        alive = [i for i, mask in enumerate(self.chain) if not mask & against[i]]
        self.partners = [0] * len(known)  # with which settings each has to meet
        for i in alive:
            self.partners[i] |= 1 << i  # itself: a setting without partners has its row too
        for i, j in itertools.permutations(alive, 2):
            nested = self.chain[i] >> j & 1 or self.chain[j] >> i & 1  # they meet of themselves
            if not nested and not against[i] & self.chain[j]:
                self.partners[i] |= 1 << j

    def row(self, a: str, b: str, rng: random.Random) -> tuple[Setting, ...]:
        """Any row with two settings; `build` may refuse it."""
        chain = self.chain[self.number[a]] | self.chain[self.number[b]]
        return self._settings(self._greedy(chain, self.partners, rng))

    def rows(self, seed: int = 0) -> list[tuple[Setting, ...]]:
        """Rows that `build` takes and that cover all pairs; the same ones for the same seed.

        Raises:
          ConfigError: No model with some pair was found; it should be `excluded`, or changed.
        """
        rng, missing, rows = random.Random(seed), list(self.partners), []
        while top := max(mask.bit_count() for mask in missing):
            i = next(i for i, mask in enumerate(missing) if mask.bit_count() == top)
            row = self._best(i, missing[i].bit_length() - 1, missing, rng)
            for k in _bits(row):
                missing[k] &= ~row
            rows.append(self._settings(row))
        return rows

    def _best(self, i: int, j: int, missing: list[int], rng: random.Random) -> int:
        """Of some greedy rows with settings i and j, the one with the most missing pairs."""
        start, error = self.chain[i] | self.chain[j], None
        for _ in range(ROUNDS):
            found = [self._greedy(start, missing, rng) for _ in range(TRIES)]
            for row in sorted(found, key=lambda row: -self._gain(row, missing)):
                try:
                    build(self._settings(row))
                    return row
                except ConfigError as e:
                    error = e
        pair = f"{self.known[i]} and {self.known[j]}"
        raise ConfigError(f"no model has both {pair}: {error}", fix="add it to EXCLUDED")

    def _gain(self, row: int, missing: list[int]) -> int:
        return sum((missing[k] & row).bit_count() for k in _bits(row))

    def _greedy(self, row: int, missing: list[int], rng: random.Random) -> int:
        """`row`, completed field by field with the setting that meets most of what is missing."""
        blocked = functools.reduce(int.__or__, self._of(self.clash, row))
        todo = list(self.below[ROOT])
        while todo:
            ids = self.fields[todo.pop(rng.randrange(len(todo)))]
            free = [k for k in ids if not blocked >> k & 1] or ids  # `build` refuses the others
            k = max(free, key=lambda k: (row >> k & 1, self._worth(k, row, missing), rng.random()))
            row, blocked = row | 1 << k, blocked | self.clash[k]
            todo += self.below.get(k, [])
        return row

    def _worth(self, k: int, row: int, missing: list[int]) -> int:
        """Missing pairs that setting k adds to a row, those of the best knobs of its box too."""
        total = (missing[k] & row).bit_count()
        for field in self.below.get(k, ()):
            total += max(
                self._worth(n, row, missing) if n in self.below else (missing[n] & row).bit_count()
                for n in self.fields[field]
            )
        return total

    def _of(self, values: list[int], mask: int) -> list[int]:
        return [values[k] for k in _bits(mask)]

    def _settings(self, row: int) -> tuple[Setting, ...]:
        return tuple(self.known[k] for k in _bits(row))


def _bits(mask: int) -> list[int]:
    """The numbers of the bits that are set."""
    return [k for k in range(mask.bit_length()) if mask >> k & 1]
