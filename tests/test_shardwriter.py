# SPDX-License-Identifier: Apache-2.0
"""Shards that are written, interrupted anywhere, and gone on with."""

import hashlib
import json
import os

import numpy as np
import pytest

from jaxgpt.data.shardwriter import ShardWriter, read_progress, write_progress
from jaxgpt.errors import ConfigError, ResourceError

TEXTS = [(i % 3 == 1, np.full(1 + i % 4, i, np.int32)) for i in range(12)]


def write(folder, begin=0, stop=len(TEXTS), save_at=(), progress=None):
    writer = ShardWriter(folder, 300, 6)
    if progress is not None:
        writer.resume(progress)
    for number in range(begin, stop):
        held_out, ids = TEXTS[number]
        writer.add(held_out, ids, len(ids), 2 * len(ids))
        if number in save_at:
            writer.save({"next": number + 1})
    return writer


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    writer = write(folder)
    writer.commit({"eot_id": None}, "")
    return folder


def test_shards_are_the_texts_in_their_order(whole):
    found = json.loads((whole / "tokens.json").read_bytes())
    for held_out, part in enumerate(("train", "val")):
        ids = np.concatenate([ids for held, ids in TEXTS if held == held_out])
        files = [(whole / shard["file"]).read_bytes() for shard in found[part]]
        assert np.array_equal(np.frombuffer(b"".join(files), "<u2"), ids) and len(files) > 1
        for shard, content in zip(found[part], files, strict=True):
            n = len(content) // 2
            counts = {"tokens": n, "chars": n, "bytes": 2 * n}
            assert {k: shard[k] for k in counts} == counts and n <= 6
            assert shard["sha256"] == hashlib.sha256(content).hexdigest()
    assert (found["format"], found["dtype"], found["vocab_size"]) == (1, "uint16", 300)
    assert {file.suffix for file in whole.iterdir()} == {".bin", ".json"}


@pytest.mark.parametrize("saved", range(len(TEXTS)))
def test_after_any_interruption_the_bytes_are_the_same(whole, tmp_path, saved):
    for stop in range(saved + 1, len(TEXTS) + 1):
        folder = tmp_path / str(stop)
        folder.mkdir()
        writer = write(folder, stop=stop, save_at=[saved])
        for part in writer.parts:
            part.flush()  # more than was saved reached the disk
        writer.close()
        progress = read_progress(folder, lambda found: True)
        assert progress is not None and progress["next"] == saved + 1
        write(folder, begin=saved + 1, progress=progress).commit({"eot_id": None}, "")
        assert contents(folder) == contents(whole)


def test_the_source_tells_apart_what_differs(tmp_path):
    told = set()
    for i, facts in enumerate(({}, {"tokenizer": "a"}, {"eot_id": 1})):
        folder = tmp_path / str(i)
        folder.mkdir()
        write(folder, stop=12 - i // 2).commit(facts, str(i))
        told.add(json.loads((folder / "tokens.json").read_bytes())["source"])
    assert len(told) == 3


def test_what_is_damaged_is_not_gone_on_with(tmp_path):
    writer = write(tmp_path, stop=9, save_at=[8])
    writer.close()
    progress = read_progress(tmp_path, lambda found: True)
    assert progress is not None
    partial = next(tmp_path.glob(".train_*.part"))
    os.truncate(partial, 1)
    with pytest.raises(ConfigError, match=r"\.part has 1 bytes, not .*; fix: delete the folder"):
        ShardWriter(tmp_path, 300, 6).resume(progress)
    (tmp_path / "train_00000.bin").unlink()
    with pytest.raises(ConfigError, match=r"train_00000.bin has 0 bytes"):
        ShardWriter(tmp_path, 300, 6).resume(progress)


@pytest.mark.parametrize("content", (b"", b"[", b"[]", b"7", b"{}", b'{"a": 1}', b"\xff"))
def test_a_record_that_is_none(tmp_path, content):
    (tmp_path / ".progress.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"damaged: \.progress\.json is no record"):
        read_progress(tmp_path, lambda found: found["next"] > 0)
    write_progress(tmp_path, {"next": 1})
    assert read_progress(tmp_path, lambda found: found["next"] > 0) == {"next": 1}
    (tmp_path / ".progress.json").unlink()
    assert read_progress(tmp_path, lambda found: True) is None


def test_what_the_system_refuses_is_one_line(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    writer = ShardWriter(folder, 300, 6)
    folder.rmdir()
    with pytest.raises(ResourceError, match=r"cannot write .*: No such file or directory; fix: "):
        writer.add(False, TEXTS[0][1], 1, 1)
