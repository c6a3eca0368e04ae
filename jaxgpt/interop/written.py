# SPDX-License-Identifier: Apache-2.0
"""Safetensors files written tensor by tensor, so that no second copy of a model is in memory.

The format (https://huggingface.co/docs/safetensors): eight bytes of length, little-endian, a JSON
header of names, types, shapes and offsets, then the bytes of the tensors in a row, each of them
contiguous. The library's own writer needs all arrays at once, and writes strided ones wrongly.

Beside "format" the header's metadata has the SHA-256 of all bytes behind it, which `tensors.py`
checks.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxgpt.errors import DivergedError
from jaxgpt.interop.rows import Shape
from jaxgpt.interop.tensors import CHECKSUM, DTYPES, INDEX, SINGLE

NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
Named = tuple[str, np.ndarray]


def write_tensors(
    folder: Path,
    shapes: Mapping[str, Shape],
    dtype: np.dtype,
    arrays: Iterable[Named],
    *,
    max_file_bytes: int,
    single: str = SINGLE,
) -> None:
    """Write tensors into one file, or into several with an index where they would be too large.

    Args:
      folder: Where the files are made.
      shapes: Of all tensors, in the order in which they come.
      dtype: Of what is written.
      arrays: The tensors, cast here.
      max_file_bytes: A file is closed before it exceeds this, unless one tensor does.
      single: Name of the one file.

    Raises:
      DivergedError: A tensor has numbers that are not finite in this dtype.
      OSError: The system refused.
    """
    files, stream = _split(shapes, dtype, max_file_bytes), iter(arrays)
    if len(files) == 1:
        _write(folder / single, files[0], dtype, stream)
        return
    weight_map: dict[str, str] = {}
    for number, part in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        _write(folder / name, part, dtype, stream)
        weight_map |= dict.fromkeys(part, name)
    size = sum(map(math.prod, shapes.values()))
    metadata = {"total_parameters": size, "total_size": size * dtype.itemsize}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _split(
    shapes: Mapping[str, Shape], dtype: np.dtype, max_file_bytes: int
) -> list[dict[str, Shape]]:
    files: list[dict[str, Shape]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        n_bytes = math.prod(shape) * dtype.itemsize
        if files[-1] and filled + n_bytes > max_file_bytes:
            files.append({})
            filled = 0
        files[-1][name] = shape
        filled += n_bytes
    return files


def _write(
    path: Path, shapes: Mapping[str, Shape], dtype: np.dtype, arrays: Iterator[Named]
) -> None:
    blank = "0" * hashlib.sha256().digest_size * 2
    header = _header(shapes, dtype, blank)
    checksum = hashlib.sha256()
    with open(path, "xb") as file:
        file.write(header)
        for (name, shape), (given, array) in zip(shapes.items(), arrays, strict=False):
            with np.errstate(over="ignore"):
                data = np.asarray(array, dtype, order="C")
            if (given, data.shape) != (name, shape):
                raise ValueError(f"{given} {data.shape} came where {name} {shape} belongs")
            if not np.isfinite(data).all():
                raise DivergedError(f"{name} holds numbers that are not finite in {dtype}")
            content = memoryview(data.reshape(-1).view(np.uint8))  # type: ignore
            checksum.update(content)
            file.write(content)
        file.seek(header.index(blank.encode()))
        file.write(checksum.hexdigest().encode())


def _header(shapes: Mapping[str, Shape], dtype: np.dtype, checksum: str) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", CHECKSUM: checksum}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        offsets = [begin, end]
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # as the library aligns the tensors
    return len(text).to_bytes(8, "little") + text
