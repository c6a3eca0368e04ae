# SPDX-License-Identifier: Apache-2.0
"""What a run shows: a bar on a terminal, plain lines elsewhere, and the metrics file in both cases.

A reader that goes away (`train.py | head`) silences the report and never stops the training.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from jaxgpt.losses import Score
from jaxgpt.train.files import MetricsWriter


class Reporter(contextlib.AbstractContextManager):
    """Shows the progress of `steps` optimizer steps of `tokens_per_step` tokens each."""

    def __init__(
        self,
        steps: int,
        tokens_per_step: int,
        listeners: Sequence[Callable[[dict[str, Any]], None]] = (),
    ):
        self.steps, self.tokens_per_step, self.listeners = steps, tokens_per_step, listeners
        self.metrics: MetricsWriter | None = None
        self._started = time.monotonic()
        self._working = 0.0  # seconds spent on the `_counted` steps, evaluation left out
        self._counted = 0
        self._since: float | None = None
        self._bar: Progress | None = None
        with contextlib.suppress(ValueError, OSError, AttributeError):
            if sys.stdout.isatty():
                self._bar = Progress(
                    TextColumn("{task.description}"),
                    BarColumn(None),
                    TextColumn("{task.fields[note]}"),
                    console=Console(file=sys.stdout, highlight=False),
                    auto_refresh=False,  # no thread: it would die of a closed pipe
                )
                self._task = self._bar.add_task("training", total=steps, note="compiling")

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with self._quiet():
                self._bar.stop()
        if self.metrics is not None:
            self.metrics.close()

    def say(self, line: str) -> None:
        """One line, at once."""
        with self._quiet():
            if self._bar is not None:
                self._bar.console.print(line, markup=False, soft_wrap=True)
            else:
                print(line, flush=True)

    def say_if(self, line: str | None) -> None:
        """One line, if there is one."""
        if line:
            self.say(line)

    def start(self, step: int, metrics: MetricsWriter) -> None:
        """Training begins, or goes on, after `step` finished steps."""
        self.metrics = metrics
        if self._bar is not None:
            with self._quiet():
                self._bar.start()
                self._bar.update(self._task, completed=step, refresh=True)

    def go(self) -> None:
        """Steps from here on count for tokens/s."""
        self._since = time.monotonic()

    def halt(self) -> None:
        """What follows (compilation, evaluation) does not."""
        if self._since is not None:
            self._working += time.monotonic() - self._since
        self._since = None

    def step(self, step: int, values: dict[str, float], *, log: bool) -> None:
        """A step is done, and counts if the clock runs; `log` writes a line and a record."""
        working = self._working
        if self._since is not None:
            self._counted += 1
            working += time.monotonic() - self._since
        rate = self._counted * self.tokens_per_step / working if self._counted else 0.0
        left = (self.steps - step) * self.tokens_per_step / rate if rate else None
        note = f"loss {values['loss_nats']:.4f}  lr {values['lr']:.2e}"
        note += f"  {rate:,.0f} tokens/s" if rate else ""
        note += f"  {clock(left)} left" if left is not None and step < self.steps else ""
        if self._bar is not None:
            with self._quiet():
                note = f"step {step}/{self.steps}  {note}"
                self._bar.update(self._task, completed=step, note=note, refresh=True)
        if log:
            if self._bar is None:
                self.say(f"step {step}/{self.steps}  {note}")
            self.record(step, {**values, "tokens_per_s": round(rate, 1)})

    def score(self, step: int, score: Score) -> None:
        """An evaluation is done."""
        values = score.metrics()
        self.say(
            f"step {step}/{self.steps}  validation {values['val_nats_per_token']:.4f} nats/token, "
            f"{values['val_bits_per_char']:.4f} bits/character"
        )
        self.record(step, values)

    def record(self, step: int, values: dict[str, Any]) -> None:
        """One line of metrics.jsonl, and a call of each listener."""
        if self.metrics is not None:
            wall_s = round(time.monotonic() - self._started, 3)
            tokens = step * self.tokens_per_step  # a Python int: does not wrap
            record = {"step": step, "tokens": tokens, "wall_s": wall_s, **values}
            self.metrics.write(record)
            for listener in self.listeners:
                listener(dict(record))

    @contextlib.contextmanager
    def _quiet(self):
        """Lose the output, not the run, when nobody reads it any more."""
        try:
            yield
        except (OSError, ValueError):  # closed pipe, full device, closed file
            self._bar = None


def clock(seconds: float) -> str:
    """A duration as 1h02m, 3m20s or 45s."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if m else f"{s}s"
