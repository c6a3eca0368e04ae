# SPDX-License-Identifier: Apache-2.0
"""The ids of several files in a row, mapped into memory and read like one array.

Left out: what the files are and who wrote them (`shards.py`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.errors import ConfigError

BLOCK = 1 << 22  # ids that are looked at together
AGAIN = "copy the folder again, or delete it and prepare it again"


class ShardedIds:
    """The ids of several arrays in a row, read like one array of one dimension.

    Places are counted in int64, so that there may be more than 2**31 ids. What is read is a copy,
    except for a slice within one part.

    Args:
      parts: Maps of files, or any arrays of one dimension and one dtype; not changed.
      vocab_size: Whatever is read must be below; None: not looked at.

    Raises (when read):
      ConfigError: A file was cut short since it was opened, or holds an id outside the vocabulary.
      IndexError: A place outside.
    """

    ndim = 1

    def __init__(self, parts: Sequence[np.ndarray], vocab_size: int | None = None):
        if not parts or len({part.dtype for part in parts}) > 1:
            raise ValueError("parts of one dtype are needed, at least one")
        self.parts, self.dtype, self.vocab_size = tuple(parts), parts[0].dtype, vocab_size
        self._bounds = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._bounds[-1])

    @property
    def shape(self) -> tuple[int]:
        """The one length."""
        return (len(self),)

    def __getitem__(self, index: Any) -> Any:
        """Ids at a place, at an array of places of any shape, or of a slice."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return self[np.arange(start, stop, step, dtype=np.int64)]
            return self._between(start, max(start, stop))
        place = np.asarray(index)
        if place.dtype.kind not in "iu" and place.size:
            raise IndexError(f"places are integers, not {place.dtype}")
        place = place.astype(np.int64)
        place = np.where(place < 0, place + len(self), place)
        if place.size and not 0 <= place.min() <= place.max() < len(self):
            raise IndexError(f"a place outside the {len(self)} ids")
        return self._at(place.ravel()).reshape(place.shape)[()]

    def _between(self, start: int, stop: int) -> np.ndarray:
        ends = (start, max(start, stop - 1))
        first, last = (np.searchsorted(self._bounds, ends, side="right") - 1).tolist()
        begins = self._bounds.tolist()
        found = [
            self._part(i)[max(start - begins[i], 0) : max(stop - begins[i], 0)]
            for i in range(min(first, len(self.parts) - 1), min(last + 1, len(self.parts)))
        ]
        return self._checked(found[0] if len(found) == 1 else np.concatenate(found))

    def _at(self, place: np.ndarray) -> np.ndarray:
        which = np.searchsorted(self._bounds, place, side="right") - 1
        found = np.empty(len(place), self.dtype)
        for i in np.unique(which).tolist():
            here = which == i
            found[here] = self._part(i)[place[here] - self._bounds[i]]
        return self._checked(found)

    def _part(self, number: int) -> np.ndarray:
        """One part, after a look at its file: to read behind its end is a bus error."""
        part = self.parts[number]
        mapped = getattr(part, "_mmap", None)
        if mapped is not None and mapped.size() < len(mapped):
            raise ConfigError(
                f"the token file shrank from {len(mapped)} to {mapped.size()} bytes while it was "
                "open",
                where=str(getattr(part, "filename", "")),
                fix=AGAIN,
            )
        return part

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        if self.vocab_size is not None and ids.size and ids.max() >= self.vocab_size:
            where = next(
                (str(name) for p in self.parts if (name := getattr(p, "filename", ""))), ""
            )
            raise _outside(int(ids.max()), self.vocab_size, str(Path(where).parent))
        return ids


def mapped_ids(
    files: Sequence[tuple[Path, int]], dtype: np.dtype, vocab_size: int, *, at_once: bool
) -> np.ndarray | ShardedIds:
    """Maps files into memory as one array.

    Args:
      files: Each with the number of ids that it must hold.
      dtype: Of the ids.
      vocab_size: All must be below.
      at_once: Look at all of them now; else whenever some are read.

    Returns:
      The map itself where there is one file whose ids need no look when they are read.

    Raises:
      ConfigError: A file is longer or shorter, or an id is outside the vocabulary.
      OSError: The system refused.
    """
    maps: list[np.ndarray] = []
    for path, n_ids in files:
        n_bytes = path.stat().st_size if path.is_file() else 0
        if n_bytes != n_ids * dtype.itemsize:
            raise ConfigError(
                f"{path} has {n_bytes} bytes, but {n_ids} ids of {dtype.name} need "
                f"{n_ids * dtype.itemsize}",
                fix=AGAIN,
            )
        maps.append(np.memmap(path, dtype, "r"))
    safe = vocab_size > np.iinfo(dtype).max  # every value is an id
    if at_once and not safe:
        for part in maps:
            largest = max(int(part[i : i + BLOCK].max()) for i in range(0, len(part), BLOCK))
            if largest >= vocab_size:
                raise _outside(largest, vocab_size, str(part.filename))  # type: ignore
    if len(maps) == 1 and (safe or at_once):
        return maps[0]
    check = None if safe or at_once else vocab_size
    return ShardedIds(maps, check) if maps else np.zeros(0, dtype)


def _outside(largest: int, vocab_size: int, where: str) -> ConfigError:
    return ConfigError(
        f"id {largest} is outside the vocabulary of {vocab_size}",
        where=where,
        fix="name the tokenizer that made the files, or prepare them again",
    )
