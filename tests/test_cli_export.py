# SPDX-License-Identifier: Apache-2.0
import contextlib
import importlib
import json
import os
import signal
from pathlib import Path

import hubfolders
import jax
import numpy as np
import pytest
from commandline import MICRO, TEXT, error_line
from hubfolders import LLAMA

from jaxgpt import cli
from jaxgpt.cli.stored import find_run, load_params
from jaxgpt.data.tokenizer import load_tokenizer
from jaxgpt.interop.load import load
from jaxgpt.train.rundata import with_vocabulary

OURS = (
    "--model.position=RoPE",
    "--model.norm=RMSNorm",
    "--model.final_norm=RMSNorm",
    "--model.attention=GQA",
    "--model.attention.use_bias=false",
    "--model.ffn=GatedMLP",
)
TUNED = (
    "--init-from=base",
    "--run=tuned",
    "--data.path=text.txt",
    "--data.tokenizer=byte",
    "--model.context_length=16",
    "--lora.rank=2",
    "--train.batch_size=4",
    "--train.steps=2",
    "--optim.warmup_steps=1",
    "--optim.lr=0.1",
    "--show.sample_tokens=0",
    "--show.pictures=false",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the runs `llama`, `plain` (a model that nobody has) and `tuned` (adapters)."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "text.txt").write_text(TEXT)
    tensors = hubfolders.llama()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.random.default_rng(1).normal(size=(256, 8)).astype(np.float32)
    size = {"vocab_size": 256, "max_position_embeddings": 32}
    hubfolders.write(folder / "base", LLAMA | size, tensors)
    with contextlib.chdir(folder):
        assert cli.train_main(["--run=llama", *OURS, *MICRO]) == 0
        assert cli.train_main(["--run=plain", *MICRO]) == 0
        assert cli.train_main(TUNED) == 0
    return folder


@pytest.fixture
def here(place, tmp_path, monkeypatch):
    """The current folder, with these runs."""
    for name in ("runs", "base"):
        (tmp_path / name).symlink_to(place / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def export(capsys, *words, code=0):
    capsys.readouterr()
    assert cli.main(["export", *words]) == code
    if code:
        return error_line(capsys)
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and err == "", err
    return out


def params_of(name, **how):
    folder, run = find_run(name)
    model = with_vocabulary(run.model, load_tokenizer(folder.tokenizer_path))
    return load_params(folder, model, "latest", run.lora, **how)


def test_a_run_becomes_a_folder(here, capsys):
    out = export(capsys, "llama", "out/llama")
    assert out.startswith("out/llama: llama, ") and out.endswith(" numbers, float32\n")
    back = load("out/llama")
    jax.tree.map(np.testing.assert_array_equal, back.params, params_of("llama"))
    tokenizer = load_tokenizer("out/llama")
    ours = load_tokenizer("runs/llama/tokenizer.json")
    assert tokenizer.encode(TEXT).tolist() == ours.encode(TEXT).tolist()
    assert back.config.vocab_size == ours.vocab_size
    assert cli.sample_main(["--model=out/llama", "--prompt=the", "--max-new-tokens=3"]) == 0
    capsys.readouterr()
    steps = sorted(int(path.name[5:]) for path in Path("runs/llama/checkpoints").glob("step_*"))
    export(capsys, "./runs/llama", "first", f"--checkpoint={steps[0]}", "--dtype=bfloat16")
    assert json.loads(Path("first/config.json").read_text())["dtype"] == "bfloat16"
    scales = [load(name).params["final_norm"]["scale"] for name in ("first", "out/llama")]
    assert np.abs(scales[0] - scales[1]).max() > 1e-3, "another step"


def test_adapters_are_merged_or_written_alone(here, capsys):
    export(capsys, "tuned", "merged")
    jax.tree.map(np.testing.assert_array_equal, load("merged").params, params_of("tuned"))
    beside = params_of("tuned", merge=False)
    assert "lora" in beside and np.abs(beside["lora"]["block_0"]["attention"]["q"]["b"]).max() > 0
    export(capsys, "tuned", "adapter", "--adapter")
    names = sorted(path.name for path in Path("adapter").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]).samefile("base")


def test_a_public_model(here, capsys):
    assert export(capsys, "./base", "out").startswith("out: llama, ")
    jax.tree.map(np.testing.assert_array_equal, load("out").params, load("base").params)
    assert export(capsys, "base", "other", "--family=mistral").startswith("other: mistral, ")


def test_only_force_replaces(here, capsys):
    export(capsys, "base", "out")
    line = export(capsys, "llama", "out", code=2)
    assert "out is there already; fix: another folder, or --force" in line
    export(capsys, "llama", "out", "--force")
    Path("out/notes.txt").touch()
    assert "holds notes.txt" in export(capsys, "llama", "out", "--force", code=2)


@pytest.mark.parametrize(
    "words, code, what",
    [
        ((), 2, "what to export, and where to, is missing"),
        (("llama",), 2, "where to, is missing"),
        (
            ("lama", "out"),
            2,
            "'lama' is neither a run below runs/ nor a public model; fix: one of ",
        ),
        (("no/such", "out"), 5, "no/such"),
        (("plain", "out"), 2, "no family of public checkpoints has this model; the nearest is "),
        (("llama", "out", "--family=gpt2"), 2, "gpt2 has no such model: position is RoPE"),
        (("llama", "out", "--family=bert"), 2, "no family 'bert'"),
        (("llama", "out", "--checkpoint=7"), 4, "there is no step 7"),
        (("llama", "out", "--adapter"), 2, "the run began with no --init-from"),
        (("base", "out", "--checkpoint=best"), 2, "--checkpoint and --adapter are for runs"),
        (("llama", "/proc/out"), 5, "/proc"),
        (("llama", "out", "--dtype=float64"), 2, "--dtype"),
        (("llama", "out", "--fore"), 2, "did you mean --force"),
    ],
)
def test_mistakes_are_one_line(here, capsys, words, code, what):
    assert what in export(capsys, *words, code=code)
    assert not Path("out").exists()


def test_help(capsys):
    assert cli.main(["export", "--help"]) == 0
    assert "jaxgpt export RUN_OR_MODEL OUT" in capsys.readouterr().out


def test_a_signal_leaves_nothing(here, capsys, monkeypatch):
    module = importlib.import_module("jaxgpt.interop.save")
    real = module.write_tensors

    def stopped(*given, **how):
        os.kill(os.getpid(), signal.SIGTERM)
        real(*given, **how)

    monkeypatch.setattr(module, "write_tensors", stopped)
    line = export(capsys, "llama", "out", code=128 + signal.SIGTERM)
    assert "stopped by SIGTERM; nothing was exported" in line
    assert sorted(path.name for path in here.iterdir()) == ["base", "runs"]
