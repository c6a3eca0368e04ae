# SPDX-License-Identifier: Apache-2.0
"""Folders of prepared tokens, ours and nanoGPT's: what is read and what is refused."""

import hashlib
import json

import numpy as np
import pytest

from jaxgpt.data import shards
from jaxgpt.data.shardedids import ShardedIds
from jaxgpt.data.shards import is_token_folder, open_token_folder
from jaxgpt.data.tokenizer import ByteTokenizer, CharTokenizer
from jaxgpt.errors import ConfigError, ResourceError

LETTERS = CharTokenizer("abcdefgh")


def write(folder, tokenizer=LETTERS, texts=("abc", "defgh"), val_texts=("ha",), **changes):
    """A folder as `jaxgpt prepare` writes it."""
    folder.mkdir()
    tokenizer.save(folder / "tokenizer.json")
    found = {
        "format": 1,
        "dtype": "uint8",
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "tokenizer_kind": tokenizer.kind,
        "eot_id": tokenizer.eot_id,
        "source": "0" * 64,
        "val_fraction": 0.1,
    }
    for part, some in (("train", texts), ("val", val_texts)):
        found[part] = []
        for number, text in enumerate(some):
            content = tokenizer.encode(text).astype(np.uint8).tobytes()
            name = f"{part}_{number:05}.bin"
            (folder / name).write_bytes(content)
            sha256 = hashlib.sha256(content).hexdigest()
            counts = {"tokens": len(content), "chars": len(text), "bytes": len(text.encode())}
            found[part].append({"file": name, **counts, "sha256": sha256})
    (folder / "tokens.json").write_text(json.dumps(found | changes))
    return folder


def refusal(folder, tokenizer=None, kind=ConfigError) -> str:
    with pytest.raises(kind) as caught:
        open_token_folder(folder, tokenizer)
    assert "\n" not in str(caught.value) and "; fix: " in str(caught.value)
    return str(caught.value)


def test_a_folder_is_its_files_in_a_row(tmp_path):
    folder = write(tmp_path / "a")
    assert is_token_folder(folder) and is_token_folder(str(folder))
    found = open_token_folder(folder)
    assert isinstance(found.train, ShardedIds) and isinstance(found.val, np.memmap)
    assert LETTERS.decode(found.train[:]) == "abcdefgh" and LETTERS.decode(found.val) == "ha"
    assert found.tokenizer.fingerprint == LETTERS.fingerprint
    assert (found.path, found.vocab_size, found.source) == (folder, 8, "0" * 64)
    assert (found.train_chars, found.val_chars, found.val_bytes) == (8, 2, 2)
    assert found.eot_id is None
    assert open_token_folder(folder, LETTERS).tokenizer is LETTERS
    assert len(open_token_folder(write(tmp_path / "b", val_texts=())).val) == 0


def test_what_is_no_token_folder(tmp_path):
    assert not any(map(is_token_folder, (None, "", tmp_path, tmp_path / "no", "x" * 5000, "\0")))
    assert "no prepared tokens" in refusal(tmp_path)
    (tmp_path / ".progress.json").write_text("{}")
    assert is_token_folder(tmp_path)
    assert "is not finished; fix: the same `jaxgpt prepare`" in refusal(tmp_path)


def test_another_tokenizer_is_refused(tmp_path):
    message = refusal(write(tmp_path / "a"), ByteTokenizer())
    assert "char tokenizer" in message and f"--data.tokenizer={tmp_path / 'a'}" in message
    ByteTokenizer().save(tmp_path / "a/tokenizer.json")
    assert "not the byte tokenizer" in refusal(tmp_path / "a")
    (tmp_path / "a/tokenizer.json").unlink()
    assert "tokenizer" in refusal(tmp_path / "a")


