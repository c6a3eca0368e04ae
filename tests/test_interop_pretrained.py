# SPDX-License-Identifier: Apache-2.0
"""Models as a whole: what `jaxgpt.interop.load` returns, and what a run begins with."""

import dataclasses
import subprocess
import sys

import fakehub
import hubfolders
import jax
import numpy as np
import pytest
from chatfolders import chat_folder
from commandline import ROOT
from hubfolders import GPT2, LLAMA
from test_hub import use

from jaxgpt.boxes.head import Tied
from jaxgpt.boxes.norm import LayerNorm
from jaxgpt.errors import CheckpointError, ConfigError
from jaxgpt.interop import load
from jaxgpt.interop.pretrained import check_fits, initial_params, read_model, skipped_lines
from jaxgpt.model import param_shapes
from jaxgpt.testing import jit_forward
from jaxgpt.train.digest import by_path


@pytest.fixture
def gpt2(tmp_path):
    return hubfolders.write(tmp_path / "gpt2", GPT2, hubfolders.gpt2())


def begin(folder, cfg):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), param_shapes(cfg)
    )
    return initial_params(folder, cfg, abstract), abstract


def test_config_parameters_and_tokenizer(tmp_path):
    folder = hubfolders.write(chat_folder(tmp_path / "m"), LLAMA, hubfolders.llama())
    lines = []
    config, params, tokenizer = load(folder, say=lines.append)
    assert config == read_model(folder) and lines == []
    assert jax.tree.map(lambda leaf: leaf.shape, params) == jax.tree.map(
        lambda leaf: leaf.shape, param_shapes(config)
    )
    assert tokenizer is not None and tokenizer.kind == "bpe"
    (folder / "tokenizer.json").unlink()
    assert load(str(folder)).tokenizer is None


def test_by_id(tmp_path, monkeypatch):
    folder = hubfolders.write(chat_folder(tmp_path / "m"), LLAMA, hubfolders.llama())
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with fakehub.serve(files, "owner/bard", "models") as hub:
        use(monkeypatch, hub.url, tmp_path / "hf")
        there = load("owner/bard", revision=fakehub.SHA)
    here = load(folder)
    assert there.config == here.config
    assert there.tokenizer.fingerprint == here.tokenizer.fingerprint
    leaves = [jax.tree.leaves(model.params) for model in (there, here)]
    assert all((a == b).all() for a, b in zip(*leaves, strict=True))


def test_what_is_skipped_is_said(gpt2):
    lines = []
    load(gpt2, say=lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("skipped transformer.h.0.attn.bias and 3 more: a causal mask")
    assert skipped_lines({"a": "why"}) == ["skipped a: why"]


def test_a_run_begins_with_the_very_parameters(gpt2):
    cfg = dataclasses.replace(read_model(gpt2), dropout=0.1)
    params, abstract = begin(gpt2, cfg)
    want, got = by_path(load(gpt2).params), by_path(params)
    assert want.keys() == got.keys()
    for path, leaf in by_path(abstract).items():
        assert (want[path] == got[path]).all() and got[path].sharding == leaf.sharding
        assert got[path].dtype == np.float32


def test_a_shorter_context_cuts_learned_positions(gpt2):
    whole = read_model(gpt2)
    cfg = dataclasses.replace(whole, context_length=5)
    params, _ = begin(gpt2, cfg)
    assert params["position"]["embedding"].shape == (5, 8)
    tokens_BT = np.arange(5)[None]
    want, got = (
        jit_forward(c, p, tokens_BT).logits_BTV
        for c, p in ((whole, load(gpt2).params), (cfg, params))
    )
    np.testing.assert_allclose(want, got, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"context_length": 9}, "context_length=9 exceeds the 8 tokens"),
        ({"d_model": 16}, r"block_0/attention/k/bias is \[16\], there \[8\].* and \d+ more"),
        ({"n_layers": 1}, r"block_1/attention/k/bias is absent, there \[8\]"),
        ({"n_layers": 3}, r"block_2/attention/k/bias is \[8\], there absent"),
        ({"vocab_size": 200}, r"embed/embedding is \[256, 8\], there \[128, 8\]"),
        ({"norm": LayerNorm(use_bias=False)}, "block_0/attention_norm/bias is absent"),
    ],
)
def test_what_does_not_fit(gpt2, change, words):
    cfg = dataclasses.replace(read_model(gpt2), **change)
    with pytest.raises(ConfigError, match=words) as caught:
        check_fits(cfg, gpt2)
    assert "; fix: " in str(caught.value) and "\n" not in str(caught.value)


def test_knobs_that_change_no_shape_may_change(gpt2):
    cfg = read_model(gpt2)
    assert cfg.head == Tied()
    check_fits(dataclasses.replace(cfg, norm=LayerNorm(eps=1e-3), head=Tied(softcap=5.0)), gpt2)


def test_a_folder_without_a_config(tmp_path):
    for call in (load, read_model):
        with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
            call(tmp_path)


def test_neither_torch_nor_transformers_is_imported(tmp_path):
    """Nor needed: importing either fails here."""
    folder = hubfolders.write(chat_folder(tmp_path / "m"), LLAMA, hubfolders.llama())
    code = f"""
import sys
sys.modules |= dict.fromkeys(("torch", "transformers"))
import jaxgpt, jaxgpt.interop
jaxgpt.interop.load({str(folder)!r})
assert "torch" not in [name for name, module in sys.modules.items() if module]
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT)})
