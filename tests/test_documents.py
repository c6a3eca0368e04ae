# SPDX-License-Identifier: Apache-2.0
"""The stream of pieces that a path names, and how it is gone on with."""

import itertools
import json

import pytest

from jaxgpt.data import pieces as cutting
from jaxgpt.data.config import DataConfig
from jaxgpt.data.corpus import read_corpus
from jaxgpt.data.documents import Place, open_source
from jaxgpt.errors import ConfigError, ResourceError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Four files, cut into pieces of 4 to 8 characters."""
    monkeypatch.setattr(cutting, "PIECE", 4)
    monkeypatch.setattr(cutting, "LONGEST", 8)
    (tmp_path / "a.txt").write_text("one two three\nfour")
    (tmp_path / "b.txt").write_text("five")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/d.txt").write_text("six seven eight nine ten eleven twelve")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "not taken beside .txt"}))
    return tmp_path


def test_pieces_are_the_documents_in_their_order(folder):
    source = open_source(DataConfig(path=str(folder), val_fraction=0.5))
    found = list(source.pieces())
    assert "".join(p.text for p in found) == "".join(read_corpus(folder).documents)
    assert [p.number for p in found] == list(range(len(found)))
    assert [p.held_out for p in found] == [source.hold_out(p.number) for p in found]
    begins = [found[0], next(p for p in found if p.text == "five"), *found[4:5]]
    assert all(
        p.fresh and p.place == Place(i, p.number, begins[i].place.chars)
        for i, p in enumerate(begins)
    )
    assert [p.place.chars for p in begins] == [0, 18, 22]
    for before, p in itertools.pairwise(found):
        assert p.fresh == (p in begins or p.held_out != before.held_out)


@pytest.mark.parametrize("max_chars", (None, 18, 19, 40))
def test_from_any_piece_the_rest_is_the_same(folder, max_chars):
    source = open_source(DataConfig(path=str(folder), max_chars=max_chars))
    found = list(source.pieces())
    text = "".join(p.text for p in found)
    assert text == "".join(read_corpus(folder, max_chars=max_chars).documents)
    for done in found:
        assert list(source.pieces(done.place, done.number + 1)) == found[done.number + 1 :]


def test_rows_are_lines_or_documents(folder):
    file = folder / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"text": t}) for t in ("a", "", "b c", "d")))
    lines = list(open_source(DataConfig(path=str(file))).pieces())
    assert "".join(p.text for p in lines) == "a\n\nb c\nd" and lines[0].fresh
    rows = list(open_source(DataConfig(path=str(file), rows="documents")).pieces())
    assert [(p.text, p.fresh) for p in rows] == [("a", True), ("b c", True), ("d", True)]


def test_the_built_in_text():
    source = open_source(DataConfig(max_chars=200_000))
    assert (
        "".join(p.text for p in source.pieces())
        == read_corpus(None, max_chars=200_000).documents[0]
    )
    assert source.names == ["python-reference"]


def test_the_inventory_changes_with_the_files(folder):
    before = open_source(DataConfig(path=str(folder))).inventory
    assert before == open_source(DataConfig(path=str(folder))).inventory
    (folder / "b.txt").write_text("FIVE")
    assert before != open_source(DataConfig(path=str(folder))).inventory


def test_what_cannot_be_opened(folder):
    for data, message in (
        (DataConfig(path=""), "the path of the text is empty"),
        (DataConfig(path=str(folder / "no")), "no text at"),
        (DataConfig(split="test"), "for sets of the hub"),
        (DataConfig(path=str(folder), encoding="no"), "unknown encoding"),
        (DataConfig(path="hf://a/b/c"), "names no data set"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_source(data)
    source = open_source(DataConfig(path=str(folder)))
    (folder / "b.txt").unlink()
    with pytest.raises(ResourceError, match=r"cannot read .*b\.txt: No such file"):
        list(source.pieces())
