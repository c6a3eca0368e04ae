# SPDX-License-Identifier: Apache-2.0
"""Exported folders in transformers, and adapters in PEFT: the same logits as ours.

It needs the extra `parity` (`pip install -e '.[test,parity]'`), and is skipped without it. Torch
works in a process of its own (`transformers_says.py`), which JAXGPT_PARITY_PYTHON may give to
another interpreter that has torch, transformers and peft: a job of continuous integration that has
them in an environment of their own sets that, any other installs the extra.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from exports import IDS, VARIANTS, grown, shrunk, variant
from test_peft import LORA, adapted
from test_save import PARITY

from jaxgpt import cli
from jaxgpt.data.bpe import train_bpe
from jaxgpt.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from jaxgpt.interop.load import load
from jaxgpt.interop.peft import save_adapter
from jaxgpt.interop.save import save
from jaxgpt.testing import jit_forward
from jaxgpt.train.config import LoraConfig
from jaxgpt.train.lora import merged

OTHER = os.environ.get("JAXGPT_PARITY_PYTHON")
SCRIPT = Path(__file__).with_name("transformers_says.py")
TOLERANCE = 1e-4

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(
        OTHER is None and importlib.util.find_spec("torch") is None,
        reason="the extra parity is not installed",
    ),
]

PRESETS = """gpt gpt2 llama-7b llama3.2-1b mistral-7b mixtral-8x7b smollm2-135m smollm3-3b
    qwen2-0.5b qwen3-0.6b qwen3-30b-a3b deepseek-v2-lite deepseek-v2 deepseek-v3 gemma-2b gemma2-2b
    gemma3-270m pythia-70m olmo2-7b gpt-oss-20b modern""".split()
TEXT = "Alice was\n beginning to  get very\r\n tired, “of” sitting 🙂"
TOKENIZERS = {
    "char": lambda: CharTokenizer(TEXT),
    "byte": ByteTokenizer,
    "bpe": lambda: BPETokenizer(train_bpe([TEXT], 280)),
}
ADAPTERS = {
    "llama": ("llama-7b", ("attention/*", "ffn/*", "head/*")),
    "gpt2": ("gpt2", ("attention/*", "ffn/*")),
    "gpt2-part": ("gpt2", ("attention/q", "block_1/attention/v")),
    "pythia": ("pythia-70m", ("attention/k", "attention/v", "ffn/up")),
    "deepseek": ("deepseek-v3", ("attention/*",)),
    "mixtral": ("mixtral-8x7b", ("attention/*",)),
}


def says(request, folder):
    """What the other process answers."""
    (folder / "request.json").write_text(json.dumps(request))
    words = [OTHER or sys.executable, str(SCRIPT), "request.json", "said.npz"]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with np.load(folder / "said.npz") as said:
        return dict(said)


def logits(cfg, params, ids=IDS):
    out = jit_forward(cfg, params, jnp.asarray(ids, jnp.int32)).logits_BTV
    return np.asarray(out[..., : cfg.vocab_size])


def assert_close(said, name, want):
    assert f"{name}/error" not in said, said[f"{name}/error"]
    tolerance = TOLERANCE * max(1.0, np.abs(want).max())
    np.testing.assert_allclose(said[f"{name}/logits"], want, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def reference(shared, tmp_path_factory):
    """All reference models, imported, exported, and run by transformers."""
    folder, request = tmp_path_factory.mktemp("reference"), {}
    for name in PARITY:
        cfg, params, _ = load(shared / "parity" / name)
        family = json.loads((shared / "parity" / name / "config.json").read_text())["model_type"]
        save(folder / name, cfg, params, family=family)
        ids = np.load(shared / "parity" / name / "ref.npz")["ids"].tolist()
        request[name] = {"folder": name, "ids": ids}
    return says(request, folder)


@pytest.mark.parametrize("name", PARITY)
def test_reference_models(shared, reference, name):
    assert f"{name}/error" not in reference, reference[f"{name}/error"]
    want = np.load(shared / "parity" / name / "ref.npz")["logits"]
    np.testing.assert_allclose(reference[f"{name}/logits"], want, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def unusual(tmp_path_factory):
    """Knobs that the reference models do not turn, and small forms of the presets."""
    folder, models = tmp_path_factory.mktemp("unusual"), {}
    for name in (*VARIANTS, *PRESETS):
        cfg = variant(name) if name in VARIANTS else shrunk(name)
        models[name] = cfg, grown(cfg)
        family = VARIANTS[name]["model_type"] if name in VARIANTS else None
        save(folder / name, *models[name], family=family)
    return models, says({name: {"folder": name, "ids": IDS} for name in models}, folder)


@pytest.mark.parametrize("name", [*VARIANTS, *PRESETS])
def test_what_can_be_said_is_the_same_model(unusual, name):
    models, said = unusual
    assert_close(said, name, logits(*models[name]))


def test_tokenizers(tmp_path):
    cfg, request = shrunk("smollm2-135m"), {}
    for name, make in TOKENIZERS.items():
        tokenizer = make()
        model = dataclasses.replace(cfg, vocab_size=tokenizer.vocab_size)
        save(tmp_path / name, model, grown(model), tokenizer)
        request[name] = {"folder": name, "ids": [[1]], "text": TEXT}
    said = says(request, tmp_path)
    for name, make in TOKENIZERS.items():
        assert f"{name}/error" not in said, said[f"{name}/error"]
        assert said[f"{name}/text_ids"].tolist() == make().encode(TEXT).tolist()
        assert str(said[f"{name}/decoded"]) == TEXT
        assert said[f"{name}/ends"].tolist() == ([] if make().eot_id is None else [make().eot_id])


@pytest.mark.parametrize("lora", [(), ("--lora.rank=4", "--optim.lr=1e-2")])
def test_a_fine_tuned_model(shared, tmp_path, monkeypatch, lora):
    """From the command line to transformers, and with adapters to PEFT on the model it names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("Once there was a small dog. " * 100)
    words = "--data.path=text.txt --model.context_length=64 --train.steps=4 --train.batch_size=4"
    words += " --optim.warmup_steps=1 --show.sample_tokens=0 --show.pictures=false"
    origin = f"--init-from={shared / 'data' / 'stories260k'}"
    assert cli.train_main([origin, *words.split(), *lora]) == 0
    assert cli.main(["export", "finetune", "out", "--dtype=float32"]) == 0
    cfg, params, _ = load("out")
    request = {"out": {"folder": "out", "ids": [[1, *range(40, 60)]], "text": "Once upon a time"}}
    if lora:
        assert cli.main(["export", "finetune", "adapter", "--adapter"]) == 0
        base = json.loads(Path("adapter/adapter_config.json").read_text())
        request["adapter"] = {"folder": base["base_model_name_or_path"], "adapter": "adapter"}
        request["adapter"]["ids"] = request["out"]["ids"]
    said, want = says(request, tmp_path), logits(cfg, params, request["out"]["ids"])
    for name in request:
        assert_close(said, name, want)
    assert str(said["out/decoded"]) == "Once upon a time"


def test_peft(tmp_path):
    request, wanted = {}, {}
    for name, (preset, targets) in ADAPTERS.items():
        cfg = shrunk(preset)
        lora = LoraConfig(rank=LORA.rank, alpha=LORA.alpha, targets=targets)
        params = adapted(cfg, lora)
        base = {key: value for key, value in params.items() if key != "lora"}
        save(tmp_path / name, cfg, base)
        save_adapter(tmp_path / f"{name}-lora", cfg, params, lora, base=name)
        request[name] = {"folder": name, "ids": IDS, "adapter": f"{name}-lora"}
        wanted[name] = logits(cfg, merged(params, lora)), logits(cfg, base)
    said = says(request, tmp_path)
    for name, (want, before) in wanted.items():
        assert_close(said, name, want)
        assert np.abs(want - before).max() > 0.1, "the adapter does something"
