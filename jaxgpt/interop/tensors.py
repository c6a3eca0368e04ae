# SPDX-License-Identifier: Apache-2.0
"""The tensors of a folder of safetensors files, as views of the memory-mapped files.

Nothing is read until a view is, but where a file of ours holds a checksum. Other formats are
refused by their names, unopened: a pickle runs code when it is loaded.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxgpt.data.hubfiles import SAFE_NAME
from jaxgpt.errors import CheckpointError
from jaxgpt.interop.reading import MAX_BYTES, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
"""Names of the file format; others are masks, counters and quantised weights."""

MAX_HEADER_BYTES = 10_000_000
"""Of one file: a model of ten thousand tensors has one million; parsing takes 15 times as much."""

CHECKSUM = "jaxgpt_sha256"
"""In the metadata of a file: of all that stands behind the header."""


class Tensors(Mapping[str, np.ndarray]):
    """Read-only arrays by name; `shape` and the names cost nothing.

    Args:
      folder: Holds `model.safetensors`, or `model.safetensors.index.json` and the files that it
        names.

    Raises:
      CheckpointError: No such files, or damaged ones.
    """

    def __init__(self, folder: Path):
        self._maps: dict[Path, tuple[np.ndarray, int]] = {}
        self._entries: dict[str, tuple[Path, dict]] = {}
        listed, files = _files(folder)
        for file in files:
            for name, entry in _header(file).items():
                self._entries[name] = file, entry
        for name in listed - self._entries.keys():
            raise CheckpointError(f"{INDEX} names {name}, which no file holds", where=str(folder))

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        return tuple(self._entries[name][1]["shape"])

    def __getitem__(self, name: str) -> np.ndarray:
        """A view of the file.

        Raises:
          CheckpointError: Its numbers are not plain floats.
        """
        file, entry = self._entries[name]
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(
                f"{name} is stored as {entry['dtype']}, not as one of {sorted(DTYPES)}",
                where=str(file),
            )
        if file not in self._maps:
            memory = np.asarray(np.memmap(file, np.uint8, "r"))
            self._maps[file] = memory, 8 + int.from_bytes(memory[:8].tobytes(), "little")
        memory, origin = self._maps[file]
        begin, end = (origin + offset for offset in entry["data_offsets"])
        return memory[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _files(folder: Path) -> tuple[set[str], list[Path]]:
    """Names of tensors that must be there, and the files."""
    if (folder / SINGLE).is_file():
        return set(), [folder / SINGLE]
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX, max_bytes=64 * MAX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{INDEX} has no weight_map", where=str(folder))
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if not SAFE_NAME.fullmatch(name):
                raise CheckpointError(f"{INDEX} names {name!r}, outside the folder")
        return set(weight_map), [folder / name for name in names]
    pickles = sorted(
        p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".pkl")
    )
    if pickles:
        raise CheckpointError(
            f"{pickles[0]} is a pickle, which is not opened: it could run any code",
            where=str(folder),
            fix="convert it to safetensors where you trust it",
        )
    raise CheckpointError(f"neither {SINGLE} nor {INDEX} is there", where=str(folder))


def _header(file: Path) -> dict[str, dict]:
    """Tensors of one file: dtype, shape and offsets; checked by the library."""
    try:
        with open(file, "rb") as stream:
            n_bytes = int.from_bytes(stream.read(8), "little")
            if MAX_HEADER_BYTES < n_bytes < file.stat().st_size:
                raise CheckpointError(f"{file.name} has a header of {n_bytes:,} bytes")
            with safe_open(file, framework="numpy"):
                pass
            header = json.loads(stream.read(n_bytes))
    except OSError as error:
        raise CheckpointError(f"cannot read {file.name}: {error}", where=str(file)) from None
    except SafetensorError as error:
        raise CheckpointError(
            f"{file.name} is not a whole safetensors file: {error}", where=str(file)
        ) from None
    known = header.pop("__metadata__", {}).get(CHECKSUM)
    if known is not None and known != _checksum(file):
        raise CheckpointError(
            f"{file.name} is not as it was exported: its checksum differs",
            where=str(file),
            fix="copy it, or export it, again",
        )
    return header


def _checksum(file: Path) -> str:
    with open(file, "rb") as stream:
        stream.seek(8 + int.from_bytes(stream.read(8), "little"))
        return hashlib.file_digest(stream, "sha256").hexdigest()
