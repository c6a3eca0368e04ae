# SPDX-License-Identifier: Apache-2.0
"""Folders of prepared tokens: what is in them, and that nothing but the request decides it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fakehub
import numpy as np
import pytest
from test_hub import TOKEN, table, use

from jaxgpt.data import encoding
from jaxgpt.data import pieces as cutting
from jaxgpt.data import prepare as module
from jaxgpt.data.bpe import train_bpe
from jaxgpt.data.config import DataConfig
from jaxgpt.data.corpus import Corpus
from jaxgpt.data.pieces import HoldOut
from jaxgpt.data.prepare import prepare
from jaxgpt.data.shards import open_token_folder
from jaxgpt.data.tokens import prepare_tokens
from jaxgpt.errors import ConfigError, ResourceError

ROOT = Path(__file__).resolve().parents[1]
ROWS = [f"Row {i} of a text: naïve 🐕 {'x ' * (i % 7)}\nend" for i in range(60)]
SMALL = {"shard_tokens": 400, "workers": 2}


class Stop(Exception):  # noqa: N818
    """What a signal raises."""


def stop_at(n):
    """A `check` that raises when it is called the n-th time."""
    left = [n]

    def check():
        left[0] -= 1
        if left[0] == 0:
            raise Stop

    return check


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"text": row}) for row in ROWS))
    return DataConfig(path=str(file), rows="documents", tokenizer="byte", val_fraction=0.2)


def contents(folder):
    return {f.name: f.read_bytes() for f in Path(folder).iterdir() if f.name != ".lock"}


def refusal(kind, *args, **options) -> str:
    with pytest.raises(kind) as caught:
        prepare(*args, **options)
    assert "\n" not in str(caught.value) and "; fix: " in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("tokenizer", ("byte", "char", "bpe"))
def test_the_ids_are_those_of_a_token_file(tmp_path, rows, tokenizer):
    data = DataConfig(**(vars(rows) | {"tokenizer": tokenizer, "vocab_size": 300}))
    done = prepare(tmp_path / "out", data, **SMALL)
    found = open_token_folder(tmp_path / "out")
    held = list(map(HoldOut(0.2), range(60)))
    for part, name in ((False, "train"), (True, "val")):
        texts = [row for row, h in zip(ROWS, held, strict=True) if h == part]
        whole = prepare_tokens(Corpus.of(texts), found.tokenizer, tmp_path / name, val_fraction=0.0)
        assert np.array_equal(getattr(found, name)[:], whole.train)
        assert getattr(found, f"{name}_chars") == sum(map(len, texts))
    assert found.val_bytes == sum(len(r.encode()) for r, h in zip(ROWS, held, strict=True) if h)
    assert found.eot_id == found.tokenizer.eot_id
    n_files = len(list((tmp_path / "out").glob("*.bin")))
    counts = len(found.train) + len(found.val), len(found.val)
    assert (*counts, n_files) == (done.tokens, done.val_tokens, done.shards) and n_files > 2
    assert done.new and done.bytes == sum(len(row.encode()) for row in ROWS)
    again = prepare(tmp_path / "out", data, workers=1, shard_tokens=400)
    assert again == done._replace(new=False)


def test_a_tokenizer_with_a_begin_puts_it_before_every_document(tmp_path, rows):
    made = json.loads(train_bpe(ROWS, 300).to_str())
    begin = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    end = made["added_tokens"][0]["id"]
    made["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [end], "tokens": ["<|endoftext|>"]}
        },
    }
    (tmp_path / "t.json").write_text(json.dumps(made))
    prepare(tmp_path / "out", DataConfig(**(vars(rows) | {"tokenizer": str(tmp_path / "t.json")})))
    ids = open_token_folder(tmp_path / "out").train[:]
    n = len(ROWS) - sum(map(HoldOut(0.2), range(60)))
    assert ids[0] == end and (ids == end).sum() == 2 * n - 1
    assert ((ids[:-1] == end) & (ids[1:] == end)).sum() == n - 1


def test_long_documents_begin_anew_where_a_piece_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(cutting, "PIECE", 4)
    monkeypatch.setattr(cutting, "LONGEST", 8)
    (tmp_path / "a.txt").write_text("".join(f"{i:04} " for i in range(40)))
    data = DataConfig(path=str(tmp_path / "a.txt"), tokenizer="byte", val_fraction=0.25)
    prepare(tmp_path / "out", data)
    found = open_token_folder(tmp_path / "out")
    train, val = (bytes(ids).decode() for ids in (found.train, found.val))
    held = set(val.replace("\n", "").split())
    assert len(held) in (10, 11) and not held & set(train.replace("\n", " ").split())
    expected = ""
    for i in range(40):
        word = f"{i:04}"
        if word not in held:
            expected += word if i == 0 else (" " if f"{i - 1:04}" not in held else "\n ") + word
    assert train.strip() == expected.strip()


@pytest.mark.parametrize("tokenizer", ("byte", "bpe"))
def test_neither_threads_nor_interruptions_change_a_byte(tmp_path, rows, tokenizer, monkeypatch):
    monkeypatch.setattr(encoding, "GROUP_PIECES", 2)
    data = DataConfig(**(vars(rows) | {"tokenizer": tokenizer, "vocab_size": 300}))
    options = {"shard_tokens": 400, "bpe_sample": 500}
    prepare(tmp_path / "whole", data, workers=1, **options)
    expected = contents(tmp_path / "whole")
    prepare(tmp_path / "threads", data, workers=5, **options)
    assert contents(tmp_path / "threads") == expected
    for n in (1, 5, 13, 30, 55):
        folder = tmp_path / str(n)
        for check in (stop_at(n), stop_at(2)):
            with pytest.raises(Stop):
                prepare(folder, data, workers=2, check=check, **options)
            assert not (folder / "tokens.json").exists()
        prepare(folder, data, workers=2, **options)
        assert contents(folder) == expected


KILLED = """
import os, signal, sys
from jaxgpt.data import encoding, prepare
from jaxgpt.data.config import DataConfig
encoding.GROUP_PIECES, prepare.SAVE_S, left = 2, float(sys.argv[3]), [int(sys.argv[4])]
def check():
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
data = DataConfig(path=sys.argv[2], rows="documents", tokenizer="byte", val_fraction=0.2)
prepare.prepare(sys.argv[1], data, shard_tokens=400, check=check)
"""


def kill_at(n, folder, rows, save_s):
    words = [sys.executable, "-c", KILLED, str(folder), rows.path, str(save_s), str(n)]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "n", [33, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 11, 20, 45, 59))]
)
def test_killed_and_started_again_the_bytes_are_the_same(tmp_path, rows, n):
    prepare(tmp_path / "whole", rows, **SMALL)
    for save_s in (1e9, 0.0):
        kill_at(n, tmp_path / "out", rows, save_s)  # the second time it goes on before that
        assert not (tmp_path / "out/tokens.json").exists()
        with pytest.raises(ConfigError, match="is not finished"):
            open_token_folder(tmp_path / "out")
        if n > 30:
            break
    prepare(tmp_path / "out", rows, **SMALL)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_another_request_is_refused_where_something_was_done(tmp_path, rows):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        prepare(out, rows, check=stop_at(40), **SMALL)
    other = DataConfig(**(vars(rows) | {"val_fraction": 0.5}))
    message = refusal(ConfigError, out, other, **SMALL)
    assert "begun with other values: val_fraction: 0.2 -> 0.5" in message
    assert "shard_tokens: 400 -> 50" in refusal(ConfigError, out, rows, shard_tokens=50)
    os.utime(rows.path, ns=(1, 1))
    assert "the text's files" in refusal(ConfigError, out, rows, **SMALL)


def test_another_request_begins_anew_where_nothing_is_lost(tmp_path, rows):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        prepare(out, rows, check=stop_at(3), **SMALL)
    other = DataConfig(**(vars(rows) | {"tokenizer": "char"}))
    prepare(out, other, **SMALL)
    assert open_token_folder(out).tokenizer.kind == "char"
    assert "another text or with other options" in refusal(ConfigError, out, rows, **SMALL)


def test_a_changed_tokenizer_is_found(tmp_path, rows):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        prepare(out, rows, check=stop_at(40), **SMALL)
    (out / "tokenizer.json").write_text('{"jaxgpt_tokenizer": "char", "chars": "ab"}')
    assert "tokenizer.json is another one" in refusal(ConfigError, out, rows, **SMALL)


def test_what_is_refused(tmp_path, rows):
    out = tmp_path / "out"

    def changed(**changes):
        return DataConfig(**(vars(rows) | changes))

    assert "weights" in refusal(ConfigError, out, changed(format="chat", rows="lines"))
    assert "train.py" in refusal(ConfigError, out, changed(mask_documents=True))
    assert "no tokenizer at no" in refusal(ConfigError, out, changed(tokenizer="no"))
    for name in ("shard_tokens", "workers", "bpe_sample"):
        with pytest.raises(ConfigError, match=f"{name}=0 must be at least 1"):
            prepare(out, rows, **{name: 0})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("mine")
    assert "is not empty: it has letter.txt" in refusal(ConfigError, tmp_path / "mine", rows)
    assert "no folder can be at" in refusal(ConfigError, tmp_path / "mine/letter.txt", rows)
    with pytest.raises(ResourceError, match="File name too long"):
        prepare(tmp_path / ("x" * 300), rows)
    assert contents(tmp_path / "mine") == {"letter.txt": b"mine"}


def test_a_text_too_short_for_its_parts_leaves_nothing(tmp_path, rows):
    short = tmp_path / "a.txt"
    short.write_text("short")
    data = DataConfig(path=str(short), tokenizer="byte")
    message = refusal(ConfigError, tmp_path / "out", data)
    assert "the text has 1 pieces, and with val_fraction=0.1 none is for" in message
    assert contents(tmp_path / "out") == {}
    nulls = tmp_path / "n.jsonl"
    nulls.write_text('{"text": null}')
    data = DataConfig(path=str(nulls), tokenizer="byte")
    assert "there is no text" in refusal(ConfigError, tmp_path / "out", data)
    prepare(tmp_path / "out", rows)


def test_lines_say_how_far_it_is(tmp_path, rows, monkeypatch):
    monkeypatch.setattr(module, "SAY_S", 0.0)
    lines = []
    done = prepare(tmp_path / "out", rows, say=lines.append, **SMALL)
    assert len(lines) == 60 and lines[-1].startswith(f"0 MB, {done.tokens:,} tokens, ")
    assert lines[-1].endswith(" MB/s")


FILES = {
    "README.md": b"# verse\n",
    "data/train-00000-of-00002.parquet": table(ROWS[:40]),
    "data/train-00001-of-00002.parquet": table([None, *ROWS[40:]]),
}


def test_a_hub_set_is_read_at_one_commit(tmp_path, rows, monkeypatch):
    prepare(tmp_path / "local", rows, **SMALL)
    expected = contents(tmp_path / "local")
    with fakehub.serve(FILES) as hub:
        use(monkeypatch, hub.url, tmp_path / "hf")
        data = DataConfig(**(vars(rows) | {"path": "hf://owner/verse", "stream": True}))
        with pytest.raises(Stop):
            prepare(tmp_path / "out", data, check=stop_at(45), **SMALL)
        noted = json.loads((tmp_path / "out/.progress.json").read_bytes())
        assert noted["revision"] == fakehub.SHA and noted["piece"] > 9
        monkeypatch.setattr(hub, "mode", "down")
        assert "503" in refusal(ResourceError, tmp_path / "out", data, **SMALL)
        assert json.loads((tmp_path / "out/.progress.json").read_bytes()) == noted
        monkeypatch.setattr(hub, "mode", "ok")
        hub.requests.clear()
        prepare(tmp_path / "out", data, **SMALL)
        assert not [r for r in hub.requests if r.endswith("/revision/main")]
    found = contents(tmp_path / "out")
    for files in (found, expected):
        files["tokens.json"] = json.loads(files["tokens.json"]) | {"request": ""}
    assert found.keys() == expected.keys()
    assert [k for k in found if found[k] != expected[k]] == []


def test_gpt2_is_the_tokenizer_of_that_model(tmp_path, rows, monkeypatch):
    data = DataConfig(**(vars(rows) | {"tokenizer": "gpt2"}))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    message = refusal(ResourceError, tmp_path / "out", data)
    assert "fix: --data.tokenizer=FOLDER with its tokenizer.json" in message
    text = train_bpe(ROWS, 300).to_str()
    files = {"config.json": b"{}", "tokenizer.json": text.encode(), "model.safetensors": b"no"}
    with fakehub.serve(files, "openai-community/gpt2", "models") as hub:
        use(monkeypatch, hub.url, tmp_path / "hf")
        prepare(tmp_path / "out", data)
        assert not [r for r in hub.requests if "safetensors" in r]
        assert {token for token in hub.tokens if token} == {f"Bearer {TOKEN}"}
    assert open_token_folder(tmp_path / "out").tokenizer.vocab_size == 300
    (tmp_path / "gpt2").write_text(text)
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path / "here", data)  # what is here comes first
