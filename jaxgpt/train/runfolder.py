# SPDX-License-Identifier: Apache-2.0
"""What a run folder is, and how it is guarded: names, lock, probes, signals.

    runs/NAME/  config.yaml  tokenizer.json  run.json  metrics.jsonl  .lock
                checkpoints/step_00001200/  checkpoints/bad-1300-1/

Everything here is plain files on a POSIX system; what is inside a step folder is known to
`jaxgpt.train.stepfolder` and `jaxgpt.train.checkpoint`.
"""

import contextlib
import errno
import fcntl
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from jaxgpt.errors import CheckpointError, ConfigError, Interrupted, ResourceError
from jaxgpt.train.files import free_space, refused, size, write_synced
from jaxgpt.train.stepfolder import COMMIT_FILE, is_committed, step_folders

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run, absolute from the start, whatever the working directory becomes.

    Args:
      path: The folder; it need not exist.
    """

    path: Path

    def __post_init__(self):
        object.__setattr__(self, "path", Path(os.path.realpath(self.path)))

    @property
    def config_path(self) -> Path:
        """The whole configuration of the run."""
        return self.path / "config.yaml"

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer that made the token files."""
        return self.path / "tokenizer.json"

    @property
    def facts_path(self) -> Path:
        """Facts that are no choices: versions, hashes, devices."""
        return self.path / "run.json"

    @property
    def metrics_path(self) -> Path:
        """One JSON record per line, see `MetricsWriter`."""
        return self.path / "metrics.jsonl"

    @property
    def tokens_path(self) -> Path:
        """Folder of the token files that were made from text."""
        return self.path / "tokens"

    @property
    def checkpoints_path(self) -> Path:
        """Folder of the step folders."""
        return self.path / "checkpoints"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process; the kernel frees it when the process ends in any way.

        Raises:
          ResourceError: Another process holds it: its pid and host are named, at once.
        """
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                raise ResourceError(
                    f"the run is in use by {owner or 'another process'}",
                    where=str(self.path),
                    fix="stop that process, or choose another --run",
                ) from None
            except OSError as error:
                raise refused(error, self.path, "the run cannot be locked") from error
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            try:
                yield
            finally:
                os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def require_space(self, n_bytes: int, n_files: int = 100) -> None:
        """Refuse to begin what the disk cannot hold.

        Args:
          n_bytes: Bytes that will be written.
          n_files: Files that will be created.

        Raises:
          ResourceError: Fewer bytes or inodes are free.
        """
        free_bytes, free_files = free_space(self.path)
        if free_bytes < n_bytes or free_files < n_files:
            raise ResourceError(
                f"the run needs {size(n_bytes)} and {n_files} files, "
                f"free are {size(free_bytes)} and {free_files:.0f} files",
                where=str(self.path),
                fix="free space there, or choose another --run",
            )


def run_path(name: str, root: str | Path = "runs") -> Path:
    """Where `--run NAME` lives: `root/NAME` for a bare name, the path itself if it has a slash.

    Args:
      name: Letters, digits, dot, dash and underscore; or a path, as `./here` or `/data/run7`.
      root: Folder of the named runs.

    Raises:
      ConfigError: Neither a usable name nor a path.
    """
    if "/" in name and "\0" not in name:
        return Path(os.path.realpath(Path(name).expanduser()))
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--run {name!r} is no run name",
            fix="use letters, digits, '.', '-' and '_', or a path with a slash in it",
        )
    return Path(os.path.realpath(Path(root) / name))


def open_run(path: str | Path) -> RunFolder:
    """Create the folder if needed and prove that it can be written, before anything is computed.

    Args:
      path: The run folder.

    Raises:
      ConfigError: The path, or a part of it, is a file or no possible path.
      ResourceError: It may not be created or written there.
    """
    run = RunFolder(Path(path))
    probe = run.path / f".probe-{os.getpid()}"
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        write_synced(probe, b"x" * 4096)
        probe.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            probe.unlink()
        if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
            raise ConfigError(
                f"no run folder can be there: {error.strerror}",
                where=str(error.filename or run.path),
                fix="choose another --run",
            ) from error
        raise refused(error, run.path, "the run folder cannot be written") from error
    return run


def newest_run(root: str | Path = "runs") -> Path:
    """The run below `root` whose newest committed checkpoint was committed last, by file time.

    Args:
      root: Folder of the named runs.

    Raises:
      CheckpointError: No run there has a checkpoint.
    """
    committed: list[tuple[float, Path]] = []
    for run in Path(root).glob("*/"):
        for step in step_folders(run / "checkpoints").values():
            if is_committed(step):
                with contextlib.suppress(FileNotFoundError):  # retention may have just deleted it
                    committed.append(((step / COMMIT_FILE).stat().st_mtime, run))
    if not committed:
        raise CheckpointError(
            "there is no run with a checkpoint",
            where=str(Path(root).resolve()),
            fix="python train.py --preset tiny",
        )
    return max(committed)[1].resolve()


class Signals:
    """Notes SIGTERM, SIGINT and SIGHUP while it is entered; the loop polls `pending` and stops.

    The handler only sets a flag: one that raises while XLA compiles crashes the process. A second
    signal ends the process at once with exit code 128 + signal. Outside the main thread nothing is
    installed; a SIGHUP that `nohup` ignores stays ignored. The previous handlers come back on exit.

    Attributes:
      pending: Number of the signal that arrived, or None.
    """

    def __init__(self):
        self.pending: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            # None is a handler that was not installed by Python; it cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def check(self, when: str, elsewhere: int | None = None) -> None:
        """Stop the run here if a signal has arrived.

        Args:
          when: How far it has come, as `after step 7, which is saved`.
          elsewhere: The signal that another process of the run has got.

        Raises:
          Interrupted: One has.
        """
        number = self.pending or elsewhere
        if number is not None:
            raise Interrupted(
                f"stopped by {signal.Signals(number).name} {when}",
                signum=number,
                fix="the same command goes on from there",
            )

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.pending is None:
            self.pending = number
            return
        with contextlib.suppress(OSError):
            os.write(2, b"stopped by a second signal; unfinished work is lost\n")
        os._exit(128 + number)
