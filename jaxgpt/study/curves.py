# SPDX-License-Identifier: Apache-2.0
"""Reference curves: mean and spread of a recipe's losses over seeds, and when a run leaves them.

A curve is a small JSON file. It holds the recipe and the hashes of text and tokenizer, so that only
the same is compared. Training losses are smoothed, as they are of single batches: the mean over the
last `WINDOW` records. Left out: where files are and what a recipe is (the command line's).
"""

import collections
import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.errors import ConfigError
from jaxgpt.study.student import t_quantile
from jaxgpt.train.files import write_atomic

WINDOW = 5
"""Records that a training loss is the mean of."""
IN_A_ROW = 3
"""Records outside, one behind the other, that make an alarm."""
FALSE_ALARMS = 0.05
"""Runs of the same recipe that may leave the curves, at most, as far as losses are normal: half of
them by the training loss, half by the validation loss."""
NEIGHBOURS = 4
"""Points on each side whose variances are pooled with that of a point."""


@dataclasses.dataclass(frozen=True)
class Band:
    """Mean and standard deviation over n runs at some steps."""

    steps: Sequence[int]
    mean: Sequence[float]
    sd: Sequence[float]
    n: int


def band(curves: Sequence[Mapping[int, float]], pooled: int = 0) -> Band:
    """The band of some curves at the steps that all have.

    Args:
      curves: Loss by step; at least two.
      pooled: Points on each side whose variances count as well.

    Raises:
      ConfigError: Fewer than two curves, or no step in common.
    """
    steps = sorted(set.intersection(*map(set, curves))) if len(curves) > 1 else []
    if not steps:
        raise ConfigError("a band needs two runs with losses at the same steps")
    values = np.array([[curve[step] for step in steps] for curve in curves], np.float64)
    variance = values.var(0, ddof=1)
    near = [variance[max(i - pooled, 0) : i + pooled + 1] for i in range(len(steps))]
    sd = np.sqrt([each.mean() for each in near])
    return Band(steps, values.mean(0).tolist(), sd.tolist(), len(curves))


def smoothed(losses: Mapping[int, float], window: int = WINDOW) -> dict[int, float]:
    """The mean over the last records, of fewer at the beginning."""
    last: collections.deque[float] = collections.deque(maxlen=window)
    found = {}
    for step in sorted(losses):
        last.append(losses[step])
        found[step] = statistics.fmean(last)
    return found


def losses_of(records: Iterable[Mapping[str, Any]], key: str) -> dict[int, float]:
    """Loss by step of some records; null is NaN.

    Args:
      records: Of metrics.jsonl.
      key: `loss_nats` or `val_nats_per_token`.
    """
    found = [(r["step"], r[key]) for r in records if key in r and "step" in r]
    return {step: math.nan if value is None else float(value) for step, value in found}


@dataclasses.dataclass(frozen=True)
class Reference:
    """The curve of a recipe.

    Attributes:
      name: Of the recipe.
      recipe: Its configuration, whole.
      facts: Hashes of the text (`source`) and of the tokenizer; versions, devices, seeds, the
        command that made it.
      training: Of smoothed training losses.
      validation: Of validation losses.
      alarms: How many of the runs would have left the curves of the others.
    """

    name: str
    recipe: Mapping[str, Any]
    facts: Mapping[str, Any]
    training: Band
    validation: Band
    alarms: int

    def write(self, path: Path) -> None:
        """As JSON, losses to four digits behind the point and deviations to three that count.

        Raises:
          ResourceError: It cannot be written.
        """
        data = dataclasses.asdict(self)
        for each in (data["training"], data["validation"]):
            each["mean"] = [round(x, 4) for x in each["mean"]]
            each["sd"] = [float(f"{x:.3g}") for x in each["sd"]]
        write_atomic(path, json.dumps(data) + "\n")


