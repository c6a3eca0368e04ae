# SPDX-License-Identifier: Apache-2.0
"""Models of the hub, by the real `huggingface_hub` against a hub on this machine."""

import json
import os
import time
from pathlib import Path

import fakehub
import hubfolders
import pytest
from test_hub import TOKEN, use

from jaxgpt.errors import CheckpointError, ConfigError, Interrupted, JaxgptError, ResourceError
from jaxgpt.interop.hub import SHORT_NAMES, fetch_model
from jaxgpt.interop.load import load

REPO = "owner/bard"
UNWANTED = {  # of a repository: code, pickles, other formats, other people's folders
    "modeling_bard.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same again",
    "flax_model.msgpack": b"x",
    "onnx/config.json": b"{}",
    "README.md": b"# bard\n",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    folder = hubfolders.write(
        tmp_path_factory.mktemp("m") / "m", hubfolders.LLAMA, hubfolders.llama()
    )
    small = {
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{}",
        "generation_config.json": b"{}",
        "special_tokens_map.json": b"{}",
        "chat_template.jinja": b"",
    }
    made = {path.name: path.read_bytes() for path in folder.iterdir()}
    return made | small


@pytest.fixture
def hub(files, tmp_path, monkeypatch):
    with fakehub.serve(files | UNWANTED, REPO, "models") as hub:
        use(monkeypatch, hub.url, tmp_path / "hf")
        yield hub


def refusal(kind: type[JaxgptError], name=REPO, **options) -> str:
    with pytest.raises(kind) as caught:
        fetch_model(name, **options)
    message = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in message and "; fix: " in message and TOKEN not in message
    return message


def test_a_folder_is_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/bard").mkdir(parents=True)
    assert fetch_model("owner/bard") == (Path("owner/bard"), None)
    assert fetch_model(tmp_path) == (tmp_path, None)


@pytest.mark.parametrize(
    "name", ["", "bard", "./owner/bard", "a/b/c", "owner/bard@", "../bard", "a b/c", "a/b@c d"]
)
def test_names_of_nothing(name):
    if name == "owner/bard@":
        name += "@"
    assert "a folder with config.json, OWNER/NAME, or one of gpt2" in refusal(ConfigError, name)
    assert "is no folder" in refusal(ConfigError, Path("nothing/here"))


def test_what_a_model_is_made_of_is_fetched_and_nothing_else(hub, files):
    lines = []
    folder, commit = fetch_model(REPO, say=lines.append)
    assert commit == fakehub.SHA == folder.name and f"Bearer {TOKEN}" in hub.tokens
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert not any(name in request for request in hub.requests for name in UNWANTED)
    assert lines == []  # nothing large


def test_a_second_time_asks_for_the_commit_alone(hub):
    first = fetch_model(f"hf://{REPO}")
    hub.requests.clear()
    assert fetch_model(REPO) == first
    assert not [request for request in hub.requests if "GET" in request and "/api/" not in request]
    assert fetch_model(f"{REPO}@{fakehub.SHA}") == fetch_model(REPO, fakehub.SHA) == first


def test_shards_are_those_of_the_index(hub, files):
    whole = files["model.safetensors"]
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    hub.files = {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1-of-2.safetensors": whole,
        "model-2-of-2.safetensors": whole + b" " * 10_000_000,
        "other.safetensors": whole,
    }
    lines = []
    folder, _ = fetch_model(REPO, say=lines.append)
    assert {path.name for path in folder.iterdir()} == hub.files.keys() - {"other.safetensors"}
    assert lines == ["fetching model-2-of-2.safetensors of owner/bard, 10 MB"]


def test_short_names(monkeypatch, tmp_path, files):
    for name, repo in SHORT_NAMES.items():
        with fakehub.serve(files, repo, "models") as hub:
            if name != "gpt2":
                continue
            use(monkeypatch, hub.url, tmp_path / "hf")
            assert fetch_model(name)[1] == fakehub.SHA
    assert SHORT_NAMES["gpt2"] == "openai-community/gpt2"


@pytest.mark.parametrize(
    ("mode", "kind", "words"),
    [
        ("missing", ConfigError, "no model owner/bard on http"),
        ("gated", ConfigError, "owner/bard is gated; fix: ask for access at http"),
        ("limited", ResourceError, "(429); fix: wait, set HF_TOKEN, or a folder"),
        ("down", ResourceError, "answers 503"),
    ],
)
def test_refusals_are_told_apart(hub, mode, kind, words):  # G4, H9
    hub.mode = mode
    message = refusal(kind)
    assert words in message and "data" not in message


def test_wrong_names_and_revisions(hub):
    assert "no model owner/prose" in refusal(ConfigError, "owner/prose")
    message = refusal(ConfigError, f"{REPO}@none")
    assert "owner/bard has no such revision; fix: owner/bard" in message
    hub.files = {"README.md": b""}
    assert "owner/bard has no config.json" in refusal(ConfigError)


def test_a_pickle_alone_is_refused_by_its_name(hub):  # H1
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"x", "modeling.py": b"x"}
    message = refusal(CheckpointError)
    assert "pytorch_model.bin is a pickle, which is not fetched" in message
    assert not any("pytorch_model" in request for request in hub.requests)


