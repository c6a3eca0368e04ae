# SPDX-License-Identifier: Apache-2.0
"""What a run folder is, and how it is guarded: names, lock, probes, small files, signals.

    runs/NAME/  config.yaml  tokenizer.json  run.json  metrics.jsonl  .lock
                checkpoints/step_00001200/  checkpoints/bad-1300-1/

Everything here is plain files on a POSIX system; what is inside a step folder is known to
`jaxgpt.train.checkpoint` alone.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from jaxgpt.errors import CheckpointError, ConfigError, ResourceError

COMMIT_FILE = "commit_success.txt"
"""The file that the storage layer writes last into a step folder."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_STEP = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run, absolute from the start, whatever the working directory becomes.

    Args:
      path: The folder; it need not exist.
    """

    path: Path

    def __post_init__(self):
        object.__setattr__(self, "path", Path(self.path).resolve())

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
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            yield
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
        return Path(name).expanduser().resolve()
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--run {name!r} is no run name",
            fix="use letters, digits, '.', '-' and '_', or a path with a slash in it",
        )
    return (Path(root) / name).resolve()


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
        _write_synced(probe, b"x" * 4096)
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


def step_folders(checkpoints: Path) -> dict[int, Path]:
    """Step -> folder, ascending, of everything named like one: also damaged or half-copied ones.

    Args:
      checkpoints: `RunFolder.checkpoints_path`; may be absent.
    """
    if not checkpoints.is_dir():
        return {}
    found = {int(m[1]): p for p in checkpoints.iterdir() if (m := _STEP.fullmatch(p.name))}
    return dict(sorted(found.items()))


def is_committed(step: Path) -> bool:
    """Whether a step folder is a real folder, no link, and was finished by the storage layer.

    Args:
      step: A value of `step_folders`.
    """
    return not step.is_symlink() and (step / COMMIT_FILE).is_file()


def free_space(path: Path) -> tuple[int, float]:
    """Bytes and files that can still be created on the file system of `path`.

    Args:
      path: An existing file or folder.
    """
    stat = os.statvfs(path)
    # File systems without a fixed number of inodes report none at all.
    return stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else math.inf


def size(n_bytes: float) -> str:
    """A number of bytes for people, as `1.49 GB`.

    Args:
      n_bytes: The number.
    """
    unit = next((u for u in ("TB", "GB", "MB", "kB") if n_bytes >= _UNITS[u]), "B")
    return f"{n_bytes / _UNITS[unit]:.3g} {unit}"


_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def refused(error: OSError, path: Path, what: str) -> ResourceError:
    """The one-line form of a failed write.

    Args:
      error: What the system said.
      path: Folder or file that was written.
      what: What did not work.
    """
    return ResourceError(
        f"{what}: {error.strerror or error}",
        where=str(path),
        fix="free space or permissions there, or choose another --run",
    )


def write_atomic(path: Path, text: str) -> None:
    """Write a small file so that it is the old one or the new one, whole, also after a crash.

    A link at `path` is replaced, never followed.

    Args:
      path: The file; its folder exists.
      text: Its content, stored as UTF-8 without newline translation.

    Raises:
      ResourceError: The write was refused; the old file is untouched.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        _write_synced(temporary, text.encode())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise refused(error, path, f"{path.name} cannot be written") from error


def _write_synced(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Push a file's content, or a folder's list of names, to the disk.

    Args:
      path: The file or folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
