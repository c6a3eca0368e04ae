# SPDX-License-Identifier: Apache-2.0
"""Data sets of the hub, by the real `datasets` library against a hub on this machine."""

import dataclasses
import io
import os
import subprocess
import sys
import time
from pathlib import Path

import fakehub
import pyarrow
import pytest
from commandline import MICRO, ROOT
from pyarrow import parquet

from jaxgpt.cli.train import train_main
from jaxgpt.data.config import DataConfig
from jaxgpt.data.hub import is_hub, read_hub
from jaxgpt.data.source import read_source
from jaxgpt.errors import ConfigError, Interrupted, ResourceError
from jaxgpt.train.rundata import open_data
from jaxgpt.train.runfolder import Signals, open_run

ROWS = ["", " = Title = ", None, "naïve\u2028 \r\n", "last"]
TEXT = "\n".join(row for row in ROWS if row is not None)
DATA = DataConfig(path="hf://owner/verse", hub_timeout=10.0)
TOKEN = "hf_doNotShowThis"


def table(rows) -> bytes:
    buffer = io.BytesIO()
    columns = {"text": rows, "n": list(range(len(rows)))}
    parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


FILES = {"README.md": b"# verse\n", "data/train-00000-of-00001.parquet": table(ROWS)}


def use(monkeypatch, hub_url, home):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub_url)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with fakehub.serve(FILES) as hub:
        use(monkeypatch, hub.url, tmp_path / "hf")
        yield hub


def refusal(kind=ConfigError, **change) -> str:
    with pytest.raises(kind) as caught:
        read_hub(dataclasses.replace(DATA, **change))
    message = str(caught.value)
    assert caught.value.exit_code == (2 if kind is ConfigError else 5)
    assert "\n" not in message and "; fix: " in message and TOKEN not in message
    return message


def test_whole_and_streamed_sets_are_the_rows_joined_with_newlines(hub):
    corpus, revision = read_hub(DATA)
    assert corpus.documents == (TEXT,) and corpus.name == "owner/verse"
    assert revision == fakehub.SHA
    assert f"Bearer {TOKEN}" in hub.tokens
    streamed = dataclasses.replace(
        DATA, stream=True, max_chars=15, path=f"hf://datasets/owner/verse@{fakehub.SHA}"
    )
    assert read_hub(streamed)[0].documents == (TEXT[:15],)
    rows = dataclasses.replace(DATA, rows="documents")
    assert read_hub(rows)[0].documents == tuple(row for row in ROWS if row is not None)


def test_short_name_is_the_subset_of_salesforce(tmp_path, monkeypatch):
    card = "---\nconfigs:\n"
    files = {}
    for name in ("wikitext-103-raw-v1", "wikitext-2-raw-v1"):
        card += (
            f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train-*\n"
        )
        files[f"{name}/train-00000-of-00001.parquet"] = table([name, "", "end"])
    with fakehub.serve(
        {"README.md": f"{card}---\n".encode(), **files}, "Salesforce/wikitext"
    ) as hub:
        use(monkeypatch, hub.url, tmp_path / "hf")
        corpus, _ = read_source(DataConfig(path="wikitext-2", max_chars=20))
        assert corpus.documents == ("wikitext-2-raw-v1\n\nend"[:20],)
        message = refusal(path="hf://Salesforce/wikitext")
        assert "wikitext-2-raw-v1" in message and "--data.subset" in message


def test_what_is_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub("hf://a/b") and is_hub("wikitext-2") and not is_hub(None) and not is_hub("a/b")
    (tmp_path / "wikitext-2").write_text("mine")
    assert not is_hub("wikitext-2")
    for path in ("hf://", "hf://a/b/c", "hf://a/b@", "hf://../x y"):
        with pytest.raises(ConfigError, match="hf://OWNER/NAME"):
            read_hub(DataConfig(path=path))
    with pytest.raises(ConfigError, match="for sets of the hub"):
        read_source(DataConfig(split="test"))


def test_a_folder_of_the_same_name_is_not_taken_for_the_set(hub, tmp_path, monkeypatch):
    (tmp_path / "owner/verse").mkdir(parents=True)
    (tmp_path / "owner/verse/train.txt").write_text("not this")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", "hf")
    assert read_hub(DATA)[0].documents == (TEXT,)
    assert (tmp_path / "hf").is_dir()


def test_wrong_names_are_bad_input(hub):
    assert "no column 'body' but text, n; fix: --data.column" in refusal(column="body")
    assert "holds int, not text" in refusal(column="n")
    assert "['train']; fix: --data.split" in refusal(split="test")
    assert "['default']; fix: --data.subset" in refusal(subset="x")
    assert "no such revision" in refusal(path="hf://owner/verse@none")
    assert "no data set owner/prose" in refusal(path="hf://owner/prose")


@pytest.mark.parametrize(
    ("mode", "kind", "words"),
    [
        ("missing", ConfigError, "no data set owner/verse"),
        ("gated", ConfigError, "owner/verse is gated; fix: ask for access at http"),
        ("limited", ResourceError, "(429); fix: wait"),
        ("down", ResourceError, "answers 503"),
    ],
)
def test_refusals_are_told_apart(hub, mode, kind, words):  # G4, H9
    hub.mode = mode
    assert words in refusal(kind)


