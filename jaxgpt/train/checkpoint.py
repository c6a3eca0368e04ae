# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what is saved, what is kept, what is reported, and which of them is believed.

    checkpoints/step_00001200/  params/  rest/  meta/metadata  commit_success.txt

A step folder holds the parameters, the rest of the train state and perhaps `ema`, a moving average,
as Orbax items, so that sampling reads no moments, and the meta file of `jaxgpt.train.stepfolder`,
committed together by one rename. Orbax's `CheckpointManager` reads this layout; it is not used,
because it counts unfinished folders as steps, skips saves in silence and hides failed ones. When to
save, and the lock on the run (`RunFolder.lock`), are the caller's.
"""

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
from jaxtyping import PyTree

from jaxgpt.errors import CheckpointError, ConfigError, DivergedError, ResourceError
from jaxgpt.train import processes
from jaxgpt.train.digest import inspect
from jaxgpt.train.files import refusal, refused
from jaxgpt.train.restore import Restored, restore, set_aside
from jaxgpt.train.stepfolder import (
    BadStepError,
    delete_leftovers,
    delete_step,
    is_committed,
    make_meta,
    read_meta,
    step_folders,
    step_name,
    sync_step,
)
from jaxgpt.train.storage import Storage

_log = logging.getLogger(__name__)


class Checkpoints(contextlib.AbstractContextManager):
    """The step folders of one run: saved asynchronously, verified, never lost in silence.

    The newest `keep` steps and the one of lowest validation loss stay. One process writes at a time
    (the caller holds the run's lock); any number may read meanwhile. A context manager.

    Args:
      directory: Folder of the step folders; created unless `read_only`.
      keep: How many of the newest steps stay, at least 1.
      read_only: Never create, write, move or delete anything.
      on_saved: Called with the step once its commit is on the disk and verified, never earlier.
      warn: Called with one line per damaged step.

    Raises:
      CheckpointError: `read_only`, and there is no such folder.
      ConfigError: `keep` is less than 1.
      ResourceError: The folder cannot be created.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 3,
        read_only: bool = False,
        on_saved: Callable[[int], None] = lambda step: None,
        warn: Callable[[str], None] = _log.warning,
    ):
        if keep < 1:
            raise ConfigError(f"keep={keep} is less than 1", fix="--train.keep=1")
        self.directory = Path(os.path.realpath(directory))
        self.keep, self.read_only, self.on_saved, self.warn = keep, read_only, on_saved, warn
        self._pending: tuple[int, int] | None = None  # step and bytes of the save under way
        if read_only and not self.directory.is_dir():
            raise CheckpointError("there are no checkpoints", where=str(self.directory))
        if not read_only and processes.leads():
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                delete_leftovers(self.directory)
            except OSError as error:
                self._fail(error)
        self._storage = Storage()

    def save(
        self,
        step: int,
        params: PyTree,
        rest: PyTree,
        *,
        ema: PyTree | None = None,
        val_loss: float | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Begin to save; the arrays may be donated or deleted as soon as this returns.

        An earlier save is waited for first. A step that is on disk with equal values is left alone.

        Args:
          step: Number of finished steps.
          params: Parameters: jax arrays of any sharding.
          rest: Everything else of the train state: jax arrays.
          ema: Moving average of parameters; None: there is none.
          val_loss: Validation loss in nats; not finite counts as the worst.
          extra: JSON facts to get back with the state.

        Raises:
          DivergedError: An array is not finite; nothing is written.
          CheckpointError: The step is on disk with other values.
          ResourceError: This or the earlier save was refused by the disk.
        """
        if self.read_only:
            raise ValueError("these checkpoints are open for reading only")
        state = {"params": params, "rest": rest} | ({} if ema is None else {"ema": ema})
        digests, not_finite = inspect(state)
        if not_finite:
            raise DivergedError(
                f"{len(not_finite)} arrays are not finite after step {step}: {not_finite[0]}, ...",
                where="nothing is written",
                fix="run again from the last checkpoint with a lower learning rate",
            )
        self.wait()
        if processes.lead("held", lambda: self._holds(step, digests)):
            return
        self._pending = step, sum(x.nbytes for x in jax.tree.leaves(state))
        try:
            meta = make_meta(step, digests, val_loss, extra or {})
            self._storage.write(self._folder(step), state, meta)
        except Exception as error:
            self._fail(error)

    def poll(self) -> None:
        """Report a save that has ended since, or raise as `wait` does, without waiting."""
        if self._pending is None:
            return
        try:
            self._storage.check()
        except Exception as error:
            self._fail(error)
        if is_committed(self._folder(self._pending[0])):
            self.wait()

    def wait(self) -> None:
        """Return when the save under way is on the disk, verified and reported.

        Raises:
          CheckpointError: It ended without a readable commit.
          ResourceError: It was refused by the disk.
        """
        if self._pending is None:
            return
        step, _ = self._pending
        try:
            self._storage.wait()
            if processes.leads():
                read_meta(self._folder(step), step)
                sync_step(self._folder(step))
        except Exception as error:
            self._fail(error)
        self._pending = None
        self.on_saved(step)
        if processes.leads():
            self._retire()

    def close(self) -> None:
        """Finish the save under way, or raise as `wait` does, and end the background threads."""
        try:
            self.wait()
        finally:
            self._storage.close()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if processes.may_be_lost(error):
            return  # the save under way would wait for it
        try:
            self.close()
        except (CheckpointError, ResourceError) as late:
            if kind is None:
                raise
            self.warn(str(late))  # the error that ended the run is the one to raise

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return [s for s, folder in step_folders(self.directory).items() if is_committed(folder)]

    def val_loss(self, step: int) -> float | None:
        """Of one of `steps()`, in nats; None if absent or not finite.

        Raises:
          CheckpointError: The step is not there or damaged.
        """
        return read_meta(self._folder(step), step)["val_loss"]

    def best_step(self) -> int | None:
        """The step of lowest validation loss, the earliest of equals; None if none has a loss."""
        losses: dict[int, float] = {}
        for step in self.steps():
            with contextlib.suppress(CheckpointError):
                if (loss := self.val_loss(step)) is not None:
                    losses[step] = loss
        return min(losses, key=losses.__getitem__, default=None)

    def restore(
        self,
        abstract_params: PyTree,
        abstract_rest: PyTree,
        abstract_ema: PyTree | None = None,
        *,
        step: int | None = None,
    ) -> Restored | None:
        """Read the newest state that passes its digest; damaged newer ones are moved aside.

        Args:
          abstract_params: `jax.ShapeDtypeStruct` with sharding for every parameter.
          abstract_rest: The same for the rest of the state.
          abstract_ema: The same for the moving average; None: it is not read.
          step: Only this step, instead of the newest usable one.

        Returns:
          The state, or None if there is no step folder at all.

        Raises:
          CheckpointError: There are steps, but none is usable; the folder is left as it is.
          ConfigError: The step is of another model: paths, shapes or dtypes differ.
          ResourceError: Reading was refused, or memory is short.
        """
        wanted = {"params": abstract_params, "rest": abstract_rest, "ema": abstract_ema}
        return self._restore(wanted, step)

    def restore_params(
        self,
        abstract_params: PyTree,
        abstract_ema: PyTree | None = None,
        *,
        step: int | None = None,
    ) -> Restored:
        """Read no moments. Arguments and errors are those of `restore`.

        Raises:
          CheckpointError: Also if there is no step at all.
        """
        found = self._restore({"params": abstract_params, "ema": abstract_ema}, step)
        if found is None:
            raise CheckpointError("the run has no checkpoint yet", where=str(self.directory))
        return found

    def _restore(self, wanted: dict[str, Any], step: int | None) -> Restored | None:
        self.wait()
        wanted = {name: tree for name, tree in wanted.items() if tree is not None}
        move = not self.read_only and processes.leads()
        return restore(
            self.directory, wanted, self._storage.read, step=step, move=move, warn=self.warn
        )

    def _folder(self, step: int) -> Path:
        return self.directory / step_name(step)

    def _holds(self, step: int, digests: dict[str, str]) -> bool:
        """Whether the step is on disk with these values; what is no step under its name moves."""
        folder = self._folder(step)
        if not os.path.lexists(folder):
            return False
        try:
            if read_meta(folder, step)["digest"] == digests:
                return True
        except BadStepError as reason:
            set_aside(folder, step, f"{reason}; saving it again", True, self.warn)
            return False
        raise CheckpointError(
            f"step {step} is on disk with other values",
            where=str(folder),
            fix="go on from the newest step, or choose another --run",
        )

    def _retire(self) -> None:
        """Delete all but the newest and the best; called after a verified commit only."""
        steps = self.steps()
        for step in sorted(set(steps[: -self.keep]) - {self.best_step()}):
            try:
                delete_step(self._folder(step))
            except OSError as error:
                self.warn(f"old checkpoint step {step} could not be deleted: {error}")

    def _fail(self, error: Exception) -> NoReturn:
        """Forget the save under way, remove its half, and say what happened."""
        step, n_bytes = self._pending or (None, 0)
        self._pending = None
        what = "checkpoints cannot be written" if step is None else f"step {step} is not saved"
        if step is not None:
            self._storage.settle()
            with contextlib.suppress(OSError):
                delete_leftovers(self.directory) if processes.leads() else None
        if isinstance(error, CheckpointError):
            raise CheckpointError(f"{what}: {error}", where=str(self.directory)) from error
        if refusal(error) is None:
            raise error
        fix = f"free space or permissions there, or keep fewer than --train.keep={self.keep}"
        raise refused(error, self.directory, what, n_bytes=n_bytes, fix=fix) from error
