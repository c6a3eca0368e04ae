# SPDX-License-Identifier: Apache-2.0
"""Writes a folder of prepared tokens so that it can go on after any end of the process.

Ids go to `.train_00000.bin.part`, which is renamed when the shard is full. `save` pushes what there
is to the disk and then notes in `.progress.json` how far it is; when the work goes on, what was
written after that is cut off. So the bytes do not depend on where it was interrupted. `commit`
writes `tokens.json`, the last of all.

Left out: what is written (`prepare.py`), and reading (`shards.py`).
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxgpt.data.base import write_atomically
from jaxgpt.data.shards import FORMAT, MANIFEST, PROGRESS
from jaxgpt.data.tokens import token_dtype
from jaxgpt.errors import ConfigError, ResourceError

PARTS = ("train", "val")
BUFFER_BYTES = 1 << 20


@dataclasses.dataclass
class Part:
    """The shards of one part: those that are full, and the one that is written.

    Args:
      folder: Where they are.
      name: `train` or `val`.
      dtype: Of the ids.
      shard_tokens: The most ids of a shard, unless a single text has more.
    """

    folder: Path
    name: str
    dtype: np.dtype
    shard_tokens: int
    done: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    tokens: int = 0
    chars: int = 0
    bytes: int = 0
    _file: BinaryIO | None = dataclasses.field(default=None, init=False)
    _digest: Any = dataclasses.field(default=None, init=False)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written yet."""
        return not (self.done or self.tokens)

    def total(self, key: str) -> int:
        """Over all shards: `tokens`, `chars` or `bytes`."""
        return sum(shard[key] for shard in self.done) + getattr(self, key)

    def add(self, ids: np.ndarray, n_chars: int, n_bytes: int) -> bool:
        """Writes the ids of one text; whether that filled a shard before it."""
        full = self.tokens > 0 and self.tokens + len(ids) > self.shard_tokens
        if full:
            self.finish()
        if self._file is None:
            self._file, self._digest = self._open("wb"), hashlib.sha256()
        content = ids.astype(self.dtype, copy=False).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self.tokens += len(ids)
        self.chars += n_chars
        self.bytes += n_bytes
        return full

    def finish(self) -> None:
        """Gives the shard that is written its name."""
        if self._file is None:
            return
        self.flush()
        self._file.close()
        os.replace(self._path(partial=True), self._path())
        counts = {key: getattr(self, key) for key in ("tokens", "chars", "bytes")}
        sha256 = self._digest.hexdigest()
        self.done.append({"file": self._path().name, **counts, "sha256": sha256})
        self._file, self.tokens, self.chars, self.bytes = None, 0, 0, 0

    def flush(self) -> None:
        """Pushes the shard that is written to the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Lets go of the file."""
        if self._file is not None:
            self._file.close()

    def state(self) -> dict[str, Any]:
        """What `resume` needs."""
        return {key: getattr(self, key) for key in ("done", "tokens", "chars", "bytes")}

    def resume(self, state: dict[str, Any]) -> None:
        """Goes on from a state; what was written after it is gone then.

        Raises:
          ConfigError: Files that the state names are missing or shorter.
        """
        self.done = list(state["done"])
        self.tokens, self.chars, self.bytes = state["tokens"], state["chars"], state["bytes"]
        for shard in self.done:
            self._check(self.folder / shard["file"], shard["tokens"], exact=True)
        partial = self._path(partial=True)
        if not partial.exists() and self._path().exists():  # renamed after the state was noted
            os.replace(self._path(), partial)
        kept = {shard["file"] for shard in self.done}
        for file in self.folder.glob(f"{self.name}_*.bin"):
            if file.name not in kept:
                file.unlink()
        if not self.tokens:
            return
        self._check(partial, self.tokens, exact=False)
        self._file, self._digest = self._open("r+b"), hashlib.sha256()
        self._file.truncate(self.tokens * self.dtype.itemsize)
        while block := self._file.read(BUFFER_BYTES):
            self._digest.update(block)

    def _check(self, path: Path, n_tokens: int, *, exact: bool) -> None:
        n_bytes = path.stat().st_size if path.is_file() else 0
        needed = n_tokens * self.dtype.itemsize
        if n_bytes < needed or (exact and n_bytes > needed):
            raise damaged(self.folder, f"{path.name} has {n_bytes} bytes, not {needed}")

    def _path(self, *, partial: bool = False) -> Path:
        name = f"{self.name}_{len(self.done):05}.bin"
        return self.folder / (f".{name}.part" if partial else name)

    def _open(self, mode: str) -> BinaryIO:
        return open(self._path(partial=True), mode, buffering=BUFFER_BYTES)  # type: ignore


