# SPDX-License-Identifier: Apache-2.0
"""Arrays to a folder and back, by Orbax: the only file that touches it.

Writing is asynchronous, and the folder appears under its name by one rename when all is written.
Which folder, which of several, and what to believe of it is decided in `jaxgpt.train.checkpoint`.
"""

import asyncio
import errno
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxgpt.errors import JaxgptError, ResourceError
from jaxgpt.train.files import causes
from jaxgpt.train.stepfolder import BadStepError

USUAL_LOOP = asyncio.new_event_loop


class Storage:
    """One writer at a time, any number of reads; `close` it."""

    def __init__(self):
        logging.getLogger("absl").addFilter(_is_news)
        asyncio.new_event_loop = _new_event_loop
        # Folders made in the background hang the interpreter at exit when they cannot be made.
        options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), async_options=options)

    def write(self, folder: Path, items: dict[str, Any], meta: dict[str, Any]) -> None:
        """Begin to write; the arrays may be donated or deleted as soon as this returns.

        Args:
          folder: Absolute path that does not exist.
          items: Trees of jax arrays by name.
          meta: JSON, to `meta/metadata`.
        """
        args: dict[str, Any] = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        args["meta"] = ocp.args.JsonSave(meta)
        self._orbax.save(folder, args=ocp.args.Composite(**args))

    def check(self) -> None:
        """Raise what the write under way has failed with so far."""
        self._orbax.check_for_errors()

    def wait(self) -> None:
        """Return when the write under way has ended; raise what it failed with."""
        self._orbax.wait_until_finished()

    def settle(self, limit_s: float = 10) -> None:
        """After a failed write, wait for its other writers, which go on for a moment.

        Args:
          limit_s: Longest wait for each of them.
        """
        for thread in threading.enumerate():
            if type(thread).__module__.startswith("orbax."):
                threading.Thread.join(thread, limit_s)  # its own join raises the error again

    def read(self, folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
        """Read some items of a folder.

        Args:
          folder: The folder.
          wanted: Trees of `jax.ShapeDtypeStruct` with shardings by name.

        Raises:
          BadStepError: The folder is damaged.
          ResourceError: The cause is memory, rights or open files, which says nothing of the data.
        """
        args = {name: ocp.args.StandardRestore(tree) for name, tree in wanted.items()}
        try:
            # Not the checkpointer's own restore: it ends in a meeting of all processes, to which
            # one that cannot read does not come.
            handler: Any = self._orbax.handler
            found = handler.restore(folder, args=ocp.args.Composite(**args))
            return dict(found.items())
        except Exception as error:
            raise _unreadable(error, folder) from error

    def close(self) -> None:
        """Wait for the write under way and end the background threads."""
        self._orbax.close()
        asyncio.new_event_loop = USUAL_LOOP
        logging.getLogger("absl").removeFilter(_is_news)


def _unreadable(error: Exception, folder: Path) -> JaxgptError:
    """One line from the deepest cause; Orbax wraps it in pages of its own."""
    last = list(causes(error))[-1]
    line = f"{type(last).__name__}: {(str(last).splitlines() or [''])[0][:160]}"
    if any(map(_is_refusal, causes(error))):
        return ResourceError(f"a checkpoint could not be read: {line}", where=str(folder))
    return BadStepError(line)


def _is_refusal(error: BaseException) -> bool:
    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)
    return (
        isinstance(error, MemoryError | PermissionError)
        or getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
        or "PERMISSION_DENIED" in str(error)
    )


def _is_news(record: logging.LogRecord) -> bool:
    """False for what Orbax logs, with a traceback, of an error that it raises as well."""
    return "orbax" not in record.pathname or "JAXGPT_DEBUG" in os.environ


class _FinishingLoop(asyncio.SelectorEventLoop):
    """Finishes its tasks before it closes.

    When one array cannot be read or written, Orbax closes its loop on the others, which then
    complain on stderr, hundreds of times, from threads, at some later moment.
    """

    def close(self) -> None:
        if not self.is_closed() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """`asyncio.new_event_loop` while a Storage is open: loops that finish, for Orbax alone."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("orbax."):
            return _FinishingLoop()
        frame = frame.f_back
    return USUAL_LOOP()