def read_reference(path: Path) -> Reference:
    """Read what `Reference.write` wrote.

    Raises:
      ConfigError: There is no such file, or it is none.
    """
    try:
        data = json.loads(path.read_bytes())
        for name in ("training", "validation"):
            data[name] = Band(**data[name])
        return Reference(**data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or f"no curve: {type(error).__name__}"
        raise ConfigError(f"cannot read the reference curve: {reason}", where=str(path)) from error


def limit(known: Band, window: int = WINDOW) -> float:
    """Standard deviations that a run may be off: Student's, for all of a curve together.

    Losses that are the mean of `window` records hang together over as many: tests, and the degrees
    of freedom that pooled variances have, are counted accordingly.
    """
    tests = math.ceil(len(known.steps) / window)
    pooled = (2 * NEIGHBOURS + 1) / window if window > 1 else 1.0
    freedom = int((known.n - 1) * max(pooled, 1.0))
    within = 1 - FALSE_ALARMS / 2 / tests
    return t_quantile(within, freedom) * math.sqrt(1 + 1 / known.n)


def cautious(known: Band) -> Band:
    """With the larger of each deviation and that of its neighbours: few seeds agree by chance."""
    sd = np.asarray(known.sd)
    near = [np.sqrt(np.mean(sd[max(i - 1, 0) : i + 2] ** 2)) for i in range(len(sd))]
    return dataclasses.replace(known, sd=np.maximum(sd, near).tolist())


class Watch:
    """Looks at the losses of a run in order.

    Args:
      known: The curve.
      window: Records that a loss is the mean of, as in the curve.
      in_a_row: Records outside that make an alarm.
    """

    def __init__(self, known: Band, window: int = WINDOW, in_a_row: int = IN_A_ROW):
        rows = zip(known.steps, known.mean, known.sd, strict=True)
        self._known = {step: (mean, sd) for step, mean, sd in rows}
        self._limit, self._in_a_row = limit(known, window), in_a_row
        self._last: collections.deque[float] = collections.deque(maxlen=window)
        self._outside = 0
        self.left: int | None = None

    @classmethod
    def validation(cls, known: Band) -> "Watch":
        """Of validation losses: they are of one text, and one outside is enough."""
        return cls(cautious(known), 1, 1)

    def look(self, step: int, loss: float) -> str | None:
        """A line where the run leaves the band, once; else None.

        Args:
          step: Those of the curve count, in order, none left out.
          loss: In nats; NaN is outside.
        """
        if step not in self._known:
            return None
        self._last.append(loss)
        now, (mean, sd) = statistics.fmean(self._last), self._known[step]
        off = (now - mean) / max(sd, 1e-12)
        out = not abs(off) <= self._limit
        self._outside = self._outside + 1 if out else 0
        if self.left is not None or self._outside < self._in_a_row:
            return None
        self.left = step
        what = "loss" if self._in_a_row > 1 else "validation loss"
        long = f", for {self._in_a_row} records" if self._in_a_row > 1 else ""
        return (
            f"step {step}: the {what} has left the reference curve: {now:.4f}, "
            f"{'below' if off < 0 else 'above'} {mean:.4f} +- {self._limit * sd:.4f}{long}"
        )


def false_alarms(
    curves: Sequence[Mapping[int, float]], scores: Sequence[Mapping[int, float]]
) -> int:
    """How many runs leave the curves of all the others.

    Args:
      curves: Training loss by step of each run, as recorded; at least three.
      scores: Validation losses.
    """
    count = 0
    for i in range(len(curves)):
        others = [smoothed(curve) for k, curve in enumerate(curves) if k != i]
        watch = Watch(band(others, NEIGHBOURS))
        rest = Watch.validation(band([score for k, score in enumerate(scores) if k != i]))
        for looking, losses in ((watch, curves[i]), (rest, scores[i])):
            for step in sorted(losses):
                looking.look(step, losses[step])
        count += watch.left is not None or rest.left is not None
    return count


def reference_of(
    name: str,
    recipe: Mapping[str, Any],
    facts: Mapping[str, Any],
    runs: Sequence[Sequence[Mapping[str, Any]]],
) -> Reference:
    """The curve of a recipe from the records of some runs of it.

    Args:
      name: Of the recipe.
      recipe: Its configuration.
      facts: See `Reference`.
      runs: Records of each, at least three, of different seeds.

    Raises:
      ConfigError: Too few runs, or without losses in common.
    """
    if len(runs) < 3:
        raise ConfigError(f"a curve of {len(runs)} runs", fix="three at least, five are better")
    curves = [losses_of(records, "loss_nats") for records in runs]
    scores = [losses_of(records, "val_nats_per_token") for records in runs]
    training = band([smoothed(curve) for curve in curves], NEIGHBOURS)
    return Reference(name, recipe, facts, training, band(scores), false_alarms(curves, scores))