class ShardWriter:
    """Both parts of a folder, and how far they are.

    Args:
      folder: It exists.
      vocab_size: Of the tokenizer.
      shard_tokens: As for `Part`.

    Raises (also its methods):
      ResourceError: The system refused to write.
    """

    def __init__(self, folder: Path, vocab_size: int, shard_tokens: int):
        self.folder, self.vocab_size = folder, vocab_size
        dtype = token_dtype(vocab_size)
        self.parts = [Part(folder, name, dtype, shard_tokens) for name in PARTS]

    def add(self, held_out: bool, ids: np.ndarray, n_chars: int, n_bytes: int) -> bool:
        """Writes the ids of one text to its part; whether a shard was finished."""
        with _one_line(self.folder):
            return self.parts[held_out].add(ids, n_chars, n_bytes)

    def save(self, progress: dict[str, Any]) -> None:
        """Notes how far the work is, with what the caller needs to go on."""
        with _one_line(self.folder):
            for part in self.parts:
                part.flush()
            states = {part.name: part.state() for part in self.parts}
        write_progress(self.folder, progress | {"parts": states})

    def resume(self, progress: dict[str, Any]) -> None:
        """Goes on from what `save` noted."""
        with _one_line(self.folder):
            for part in self.parts:
                part.resume(progress["parts"][part.name])

    def total(self, key: str) -> int:
        """Over both parts: `tokens`, `chars` or `bytes`."""
        return sum(part.total(key) for part in self.parts)

    def commit(self, facts: dict[str, Any], request: str) -> None:
        """Finishes the last shards and lists all of them in `tokens.json`.

        Args:
          facts: What the ids mean; with the files they make the fingerprint `source`.
          request: Fingerprint of what was asked for, where the text was for example.
        """
        with _one_line(self.folder):
            for part in self.parts:
                part.finish()
        listed = {part.name: part.done for part in self.parts}
        dtype = self.parts[0].dtype.name
        head = {"format": FORMAT, "dtype": dtype, "vocab_size": self.vocab_size, **facts}
        hashes = [shard["sha256"] for part in self.parts for shard in part.done]
        told = [head, hashes, [len(part.done) for part in self.parts]]
        head["source"] = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        head["request"] = request
        with write_atomically(self.folder / MANIFEST) as file:
            file.write((json.dumps(head | listed, indent=1) + "\n").encode())
        (self.folder / PROGRESS).unlink(missing_ok=True)

    def close(self) -> None:
        """Lets go of the files; what was not saved is done again."""
        for part in self.parts:
            with contextlib.suppress(OSError):
                part.close()


def write_progress(folder: Path, progress: dict[str, Any]) -> None:
    """Replaces `.progress.json`; ResourceError where the system refuses."""
    with write_atomically(folder / PROGRESS) as file:
        file.write(json.dumps(progress).encode())


def read_progress(folder: Path, check: Callable[[Any], bool]) -> dict[str, Any] | None:
    """What `write_progress` wrote; None where there is nothing.

    Args:
      folder: Where.
      check: Whether this is whole; an error of Python's in it is a no.

    Raises:
      ConfigError: It is damaged.
    """
    try:
        found = json.loads((folder / PROGRESS).read_bytes())
        if check(found):
            return found
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        pass
    raise damaged(folder, f"{PROGRESS} is no record of it")


def damaged(folder: Path, what: str) -> ConfigError:
    """The error of a folder that cannot be gone on with."""
    return ConfigError(
        f"what was prepared so far is damaged: {what}", where=str(folder), fix="delete the folder"
    )


@contextlib.contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, ResourceError):
            raise
        raise ResourceError(
            f"cannot write {error.filename or folder}: {error.strerror}",
            fix="free space there; the same command goes on",
        ) from error