@pytest.mark.parametrize(
    "changes",
    (
        {"format": 2},
        {"dtype": "uint16"},
        {"vocab_size": 8.0},
        {"eot_id": 8},
        {"eot_id": "0"},
        {"source": None},
        {"train": [], "val": []},
        {"train": [{"file": "train_00000.bin"}]},
        {"train": [{"file": "../x.bin", "tokens": 1, "chars": 1, "bytes": 1, "sha256": ""}]},
        {"train": [{"file": "train_00000.bin", "tokens": 0, "chars": 1, "bytes": 1, "sha256": ""}]},
        {"train": [7]},
    ),
)
def test_a_damaged_list_is_refused(tmp_path, changes):
    assert "tokens.json is damaged" in refusal(write(tmp_path / "a", **changes))


@pytest.mark.parametrize("content", (b"", b"{", b"[]", b"\xff", b"[" * 100_000))
def test_a_list_that_is_no_list_is_refused(tmp_path, content):
    (write(tmp_path / "a") / "tokens.json").write_bytes(content)
    assert "tokens.json is damaged" in refusal(tmp_path / "a")


def test_files_of_another_size_are_refused(tmp_path):
    folder = write(tmp_path / "a")
    (folder / "train_00001.bin").write_bytes(b"\0" * 4)
    assert "train_00001.bin has 4 bytes, but 5 ids of uint8 need 5" in refusal(folder)
    (folder / "train_00001.bin").write_bytes(b"\0" * 6)
    assert "has 6 bytes" in refusal(folder)
    (folder / "train_00001.bin").unlink()
    assert "has 0 bytes" in refusal(folder)


def test_ids_outside_the_vocabulary_are_refused_when_opened_or_when_read(tmp_path, monkeypatch):
    folder = write(tmp_path / "a")
    (folder / "val_00000.bin").write_bytes(b"\1\x08")
    assert "id 8 is outside the vocabulary of 8" in refusal(folder)
    monkeypatch.setattr(shards, "CHECKED_IDS", 9)
    found = open_token_folder(folder)
    assert found.val[0] == 1
    with pytest.raises(ConfigError, match=f"id 8 is outside .*{folder}"):
        found.val[np.array([0, 1])]


def test_nanogpt_folders_are_read_as_they_are(tmp_path):
    np.array([0, 7, 3], "<u2").tofile(tmp_path / "train.bin")
    assert is_token_folder(tmp_path)
    assert "fix: name what made them: --data.tokenizer=gpt2" in refusal(tmp_path)
    (tmp_path / "meta.pkl").write_bytes(b"not even a pickle")
    assert "meta.pkl is a pickle, which is not read" in refusal(tmp_path)
    found = open_token_folder(tmp_path, LETTERS)
    assert found.train.tolist() == [0, 7, 3] and len(found.val) == 0
    np.array([1], "<u2").tofile(tmp_path / "val.bin")
    again = open_token_folder(tmp_path, LETTERS)
    assert again.val.tolist() == [1] and again.source != found.source
    assert (again.train_chars, again.val_chars, again.val_bytes) == (None, None, None)
    assert (again.vocab_size, again.tokenizer) == (8, LETTERS)
    np.array([8], "<u2").tofile(tmp_path / "val.bin")
    assert "id 8 is outside the vocabulary of 8" in refusal(tmp_path, LETTERS)
    (tmp_path / "val.bin").write_bytes(b"\0\0\0")
    assert "1 byte too many for uint16" in refusal(tmp_path, LETTERS)
    large = CharTokenizer("".join(map(chr, range(0x10000, 0x20001))))
    assert "hold uint16; the char tokenizer has 65537 ids" in refusal(tmp_path, large)


def test_a_folder_that_may_not_be_read(tmp_path):
    folder = write(tmp_path / "a")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("tokenizer.json")
    assert "cannot read" in refusal_of_the_system(folder)


def refusal_of_the_system(folder) -> str:
    with pytest.raises(ResourceError) as caught:
        open_token_folder(folder)
    return str(caught.value)
