# SPDX-License-Identifier: Apache-2.0
"""Files as streams: the same texts and the same refusals as when they are read at once."""

import bz2
import gzip
import itertools
import json
import lzma

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from jaxgpt.data import streams
from jaxgpt.data.corpus import arrange
from jaxgpt.data.files import read_texts
from jaxgpt.data.streams import arranged, stream_documents
from jaxgpt.errors import ConfigError

TEXT = "naïve 🐕\r\nzwei\n\n\ufefflast"
ROWS = ["", "one\ntwo", None, "ünf 🐕", "x" * 50]
LINES = "\ufeff" + "\n\n".join(json.dumps({"n": 1, "text": row}) for row in ROWS) + "\n"
HOW = {"encoding": "utf-8", "errors": "strict", "column": "text"}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_BYTES", 6)  # a magic number fits


def packed(name, content: bytes) -> bytes:
    if name.endswith(".zst"):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes()
    pack = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
    return next((f(content) for end, f in pack.items() if name.endswith(end)), content)


def streamed(file, rows="lines", **changes):
    found = stream_documents(file, rows=rows, **(HOW | changes))
    return ["".join(blocks) for blocks in found]


def at_once(file, rows="lines", **changes):
    texts, are_rows = read_texts(file, **(HOW | changes))
    return arrange(texts, rows=rows) if are_rows else texts


@pytest.mark.parametrize("rows", ("lines", "documents"))
@pytest.mark.parametrize("end", ("", ".gz", ".xz", ".bz2", ".zst"))
@pytest.mark.parametrize("name", ("a.txt", "a.json", "a.jsonl", "a.ndjson"))
def test_the_texts_of_a_file(tmp_path, name, end, rows):
    file = tmp_path / (name + end)
    file.write_bytes(packed(end, (LINES if "json" in name else TEXT).encode()))
    assert streamed(file, rows) == at_once(file, rows)


@pytest.mark.parametrize("rows", ("lines", "documents"))
def test_the_texts_of_parquet(tmp_path, rows):
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ROWS, "n": [1] * 5}), file, row_group_size=2)
    assert streamed(file, rows) == at_once(file, rows)
    for column in ("n", "no"):
        assert refusal(streamed, file, column=column) == refusal(at_once, file, column=column)


@pytest.mark.parametrize("encoding", ("utf-16", "utf-8-sig", "latin-1", "shift_jis"))
def test_encodings(tmp_path, encoding):
    file = tmp_path / "a.txt"
    file.write_bytes("zwei Wörter\n".replace("ö", "o" * (encoding == "shift_jis")).encode(encoding))
    assert streamed(file, encoding=encoding) == at_once(file, encoding=encoding)
    file.write_bytes(b"ab\xe4\xf6c\xff")
    for errors in ("replace", "ignore"):
        assert streamed(file, errors=errors) == at_once(file, errors=errors)


def refusal(read, file, **changes) -> str:
    with pytest.raises(ConfigError) as caught:
        read(file, **changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    (
        ("a.txt", b""),
        ("a.jsonl", b""),
        ("a.parquet", b""),
        ("a.txt", b"abcdef\xe4\xf6xyz"),
        ("a.txt", "äöü".encode() + b"\xc3"),
        ("a.txt", b"abcd\0ef"),
        ("a.txt", gzip.compress(b"abc", mtime=0)),
        ("a.txt", b"PK\x03\x04zip"),
        ("a.jsonl", b'{"text": "a"}\n{"tex'),
        ("a.jsonl", b'{"text": "a"}\n[1]\n'),
        ("a.jsonl", b'{"text": "a"}\n\n{"txt": 1}\n'),
        ("a.jsonl", b'{"text": 7}\n'),
        ("a.txt.gz", gzip.compress(b"", mtime=0)),
        ("a.parquet", b"PAR1 no PAR1"),
    ),
)
def test_what_is_refused_at_once_is_refused(tmp_path, name, content):
    file = tmp_path / name
    file.write_bytes(content)
    assert refusal(streamed, file) == refusal(at_once, file)


@pytest.mark.parametrize(
    "content", (b"no", gzip.compress(b"abc" * 99, mtime=0)[:-9], b"\x1f\x8b" + b"x" * 9)
)
def test_damaged_packing(tmp_path, content):
    file = tmp_path / "a.txt.gz"
    file.write_bytes(content)
    assert f"cannot unpack {file}" in refusal(streamed, file)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        streamed(tmp_path / "a.txt")


@given(st.lists(st.text("ab\n", max_size=5)))
def test_lines_do_not_depend_on_blocks(blocks):
    assert list(streams._lines(iter(blocks))) == "".join(blocks).split("\n")


def test_rows_are_read_one_by_one():
    endless = ("row" for _ in itertools.count())
    (document,) = itertools.islice(arranged(endless, "lines"), 1)
    assert list(itertools.islice(document, 4)) == ["", "row", "\n", "row"]
    assert ["".join(one) for one in itertools.islice(arranged(endless, "documents"), 2)] == [
        "row"
    ] * 2
