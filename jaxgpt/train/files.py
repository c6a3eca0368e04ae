# SPDX-License-Identifier: Apache-2.0
"""Small files that survive a crash, the metrics file, and what the disk has left.

Everything here is plain files on a POSIX system and knows nothing about runs or models.
"""

import contextlib
import errno
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxgpt.errors import ResourceError


def free_space(path: Path) -> tuple[int, float]:
    """Bytes and files that can still be created on the file system of `path`.

    Args:
      path: An existing file or folder.
    """
    stat = os.statvfs(path)
    # File systems without a fixed number of inodes report none at all.
    return stat.f_bavail * stat.f_frsize, float(stat.f_favail) if stat.f_files else math.inf


def size(n_bytes: int) -> str:
    """A number of bytes for people, as `1.49 GB`.

    Args:
      n_bytes: The number.
    """
    unit = next((u for u in ("TB", "GB", "MB", "kB") if n_bytes >= _UNITS[u]), "B")
    return f"{n_bytes / _UNITS[unit]:.3g} {unit}"


_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def refused(
    error: BaseException,
    path: Path,
    what: str,
    *,
    n_bytes: int | None = None,
    fix: str = "free space or permissions there, or choose another --run",
) -> ResourceError:
    """The one-line form of a refused write.

    Args:
      error: What was raised.
      path: Folder or file that was written.
      what: What did not work.
      n_bytes: How much was to be written; then the message says what is free.
      fix: What to do.
    """
    text = f"{what}: {refusal(error) or error}"
    if n_bytes is not None:
        there = next(p for p in (path, *path.parents) if p.is_dir())
        free_bytes, free_files = free_space(there)
        text += f"; it needs about {size(n_bytes)}, free are {size(free_bytes)}"
        text += f" and {free_files:.0f} files"
    return ResourceError(text, where=str(path), fix=fix)


def refusal(error: BaseException) -> str | None:
    """The system's own words if `error` is a refused write, also where a library wrapped it.

    Args:
      error: Any exception; its causes are looked at as well.

    Returns:
      As `No space left on device`, or None if the cause is another one.
    """
    for cause in causes(error):
        if isinstance(cause, OSError):
            return cause.strerror or str(cause)
        if found := _REFUSAL.search(str(cause)) or _STATUS.search(str(cause)):
            return found[0]
    return None


_REFUSAL = re.compile(
    "No space left on device|File too large|Disk quota exceeded|Permission denied|"
    "Read-only file system|Input/output error"
)
_STATUS = re.compile("RESOURCE_EXHAUSTED|OUT_OF_RANGE|PERMISSION_DENIED")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, what caused it, what caused that, ...

    Args:
      error: The exception that was caught.
    """
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


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
        write_synced(temporary, text.encode())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise refused(error, path, f"{path.name} cannot be written") from error


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and push its content to the disk; a link at `path` is an error.

    Args:
      path: The file, replaced if it is there.
      data: Its content.
    """
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
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network folders cannot
            raise
    finally:
        os.close(descriptor)


class MetricsWriter:
    """Appends one JSON object per line; each line is with the system when `write` returns.

    A resumed run passes the step it goes on from: records of later steps, which will be computed
    again, and a line torn by a crash are removed first, so the file holds each step once.

    Args:
      path: The file, as `RunFolder.metrics_path`; created if absent.
      resume_step: Records whose `step` is greater are dropped; 0 for a fresh run.

    Raises:
      ResourceError: The file cannot be written.
    """

    def __init__(self, path: Path, *, resume_step: int = 0):
        self.path = path
        kept = "".join(_line(r) for r in read_metrics(path) if r.get("step", 0) <= resume_step)
        write_atomic(path, kept)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record. NaN and inf, which JSON does not have, become null.

        Args:
          record: Numbers and strings by name; `step` says to which step it belongs.

        Raises:
          ResourceError: The line could not be written; no part of it stays.
        """
        line = _line(record).encode()
        end = os.fstat(self._descriptor).st_size
        try:
            if os.write(self._descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, end)
            raise refused(error, self.path, "metrics cannot be written") from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a line that is no JSON object (torn by a crash) is skipped.

    Args:
      path: The file; absent reads as empty.
    """
    records = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with contextlib.suppress(ValueError):
            if isinstance(record := json.loads(line), dict):
                records.append(record)
    return records


def _line(record: dict[str, Any]) -> str:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"