def test_unreachable_hub(tmp_path, monkeypatch):  # G1
    use(monkeypatch, "http://127.0.0.1:9", tmp_path / "hf")
    message = refusal(ResourceError)
    assert "cannot reach http://127.0.0.1:9 for owner/bard" in message
    assert "a folder, or HF_HUB_OFFLINE=1 for what is cached" in message


@pytest.mark.parametrize("mode", ["stall", "stall_body"])
def test_a_hub_that_stalls_is_given_up(hub, mode):  # G2
    hub.mode = mode
    message = refusal(ResourceError, timeout_s=2.0)
    assert "sent nothing of owner/bard for 2 s; fix: try again, or a folder" in message


def test_a_signal_ends_the_wait_and_the_worker(hub):
    hub.mode = "stall"

    def check():
        if hub.requests:
            raise Interrupted("stopped", signum=15)

    with pytest.raises(Interrupted):
        fetch_model(REPO, check=check)
    with pytest.raises(ChildProcessError):  # no child is left
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.slow
def test_half_a_download_is_an_error_and_the_next_one_works(hub, files):  # G3
    hub.mode = "half"
    assert "cannot load owner/bard" in refusal(ResourceError)
    hub.mode = "ok"
    folder, _ = fetch_model(REPO)
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]


@pytest.mark.slow
def test_a_slow_download_is_no_stall(hub):
    hub.mode = "slow"
    began = time.monotonic()
    fetch_model(REPO, timeout_s=2.0)
    assert time.monotonic() - began > 4


def test_offline_uses_the_cache_alone(hub, monkeypatch):  # G5
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "owner/bard at main is not cached, and HF_HUB_OFFLINE" in refusal(ResourceError)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    first = fetch_model(REPO)
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_model(REPO) == fetch_model(REPO, fakehub.SHA) == first
    assert f"at {'a' * 40} is not cached" in refusal(ResourceError, revision="a" * 40)
    (first[0] / "model.safetensors").unlink()
    assert "model.safetensors of owner/bard is not cached" in refusal(ResourceError)
    assert hub.requests == []


def test_a_damaged_cache_is_found_when_it_is_read(hub):  # G6
    folder, _ = fetch_model(REPO)
    blob = (folder / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is not a whole safetensors file") as caught:
        load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a\0b", "C:\\x", "", 3])
def test_an_index_cannot_name_what_is_no_file_of_the_folder(hub, name):  # H5
    index = json.dumps({"weight_map": {"a": name}}).encode()
    hub.files = {"config.json": b"{}", "model.safetensors.index.json": index}
    assert "which is no file name" in refusal(ConfigError)


@pytest.mark.parametrize("text", [b"[" * 10_000, b"[]", b"{}", b'{"weight_map": 1}', b"\xff"])
def test_a_damaged_index(hub, text):  # H8
    hub.files = {"config.json": b"{}", "model.safetensors.index.json": text}
    assert "model.safetensors.index.json is damaged" in refusal(ConfigError)


def test_a_link_out_of_a_folder_is_not_followed(tmp_path):  # H5
    (tmp_path / "secret").write_text("s")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").symlink_to("real.json")
    (folder / "real.json").write_text("{}")
    assert fetch_model(folder) == (folder, None)
    (folder / "model.safetensors").symlink_to("../secret")
    assert "model.safetensors is a link out of the folder" in refusal(CheckpointError, folder)


def test_the_folder_of_the_cache_may_be_given_itself(hub):
    folder, _ = fetch_model(REPO)
    assert any(path.is_symlink() for path in folder.iterdir())
    assert fetch_model(folder) == (folder, None)