def test_unreachable_hub(tmp_path, monkeypatch):  # G1
    use(monkeypatch, "http://127.0.0.1:9", tmp_path / "hf")
    message = refusal(ResourceError)
    assert "cannot reach http://127.0.0.1:9" in message and "--data.path=FILE" in message


@pytest.mark.parametrize("mode", ["stall", "stall_body"])
def test_a_hub_that_stalls_is_given_up(hub, mode):  # G2
    hub.mode = mode
    assert "sent nothing of owner/verse for 2 s" in refusal(ResourceError, hub_timeout=2.0)


@pytest.mark.slow
def test_a_slow_download_is_no_stall(hub):
    """Twice as long as the timeout, but never without progress."""
    hub.mode = "slow"
    began = time.monotonic()
    assert read_hub(dataclasses.replace(DATA, hub_timeout=2.0))[0].documents == (TEXT,)
    assert time.monotonic() - began > 4


@pytest.mark.slow
def test_half_a_download_is_an_error_and_the_next_run_works(hub):  # G3
    hub.mode = "half"
    assert "closed connection" in refusal(ResourceError)
    hub.mode = "ok"
    assert read_hub(DATA)[0].documents == (TEXT,)


def test_offline_uses_the_cache_alone(hub, monkeypatch):  # G5
    read_hub(DATA)
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert read_hub(DATA) == read_hub(DATA, revision=fakehub.SHA)
    with pytest.raises(ResourceError, match="is cached, not aaaa"):
        read_hub(DATA, revision="a" * 40)
    assert "not cached, and HF_HUB_OFFLINE is set" in refusal(ResourceError, path="hf://a/b")
    assert hub.requests == []


def test_another_revision_in_the_cache_is_not_taken_silently(hub):
    read_hub(DATA)
    hub.sha = "f" * 40
    hub.files = {}
    assert "hub failed" in refusal(ResourceError)


def test_a_signal_ends_the_wait_and_the_worker(hub):
    hub.mode = "stall"

    def check():
        if hub.requests:
            raise Interrupted("stopped", signum=15)

    with pytest.raises(Interrupted):
        read_hub(DATA, check=check)
    with pytest.raises(ChildProcessError):  # no child is left
        os.waitpid(-1, os.WNOHANG)


def test_a_run_asks_the_hub_only_where_it_lacks_its_tokens(hub, tmp_path, monkeypatch):
    folder, facts = open_run(tmp_path / "run"), {}
    tokens, tokenizer = open_data(folder, DATA, facts, Signals())
    assert facts["revision"] == fakehub.SHA and tokenizer.kind == "char"
    began, whole = dict(facts), tokens.train.tolist()
    hub.requests.clear()
    hub.sha, hub.mode = "e" * 40, "down"
    again, _ = open_data(folder, DATA, facts, Signals())
    assert hub.requests == [] and again.train.tolist() == whole and facts == began
    other = dataclasses.replace(DATA, val_fraction=0.5)  # these tokens are not there
    with pytest.raises(ResourceError, match="answers 503"):
        open_data(folder, other, facts, Signals())
    hub.sha, hub.mode = fakehub.SHA, "ok"
    tokens.path.unlink()
    assert open_data(folder, DATA, facts, Signals())[0].train.tolist() == whole
    assert any(f"revision/{fakehub.SHA}" in request for request in hub.requests)
    hub.files = {"README.md": b"", "train.parquet": table(["another text"])}
    monkeypatch.setenv("HF_HOME", str(tmp_path / "fresh"))
    tokens.path.unlink()
    with pytest.raises(ConfigError, match="the text has changed"):
        open_data(folder, DATA, facts, Signals())


@pytest.mark.slow
def test_training_on_a_set_of_the_hub(hub, tmp_path, monkeypatch, capsys):
    """It goes on without the hub, and says in one line, rc 5, where that cannot be."""
    monkeypatch.chdir(tmp_path)
    hub.files = {"README.md": b"", "train.parquet": table([f"line {i}" for i in range(200)])}
    words = [word for word in MICRO if not word.startswith("--data.path")]
    command = [*words, "--data.path=hf://owner/verse"]
    assert train_main([*command, "--run=a"]) == 0
    run = tmp_path / "runs/a"
    assert f'"revision": "{fakehub.SHA}"' in (run / "run.json").read_text()
    assert TOKEN not in "".join(p.read_text("latin-1") for p in run.rglob("*") if p.is_file())
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert train_main([*command, "--run=a", "--train.steps=6", "--data.hub_timeout=5"]) == 0
    capsys.readouterr()
    assert train_main([*command, "--run=b"]) == 5
    assert "cannot reach" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_worker_ends_with_a_killed_parent(hub):
    hub.mode = "stall"
    code = "from jaxgpt.data.hub import read_hub; from jaxgpt.data.config import *"
    code += "\nread_hub(DataConfig(path='hf://owner/verse'))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], env=env) as parent:
        while not hub.requests:
            time.sleep(0.1)
        tasks = Path(f"/proc/{parent.pid}/task").glob("*/children")
        workers = " ".join(task.read_text() for task in tasks).split()
        parent.kill()
    assert workers
    time.sleep(1)
    for worker in workers:
        stat = Path(f"/proc/{worker}/stat")
        assert not stat.exists() or stat.read_text().split()[2] == "Z"
