# SPDX-License-Identifier: Apache-2.0
"""A trace of some steps of a run, made by JAX's profiler: what the devices and the host did when.

    python train.py --profile=10:15

Left out: looking at it, for which https://ui.perfetto.dev and xprof are there.
"""

import contextlib
import re
from pathlib import Path

import jax

from jaxgpt.errors import ConfigError

FOLDER = "profile"
"""In the run's folder."""


def profiled_steps(text: str) -> tuple[int, int]:
    """First and last step of a text such as `10:15`.

    Raises:
      ConfigError: It is another text, or no step lies in the range.
    """
    found = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 1 <= first <= last:
        what = f"profile={text} is no range of steps, which count from 1"
        raise ConfigError(what, fix="--profile=10:15")
    return first, last


class Profile(contextlib.AbstractContextManager):
    """Traces the steps of a range that this process takes; nothing is left running at the exit.

    Args:
      steps: The first and the last; None: nothing is traced, and nothing costs anything.
      run: The run's folder.
    """

    def __init__(self, steps: tuple[int, int] | None, run: Path):
        self._folder, self._began, self._done = run / FOLDER, None, steps is None
        self._first, self._last = steps or (0, 0)

    def __exit__(self, *_: object) -> None:
        if self._began is not None and not self._done:
            self._done = True
            jax.profiler.stop_trace()

    def edges(self) -> tuple[int, ...]:
        """Numbers of finished steps where it begins and ends, if that is to come."""
        return () if self._done else (self._first - 1, self._last)

    def begins(self, step: int) -> bool:
        """Whether it begins behind `step` finished steps."""
        if self._done or self._began is not None:
            return False
        return self._first - 1 <= step < self._last

    def begin(self, step: int) -> None:
        """Trace from here on; what was dispatched before should be done."""
        jax.profiler.start_trace(str(self._folder))
        self._began = step

    def ends(self, step: int) -> bool:
        """Whether it ends behind `step` finished steps."""
        return not self._done and self._began is not None and step >= self._last

    def end(self, step: int) -> str | None:
        """A line: where the trace is, which ends here; or that there is none. None: said before.

        Args:
          step: Finished steps, all of what they dispatched being done.
        """
        if self._done:
            return None
        self._done = True
        if self._began is None:
            asked = f"--profile={self._first}:{self._last}"
            return f"no profile: the run ended at step {step}, and {asked} had not come"
        jax.profiler.stop_trace()
        traces = self._folder.glob("plugins/profile/*/*.trace.json.gz")
        newest = max(traces, key=lambda path: path.stat().st_mtime, default=self._folder)
        return (
            f"profile of steps {self._began + 1} to {step}: open {newest} at "
            f"https://ui.perfetto.dev, or its kernels with `xprof --logdir={self._folder}`"
        )
