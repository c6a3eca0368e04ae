# SPDX-License-Identifier: Apache-2.0
"""Texts in parquet, in JSON lines, and compressed."""

import bz2
import gzip
import json
import lzma

import pyarrow
import pytest
from pyarrow import parquet

from jaxgpt.data.corpus import read_corpus
from jaxgpt.errors import ConfigError

ROWS = ["one\u2028", None, "", "d\r\nrei"]
LINES = "one\u2028\n\nd\r\nrei"


def zstd(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


PACK = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstd}


def json_lines(rows, column="text") -> bytes:
    lines = (json.dumps({"n": 1, column: row}, ensure_ascii=False) for row in rows)
    return ("\n".join(lines) + "\n\n").encode()


def refusal(path, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        read_corpus(path, **options)
    assert "\n" not in str(caught.value) and path.name in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_text_and_rows(tmp_path, suffix):
    plain, rows = tmp_path / f"a.txt{suffix}", tmp_path / f"a.json{suffix}"
    plain.write_bytes(PACK[suffix]("a\r\né".encode()))
    rows.write_bytes(PACK[suffix](json_lines(ROWS)))
    assert read_corpus(plain).documents == ("a\r\né",)
    assert read_corpus(rows).documents == (LINES,)
    plain.write_bytes(PACK[suffix](b"a" * 1000)[:-9])
    assert "cannot unpack" in refusal(plain)
    plain.write_bytes(b"no such data")
    assert "cannot unpack" in refusal(plain)
    plain.write_bytes(PACK[suffix](b""))
    assert "is empty" in refusal(plain)


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".parquet"])
def test_rows_are_lines_or_documents(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        parquet.write_table(pyarrow.table({"n": [1] * 4, "body": ROWS}), path)
    else:
        path.write_bytes(json_lines(ROWS, "body"))
    assert read_corpus(path, column="body").documents == (LINES,)
    documents = read_corpus(path, column="body", rows="documents").documents
    assert documents == tuple(row for row in ROWS if row is not None)
    assert "no column 'text' but n, body; fix: --data.column=NAME" in refusal(path)
    assert "holds int, not text" in refusal(path, column="n")


def test_damaged_rows_say_where(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(["a", "b"]) + b"{")
    assert "line 4 of" in refusal(path)
    path.write_bytes(b'{"text": "a"}\n["b"]\n')
    assert "line 2 of" in refusal(path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    assert "not whole parquet" in refusal(tmp_path / "a.parquet")


def test_a_folder_of_shards_and_plain_json(tmp_path):
    for name, row in (("b.parquet", "second"), ("a.parquet", "first")):
        parquet.write_table(pyarrow.table({"text": [row, "x"]}), tmp_path / name)
    assert read_corpus(tmp_path).documents == ("first\nx", "second\nx")
    (tmp_path / "c.json").write_text('{"a": 1}')
    assert read_corpus(tmp_path / "c.json").documents == ('{"a": 1}',)


def test_max_chars_cuts_the_joined_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["abc", "de", "fgh"]))
    assert read_corpus(tmp_path / "a.jsonl", max_chars=5).documents == ("abc\nd",)
    rows = read_corpus(tmp_path / "a.jsonl", rows="documents", max_chars=5)
    assert rows.documents == ("abc", "de")
    assert read_corpus(None, max_chars=9).documents == (read_corpus(None).documents[0][:9],)


def test_packed_data_under_a_plain_name_says_what_to_call_it(tmp_path):
    (tmp_path / "a.txt").write_bytes(gzip.compress(b"text", mtime=0))
    assert "name it a.txt.gz" in refusal(tmp_path / "a.txt")
