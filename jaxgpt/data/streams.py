# SPDX-License-Identifier: Apache-2.0
"""The texts of files in bounded memory: the same as `files.py` reads at once, block by block.

A document is an iterator of blocks of text that are one text in a row. A plain file is one; the
rows of a file are lines of one, joined with newlines, or a document each, as `data.rows` says. A
row is held whole: JSON and parquet have no smaller piece.

Left out: what files there are (`corpus.py`), the hub, and rows with answers.
"""

import bz2
import codecs
import contextlib
import gzip
import itertools
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from jaxgpt.data.files import (
    LINES,
    binary_file,
    check_magic,
    empty_file,
    json_row,
    no_column,
    not_decodable,
    parquet_rows,
    row_text,
)
from jaxgpt.errors import ConfigError

BLOCK_BYTES = 1 << 20


def _open_zstd(file: Path) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(file)), "zstd")


OPEN: dict[str, Callable[[Path], IO[bytes]]] = {
    ".gz": gzip.open,  # type: ignore[dict-item]
    ".xz": lzma.open,  # type: ignore[dict-item]
    ".bz2": bz2.open,  # type: ignore[dict-item]
    ".zst": _open_zstd,
}


def stream_documents(
    file: Path, *, encoding: str, errors: str, column: str, rows: str
) -> Iterator[Iterator[str]]:
    """Reads the documents of one file; each must be read to its end before the next one.

    Args:
      file: It.
      encoding: How bytes become text; parquet has its own.
      errors: What happens to bytes that do not decode.
      column: Where the text of a row is.
      rows: `lines` of one document, or `documents`.

    Raises (when read):
      ConfigError: Empty, damaged, not text, not in this encoding, or without this column.
      OSError: The system refused to read it.
    """
    packed, suffix = file.suffix in OPEN, file.suffix
    if packed:
        suffix = Path(file.stem).suffix
        suffix = ".jsonl" if suffix == ".json" else suffix
    if suffix == ".parquet" and not packed:
        if not file.stat().st_size:
            raise empty_file(file)
        found = (row[column] for row in parquet_rows(file, None, column))
        texts = (text for value in found for text in row_text(str(file), column, value))
    elif suffix in LINES:
        texts = _json_texts(file, _lines(_blocks(file, encoding, errors)), column)
    else:
        yield _blocks(file, encoding, errors)
        return
    yield from arranged(texts, rows)


def arranged(texts: Iterator[str], rows: str) -> Iterator[Iterator[str]]:
    """The documents of rows: their lines in a row, or each a document."""
    if rows == "documents":
        yield from (iter([text]) for text in texts)
    else:
        before = itertools.chain([""], itertools.repeat("\n"))
        yield itertools.chain.from_iterable(zip(before, texts, strict=False))


def _blocks(file: Path, encoding: str, errors: str) -> Iterator[str]:
    """The text of a file, unpacked and decoded."""
    decoder = codecs.getincrementaldecoder(encoding)(errors)
    n_bytes = n_chars = 0
    for block in itertools.chain(_contents(file), [b""]):
        if not n_bytes:
            check_magic(file, block)
        waiting = len(decoder.getstate()[0])  # of the block before: the start of a character
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            offset = n_bytes - waiting + error.start
            raise not_decodable(file, error, offset, nul=b"\0" in error.object) from None
        if "\0" in text:
            raise binary_file(file, n_chars + text.index("\0"))
        n_bytes, n_chars = n_bytes + len(block), n_chars + len(text)
        yield text
    if not n_bytes:
        raise empty_file(file)


def _contents(file: Path) -> Iterator[bytes]:
    with contextlib.closing(OPEN.get(file.suffix, _open)(file)) as stream:
        while True:
            try:
                block = stream.read(BLOCK_BYTES)
            except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
                if getattr(error, "errno", None) is not None:  # the disk's word, not the format's
                    raise
                what = f"cannot unpack {file}: {error}"
                raise ConfigError(what, fix="replace the file") from None
            if not block:
                return
            yield block


def _open(file: Path) -> IO[bytes]:
    return open(file, "rb")


def _lines(blocks: Iterator[str]) -> Iterator[str]:
    begun: list[str] = []  # of a line that may be longer than many blocks
    for block in blocks:
        first, *others = block.split("\n")
        begun.append(first)
        if others:
            yield "".join(begun)
            yield from others[:-1]
            begun = [others[-1]]
    yield "".join(begun)


def _json_texts(file: Path, lines: Iterator[str], column: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        line = line.removeprefix("\ufeff") if number == 1 else line
        if line.strip():
            where = f"line {number} of {file}"
            row = json_row(where, line)
            if column not in row:
                raise no_column(where, column, list(row))
            yield from row_text(where, column, row[column])
