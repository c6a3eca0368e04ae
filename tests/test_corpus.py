# SPDX-License-Identifier: Apache-2.0
"""Reading text: kept exactly, identified by content, and refused with a way out."""

import gzip
import os
import sys

import pytest

from jaxgpt.data.corpus import Corpus, read_corpus
from jaxgpt.errors import ConfigError, ResourceError


def refusal(path, **options) -> str:
    """The one-line message with which a path is refused."""
    with pytest.raises(ConfigError) as caught:
        read_corpus(path, **options)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    return str(caught.value)


def test_built_in_corpus_is_the_language_reference():
    from pydoc_data.topics import topics

    corpus = read_corpus(None)
    assert corpus == read_corpus(None)
    (text,) = corpus.documents
    assert text.startswith(topics[min(topics)]) and topics["while"] in text and len(text) > 300_000


def test_python_without_the_reference_says_what_to_pass(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert "--data.path=FILE" in refusal(None)


def test_text_is_kept_exactly(tmp_path):
    text = "\ufeffa\r\nb\rc\u2028d e\u0301 🐕\u200d \u05d0\n\n "
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read_corpus(tmp_path / "a.txt").documents == (text,)
    assert read_corpus(tmp_path / "a.txt", encoding="utf-8-sig").documents == (text[1:],)


def test_folder_reads_txt_files_in_order_and_skips_hidden_names(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/y.md", ".hidden.txt", ".git/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read_corpus(tmp_path).documents == ("a/z.txt", "b.txt")
    (tmp_path / "b.txt").unlink()
    (tmp_path / "a/z.txt").rename(tmp_path / "a/z.py")
    assert read_corpus(tmp_path).documents == ("a/y.md", "a/z.txt")


def test_fingerprint_follows_content_boundaries_and_decoding_but_not_names(tmp_path):
    (tmp_path / "a.txt").write_text("héllo")
    (tmp_path / "b.txt").write_text("héllo")
    prints = {
        read_corpus(tmp_path / "a.txt").fingerprint,
        read_corpus(tmp_path / "b.txt", encoding="UTF8").fingerprint,
    }
    assert len(prints) == 1
    others = (
        read_corpus(tmp_path / "a.txt", errors="replace"),
        read_corpus(tmp_path / "a.txt", encoding="latin-1"),
        read_corpus(tmp_path),
        Corpus.of(["hé", "llo"]),
        Corpus.of(["hél", "lo"]),
        Corpus.of(["héllo"]),
        Corpus.of(["hällo"]),
    )
    assert len(prints | {corpus.fingerprint for corpus in others}) == 8


def test_missing_path_shows_what_is_there(tmp_path):
    (tmp_path / "shakespeare.txt").write_text("x")
    assert f"fix: --data.path={tmp_path}/shakespeare.txt" in refusal(tmp_path / "shakspeare.txt")
    assert "holds shakespeare.txt" in refusal(tmp_path / "q")
    assert f"no folder {tmp_path}/none" in refusal(tmp_path / "none" / "a.txt")


def test_empty_file_and_folder(tmp_path):
    assert "is empty" in refusal(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"")
    assert "a.txt is empty" in refusal(tmp_path / "a.txt")
    assert "a.txt is empty" in refusal(tmp_path)
    with pytest.raises(ConfigError, match="is empty"):
        Corpus.of(["", ""])


def test_wrong_encoding_names_file_offset_and_flags(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xff\n")
    message = refusal(tmp_path / "a.txt")
    for part in ("a.txt", "0xff at offset 3", "--data.encoding", "--data.errors=replace"):
        assert part in message
    assert read_corpus(tmp_path / "a.txt", errors="replace").documents == ("abc\ufffd\n",)
    assert read_corpus(tmp_path / "a.txt", encoding="latin-1").documents == ("abcÿ\n",)
    assert "surrogate U+DCFF" in refusal(tmp_path / "a.txt", errors="surrogateescape")
    assert "utf9" in refusal(tmp_path / "a.txt", encoding="utf9")
    assert "whatever" in refusal(tmp_path / "a.txt", errors="whatever")
    assert "text encoding" in refusal(tmp_path / "a.txt", encoding="hex")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(b"text", mtime=0), "gzip data"),
        (b"PK\x03\x04rest", "zip data"),
        (b"PAR1rest", "parquet data"),
        (b"abc\0def", "NUL at character 3"),
        ("text".encode("utf-16"), "UTF-16"),
    ],
)
def test_binary_is_not_text(tmp_path, content, words):
    (tmp_path / "a.txt").write_bytes(content)
    message = refusal(tmp_path / "a.txt")
    assert "a.txt" in message and words in message


def test_utf16_has_nul_bytes_but_is_text(tmp_path):
    (tmp_path / "a.txt").write_text("text", encoding="utf-16")
    assert read_corpus(tmp_path / "a.txt", encoding="utf-16").documents == ("text",)


def test_special_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in refusal(tmp_path / "pipe")


def test_refused_reads_are_resource_errors(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(ResourceError, match=r"a\.txt: Permission denied") as caught:
        read_corpus(tmp_path)
    assert caught.value.exit_code == 5
