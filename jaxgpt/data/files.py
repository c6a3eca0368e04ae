# SPDX-License-Identifier: Apache-2.0
"""The texts in one file, by what its name ends in.

`.parquet` and `.jsonl` or `.ndjson` (one JSON object a line) hold rows, of which one column is the
text (rows where it is null are left out), or several are an example (`read_rows`). `.gz`, `.xz`,
`.bz2` and `.zst` are unpacked first, and what is below them then counts (`a.jsonl.gz`; also
`a.json.gz`, which is JSON lines wherever it is found). Any other file is one text, `.json` too, and
is kept exactly as it is stored.

Left out: zip and tar, CSV, Arrow, and files larger than memory (`streams.py`).
"""

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxgpt.errors import ConfigError

# Kind, and what a file of this kind must be called; None: it cannot be read.
MAGIC = {
    b"\x1f\x8b": ("gzip", ".gz"),
    b"PK\x03\x04": ("zip", None),
    b"PAR1": ("parquet", ".parquet"),
    b"\x28\xb5\x2f\xfd": ("zstandard", ".zst"),
    b"BZh": ("bzip2", ".bz2"),
    b"\xfd7zXZ\x00": ("xz", ".xz"),
}


def _unpack_zstd(content: bytes) -> bytes:
    import pyarrow

    with pyarrow.CompressedInputStream(pyarrow.BufferReader(content), "zstd") as stream:
        return stream.read()


LINES = (".jsonl", ".ndjson")
UNPACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".xz": lzma.decompress,
    ".bz2": bz2.decompress,
    ".zst": _unpack_zstd,
}


def read_texts(file: Path, *, encoding: str, errors: str, column: str) -> tuple[list[str], bool]:
    """Reads one file.

    Args:
      file: It.
      encoding: How bytes become text; parquet has its own.
      errors: What happens to bytes that do not decode.
      column: Where the text of a row is.

    Returns:
      The texts, and whether they are rows.

    Raises:
      ConfigError: Empty, damaged, not text, not in this encoding, or without this column.
      OSError: The system refused to read it.
    """
    content, suffix = _content(file)
    if suffix == ".parquet":
        return list(_parquet(file, content, column)), True
    text = _decode(file, content, encoding, errors)
    if suffix not in LINES:
        return [text], False
    texts = []
    for where, row in _json_lines(file, text):
        if column not in row:
            raise no_column(where, column, list(row))
        texts += row_text(where, column, row[column])
    return texts, True


def read_rows(file: Path, *, encoding: str, errors: str) -> list[tuple[str, dict[str, Any]]]:
    """Reads whole rows of one file.

    Args:
      file: `.jsonl`, `.ndjson` or `.parquet`, packed or not.
      encoding: How bytes become text; parquet has its own.
      errors: What happens to bytes that do not decode.

    Returns:
      For each row where it is, for errors, and its columns.

    Raises:
      ConfigError: Another kind of file, without rows, damaged, or not in this encoding.
      OSError: The system refused to read it.
    """
    content, suffix = _content(file)
    if suffix == ".parquet":
        rows = [
            (f"row {number} of {file}", row)
            for number, row in enumerate(parquet_rows(file, content, None), 1)
        ]
    elif suffix in LINES:
        rows = list(_json_lines(file, _decode(file, content, encoding, errors)))
    else:
        raise ConfigError(
            f"{file} has no rows: examples are in .jsonl, .ndjson or .parquet",
            fix="--data.format=text, or another --data.path",
        )
    if not rows:
        raise empty_file(file)
    return rows


def _content(file: Path) -> tuple[bytes, str]:
    """What a file holds, unpacked, and the ending that says what this is."""
    content, suffix = file.read_bytes(), file.suffix
    if not content:
        raise empty_file(file)
    if suffix in UNPACK:
        try:
            content = UNPACK[suffix](content)
        except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
            raise ConfigError(f"cannot unpack {file}: {error}", fix="replace the file") from None
        if not content:
            raise empty_file(file)
        suffix = Path(file.stem).suffix
        suffix = ".jsonl" if suffix == ".json" else suffix
    return content, suffix


def empty_file(file: Path) -> ConfigError:
    """The error of a file without text."""
    return ConfigError(f"{file} is empty", fix="put text in it, remove it, or --data.path=FILE")


def _decode(file: Path, content: bytes, encoding: str, errors: str) -> str:
    check_magic(file, content)
    try:
        text = content.decode(encoding, errors)
    except UnicodeDecodeError as error:
        raise not_decodable(file, error, error.start, nul=b"\0" in content) from None
    if "\0" in text:
        raise binary_file(file, text.index("\0"))
    return text


def check_magic(file: Path, head: bytes) -> None:
    """Refuse data of a known kind, by its first bytes, under the name of a text."""
    for magic, (kind, suffix) in MAGIC.items():
        if head.startswith(magic):
            fix = f"name it {file.name}{suffix}, or unpack it" if suffix else "unpack it first"
            raise ConfigError(f"{file} is {kind} data, not text", fix=fix)


def not_decodable(file: Path, error: UnicodeDecodeError, offset: int, *, nul: bool) -> ConfigError:
    """The error of bytes that are not of the encoding; `offset` is their place in the file."""
    return ConfigError(
        f"{file} is not {error.encoding}: byte 0x{error.object[error.start]:02x} at offset {offset}"
        + (", and it holds NUL bytes: binary, or UTF-16" if nul else ""),
        fix="--data.encoding=NAME or --data.errors=replace",
    )


def binary_file(file: Path, place: int) -> ConfigError:
    """The error of a text with NUL in it, at this character."""
    return ConfigError(
        f"{file} is binary, not text: NUL at character {place}",
        fix="--data.path=FILE with text in it, or --data.encoding=utf-16 if that is what it is",
    )


def _json_lines(file: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if line.strip():
            where = f"line {number} of {file}"
            yield where, json_row(where, line)


def json_row(where: str, line: str) -> dict[str, Any]:
    """One line as an object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}", fix="one object a line") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is no JSON object", fix='{"text": "..."}')
    return row


def _parquet(file: Path, content: bytes, column: str) -> Iterator[str]:
    for row in parquet_rows(file, content, column):
        yield from row_text(str(file), column, row[column])


def parquet_rows(file: Path, content: bytes | None, column: str | None) -> Iterator[dict[str, Any]]:
    """Rows of one column, or of all; of the file itself, group by group, without its content."""
    import pyarrow
    from pyarrow import parquet

    try:
        source = str(file) if content is None else pyarrow.BufferReader(content)
        table = parquet.ParquetFile(source)
        names = table.schema_arrow.names
        if column is not None and column not in names:
            raise no_column(str(file), column, names)
        for batch in table.iter_batches(columns=None if column is None else [column]):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{file} is not whole parquet: {line}", fix="replace the file") from None


def no_column(where: str, column: str, names: list[str]) -> ConfigError:
    """The error of a row, or a file, without the column of the text."""
    found = ", ".join(names) or "none"
    return ConfigError(f"{where} has no column {column!r} but {found}", fix="--data.column=NAME")


def row_text(where: str, column: str, value: Any) -> Iterator[str]:
    """The text of a row: none where it is null."""
    if isinstance(value, str):
        yield value
    elif value is not None:
        kind = type(value).__name__
        raise ConfigError(
            f"column {column!r} of {where} holds {kind}, not text", fix="--data.column=NAME"
        )
