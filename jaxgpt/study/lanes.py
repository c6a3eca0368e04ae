# SPDX-License-Identifier: Apache-2.0
"""What a folder of lanes holds: which lanes, what differs between them, and how they ended.

    runs/tiny-lanes/lanes.json  seed0/  seed1/  ...

Each lane is a run folder. Left out: training them (`jaxgpt.train.lanes`), and pictures.
"""

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.errors import ConfigError
from jaxgpt.study.student import half_width
from jaxgpt.train.files import read_metrics, write_atomic
from jaxgpt.train.runfolder import RunFolder

FILE = "lanes.json"
SEEDS = ("train.seed", "train.batch_seed")
"""What differs between lanes of one kind."""


@dataclasses.dataclass(frozen=True)
class LaneNotes:
    """The content of `lanes.json`.

    Attributes:
      lanes: By name, what each lane has of what differs: {"seed1": {"train.seed": 1}}.
      diverged: The lanes that ended early, and by which step.
    """

    lanes: Mapping[str, Mapping[str, Any]]
    diverged: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Into the folder, whole or not at all.

        Raises:
          ResourceError: It cannot be written.
        """
        write_atomic(folder / FILE, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def read_notes(folder: Path) -> LaneNotes | None:
    """The lanes of a folder; None where it is no folder of lanes.

    Raises:
      ConfigError: The file is damaged.
    """
    try:
        found = json.loads((folder / FILE).read_bytes())
        return LaneNotes(dict(found["lanes"]), dict(found["diverged"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{FILE} is damaged: {type(error).__name__}"
        raise ConfigError(what, where=str(folder / FILE), fix="restore it") from error


@dataclasses.dataclass(frozen=True)
class LaneRun:
    """A lane and its records so far.

    Attributes:
      name: Of its folder.
      values: What it has of what differs between lanes.
      records: Of metrics.jsonl.
      diverged: By which step it had ended; None: it did not.
    """

    name: str
    values: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    diverged: int | None = None

    @property
    def kind(self) -> tuple[tuple[str, Any], ...]:
        """What it has but for seeds."""
        return tuple((k, v) for k, v in self.values.items() if k not in SEEDS)

    def final_loss(self) -> float | None:
        """Its last validation loss in nats per token; None: there is none, or it diverged."""
        losses = [r["val_nats_per_token"] for r in self.records if r.get("val_nats_per_token")]
        return losses[-1] if losses and self.diverged is None else None


def read_lanes(folder: Path) -> list[LaneRun]:
    """All lanes of a folder.

    Raises:
      ConfigError: It is no folder of lanes.
    """
    notes = read_notes(folder)
    if notes is None:
        raise ConfigError("no lanes there", where=str(folder), fix="python train.py --seeds 8")
    return [
        LaneRun(
            name,
            values,
            read_metrics(RunFolder(folder / name).metrics_path),
            notes.diverged.get(name),
        )
        for name, values in notes.lanes.items()
    ]


def by_kind(lanes: Sequence[LaneRun]) -> dict[tuple[tuple[str, Any], ...], list[LaneRun]]:
    """Lanes that differ in seeds alone together, in the order of their first ones."""
    kinds: dict[tuple[tuple[str, Any], ...], list[LaneRun]] = {}
    for lane in lanes:
        kinds.setdefault(lane.kind, []).append(lane)
    return kinds


def label(kind: tuple[tuple[str, Any], ...]) -> str:
    """A kind for people: `lr=0.001, std=0.02`; "" where nothing but seeds differs."""
    return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in kind)


def summary(lanes: Sequence[LaneRun]) -> Iterator[str]:
    """A line for each kind: its mean last validation loss, with the half of its 95% interval."""
    for kind, own in by_kind(lanes).items():
        losses = [loss for lane in own if (loss := lane.final_loss()) is not None]
        lost = sum(lane.diverged is not None for lane in own)
        text = f"{label(kind) or 'all lanes'}: "
        if losses:
            text += f"validation {statistics.fmean(losses):.4f}"
        if losses[1:]:
            half = half_width(statistics.stdev(losses), len(losses))
            text += f" +- {half:.4f} nats/token (95% interval of the mean of {len(losses)})"
        if losses or lost:
            yield f"{text}{', ' * bool(losses)}{lost} diverged" if lost else text
