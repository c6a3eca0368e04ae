# SPDX-License-Identifier: Apache-2.0
"""Model folders made to do harm: one line each, in no time, and nothing of theirs is run."""

import json
import os
import resource
import struct
import sys
import time

import hubfolders
import numpy as np
import pytest
from chatfolders import chat_folder
from commandline import ROOT, error_line, python
from hubfolders import LLAMA

from jaxgpt import cli
from jaxgpt.errors import CheckpointError, ConfigError
from jaxgpt.interop import load
from jaxgpt.interop.tensors import MAX_HEADER_BYTES, Tensors


@pytest.fixture
def model(tmp_path):
    return hubfolders.write(chat_folder(tmp_path / "m"), LLAMA, hubfolders.llama())


def refused(folder, kind=CheckpointError, code=4) -> str:
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        load(folder)
    assert time.monotonic() - began < 60
    assert caught.value.exit_code == code
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    return message


def config(folder, **change):
    (folder / "config.json").write_text(json.dumps(LLAMA | change))


def tensor(begin=0, end=4, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def header(tensors, *, length=None) -> bytes:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


CRAFTED = {
    "empty": b"",
    "short": b"\x01\x00",
    "length beyond the file": header({}, length=1 << 20),
    "length beyond all": header({}, length=(1 << 64) - 1),
    "no JSON": header(b"{" * 50),
    "a list": header(b"[]"),
    "deep": header(b'{"a":' * 50_000),
    "overlap": header({"a": tensor(), "b": tensor(2, 6)}) + bytes(6),
    "hole": header({"a": tensor(), "b": tensor(8, 12)}) + bytes(12),
    "past the end": header({"a": tensor(0, 400, (100,))}) + bytes(4),
    "trailing": header({"a": tensor()}) + bytes(400),
    "negative": header({"a": tensor(0, 4, (-1,))}) + bytes(4),
    "overflow": header({"a": tensor(0, 4, (1 << 62, 1 << 62))}) + bytes(4),
    "wrong size": header({"a": tensor(0, 4, (2,))}) + bytes(4),
    "unknown numbers": header({"a": tensor(dtype="PY")}) + bytes(4),
    "twice": header(b'{"a":%b,"a":%b}' % ((json.dumps(tensor()).encode(),) * 2)) + bytes(4),
}


@pytest.mark.parametrize("content", CRAFTED.values(), ids=CRAFTED)
def test_crafted_files(model, content):  # H3
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        load(model)
    assert "\n" not in str(caught.value)
    assert "model.safetensors" in str(caught.value) or "the files 1 tensors" in str(caught.value)


def test_a_header_bomb_is_not_read(model):  # H4
    """Two million keys are under the format's own limit, and take half a gigabyte."""
    names = b",".join(b'"k%d":""' % i for i in range(2_000_000))
    content = header(b'{"__metadata__":{' + names + b"}}")
    assert MAX_HEADER_BYTES < len(content) < 100_000_000
    (model / "model.safetensors").write_bytes(content)
    del content, names
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="a header of 26,888,908 bytes"):
        Tensors(model)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_pickles_are_never_opened(model, tmp_path, capsys):  # H1, H2
    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    content = __import__("pickle").dumps(Harm())
    (model / "pytorch_model.bin").write_bytes(content)
    assert load(model).config.d_model == 8, "beside safetensors it is of no interest"
    (model / "model.safetensors").write_bytes(content)
    assert "is not a whole safetensors file" in refused(model)
    (model / "model.safetensors").unlink()
    assert "pytorch_model.bin is a pickle, which is not opened" in refused(model)
    assert cli.sample_main([f"--model={model}", "--prompt=a"]) == 4
    assert "pickle" in error_line(capsys)
    assert not (tmp_path / "harm").exists()


def test_code_of_a_folder_is_not_run(model, tmp_path, monkeypatch):  # H8
    """`auto_map` names classes in files of the folder."""
    harm = f"import os; os.mkdir({str(tmp_path / 'harm')!r})\n"
    for name in ("modeling_llama.py", "configuration_llama.py", "__init__.py", "tokenizers.py"):
        (model / name).write_text(harm)
    remote = {"AutoConfig": "configuration_llama.L", "AutoModelForCausalLM": "modeling_llama.L"}
    config(model, auto_map=remote)
    monkeypatch.chdir(model)
    assert load(".").config.d_model == 8
    words = ("--model", str(model), "--prompt=a", "--max-new-tokens=1", "--device=cpu")
    done = python(str(ROOT / "sample.py"), *words, cwd=model)
    assert "id 64 is outside the vocabulary of 16" in done.stderr, "it came as far as the model"
    config(model, auto_map=remote, model_type="mine")
    assert "model_type='mine' is not known" in refused(model, ConfigError, 2)
    assert not (tmp_path / "harm").exists()
    assert not {"modeling_llama", "configuration_llama"} & sys.modules.keys()


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "a\0b", "..", ".", "", "sub/x", "C:\\x"])
def test_an_index_stays_in_its_folder(model, name):  # H5
    (model / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": name}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "index.json" in refused(model)


def test_a_link_out_of_the_folder_is_not_followed(model, tmp_path):  # H5
    (tmp_path / "secret").write_text("s")
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.jinja").symlink_to(tmp_path / "secret")
    assert "chat_template.jinja is a link out of the folder" in refused(model)


@pytest.mark.parametrize("name", ["../../x", "/x", "a/../b", "x\0y", "lora/x"])
def test_names_of_tensors_are_names_alone(model, tmp_path, name):  # H5
    tensors = hubfolders.llama() | {name: np.zeros(1, np.float32)}
    hubfolders.write(model, LLAMA, tensors)
    assert "belongs to no parameter of the model" in refused(model, ConfigError, 2)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"a": 1e999',
        "\x00",
        '{"model_type": "llama"}x',
        " " * 2**21,
    ],
    ids=["deep list", "deep dict", "cut", "zero", "trailing", "large"],
)
def test_a_config_that_is_none(model, text):  # H8
    (model / "config.json").write_text(text)
    assert "config.json" in refused(model)


@pytest.mark.parametrize(
    "key",
    """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim
    num_key_value_heads max_position_embeddings""".split(),
)
@pytest.mark.parametrize("value", [10**6, 10**12, 10**30, 0, -1, "8", 1e999, True])
def test_sizes_beyond_reason(model, key, value):  # H6, H8
    """Refused before anything of that size is made; a long context has no size of its own."""
    config(model, **{key: value})
    began = time.monotonic()
    if key == "max_position_embeddings" and type(value) is int and 0 < value < 10**8:
        assert load(model).config.context_length == value
    else:
        with pytest.raises((ConfigError, CheckpointError)) as caught:
            load(model)
        assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 60
