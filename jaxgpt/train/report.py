# SPDX-License-Identifier: Apache-2.0
"""What a run shows: a bar on a terminal, plain lines elsewhere, and the metrics file in both cases.

A reader that goes away (`train.py | head`) silences the report and never stops the training.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from jaxgpt.losses import Score
from jaxgpt.train.files import MetricsWriter


class Reporter(contextlib.AbstractContextManager):
    """Shows the progress of `steps` optimizer steps.

    Args:
      steps: All there will be.
      tokens_in: The exact number of tokens in the first n steps.
      listeners: Called with each record.
      silent: Say nothing, for another process does.
      began: When what the first step is waited for from began, by `time.monotonic`; None: now.
    """

    def __init__(
        self,
        steps: int,
        tokens_in: Callable[[int], int],
        listeners: Sequence[Callable[[dict[str, Any]], None]] = (),
        *,
        silent: bool = False,
        began: float | None = None,
    ):
        self.steps, self.tokens_in, self.listeners = steps, tokens_in, listeners
        self.silent = silent
        self.metrics: MetricsWriter | None = None
        self.speed: Callable[[float], dict[str, float]] = lambda tokens_per_s: {}
        self._started = time.monotonic()
        self._began = self._started if began is None else began
        self._once: dict[str, float] = {}
        self._working = 0.0  # seconds spent on the `_counted` tokens, evaluation left out
        self._counted = 0
        self._since: float | None = None
        self._bar: Progress | None = None
        with contextlib.suppress(ValueError, OSError, AttributeError):
            if not silent and sys.stdout.isatty():
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
        if self.silent:
            return
        with self._quiet():
            if self._bar is not None:
                self._bar.console.print(line, markup=False, soft_wrap=True)
            else:
                print(line, flush=True)

    def say_if(self, line: str | None) -> None:
        """One line, if there is one."""
        if line:
            self.say(line)

    def start(self, step: int, metrics: MetricsWriter | None) -> None:
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

    def count(self, begin: int, end: int) -> None:
        """The steps from `begin` to `end` finished ones are done, and count if the clock runs."""
        if self._since is not None:
            self._counted += self.tokens_in(end) - self.tokens_in(begin)
            now = time.monotonic()
            self._working, self._since = self._working + now - self._since, now

    def first_step(self, compile_s: float) -> None:
        """The first step is done, which took so long to compile, or to read from the cache.

        A line says when; the next record has it too.
        """
        wall_s = time.monotonic() - self._began
        self.say(f"first step after {wall_s:.1f} s (compiled in {compile_s:.1f} s)")
        self._once = {"first_step_wall_s": round(wall_s, 3), "compile_wall_s": round(compile_s, 3)}

    def step(
        self, step: int, values: dict[str, float], *, log: bool, line: str | None = None
    ) -> None:
        """Show a step that is done.

        Args:
          step: Its number.
          values: What it measured.
          log: Write a line and a record.
          line: Something is the matter: what to say instead, with a record in any case.
        """
        rate = self._counted / self._working if self._counted else 0.0
        left = (self.tokens_in(self.steps) - self.tokens_in(step)) / rate if rate else None
        note = f"loss {values['loss_nats']:.4f}  lr {values['lr']:.2e}"
        note += f"  {rate:,.0f} tokens/s" if rate else ""
        note += f"  {clock(left)} left" if left is not None and step < self.steps else ""
        if self._bar is not None:
            with self._quiet():
                note = f"step {step}/{self.steps}  {note}"
                self._bar.update(self._task, completed=step, note=note, refresh=True)
        self.say_if(line)
        if log and line is None and self._bar is None:
            self.say(f"step {step}/{self.steps}  {note}")
        if log or line is not None:
            speed = {"tokens_per_s": round(rate, 1)} | (self.speed(rate) if rate else {})
            self.record(step, values | speed | self._once)
            self._once = {}

    def score(self, step: int, score: Score, more: dict[str, float] | None = None) -> None:
        """An evaluation is done; `more` of it is recorded beside the score."""
        values, ema = score.metrics(), (more or {}).get("val_ema_nats_per_token")
        self.say(
            f"step {step}/{self.steps}  validation {values['val_nats_per_token']:.4f} nats/token, "
            f"{values['val_bits_per_char']:.4f} bits/character"
            + (f", of the moving average {ema:.4f} nats/token" if ema is not None else "")
        )
        self.record(step, values | (more or {}))

    def record(self, step: int, values: dict[str, Any]) -> None:
        """One line of metrics.jsonl, and a call of each listener."""
        if self.metrics is not None:
            wall_s = round(time.monotonic() - self._started, 3)
            tokens = self.tokens_in(step)  # a Python int: does not wrap
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


def process_age_s() -> float:
    """Seconds since this process began; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): starttime, since boot
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - began_s, 0.0)
    except (OSError, ValueError, AttributeError):
        return 0.0


def clock(seconds: float) -> str:
    """A duration as 1h02m, 3m20s or 45s."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if m else f"{s}s"
