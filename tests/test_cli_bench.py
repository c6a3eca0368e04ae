# SPDX-License-Identifier: Apache-2.0
"""`jaxgpt bench`: one table for each kind of work, a record, errors in one line."""

import json
from pathlib import Path

import hubfolders
import pytest
from commandline import error_line

from jaxgpt import cli
from jaxgpt.cli import bench
from jaxgpt.study import machine

SMALL = (
    "--model.vocab_size=40",
    "--model.n_layers=1",
    "--model.d_model=16",
    "--model.attention.n_heads=2",
    "--model.context_length=16",
    "--seconds=0.01",
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The limits are known."""
    limits = machine.Limits("float32", 1e11, 1e10, 1e10)
    monkeypatch.setattr(machine, "measure_limits", lambda dtype: limits)


def measured(capsys, tmp_path, *words):
    file = tmp_path / "out.json"
    assert cli.main(["bench", *words, *SMALL, f"--json={file}"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out, json.loads(file.read_text())


def test_training(capsys, tmp_path):
    out, record = measured(capsys, tmp_path, "train", "--batch-size=2")
    assert out.startswith("tiny: batch size 2, float32, 16 tokens a row\n")
    for words in ("tokens/s (train)", "ms a step, median", "GFLOP/s", "GB/s", "compiled in"):
        assert words in out
    found = record["measured"]
    assert found["tokens_per_s"] == pytest.approx(2 * 16 * 1e3 / found["ms_median"])
    assert found["share_of_matrix_rate"] == pytest.approx(found["gflops_per_s"] / 100)
    assert record["limits"]["read_bytes_per_s"] == 1e10 and record["machine"]["cores"] >= 1


def test_decoding_and_prefill(capsys, tmp_path):
    out, record = measured(capsys, tmp_path, "decode", "--batch-size=2", "--new-tokens=4")
    assert "prompt 8 tokens" in out and "float32 weights" in out
    assert (record["batch_size"], record["new_tokens"], record["tokens"]) == (2, 4, 1)
    out, record = measured(capsys, tmp_path, "prefill", "--batch-size=2", "--prompt-tokens=8")
    assert "ms a prompt batch" in out
    assert record["tokens"] == 8 and record["what"] == "prefill"


@pytest.mark.slow
def test_real_weights(capsys, tmp_path):
    folder = hubfolders.write(tmp_path / "model", hubfolders.LLAMA, hubfolders.llama())
    words = ["--model", str(folder), "--seconds=0.01", "--prompt-tokens=3", "--new-tokens=3"]
    words += ["--weights=int8"]
    assert cli.main(["bench", "decode", *words]) == 0
    assert str(folder) in capsys.readouterr().out


def test_help_names_every_option(capsys):
    for words in ([], ["--help"]):
        assert cli.main(["bench", *words]) == 0
        assert capsys.readouterr().out == bench.HELP
    for name in bench.NAMES:
        assert f"--{name} " in bench.HELP + " "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sing"], "cannot measure 'sing'; fix: one of train, decode, prefill"),
        (["train", "--weights=int8"], "--weights is for decode and prefill"),
        (["train", "--preset=tiny", "--model=gpt2"], "exclude each other"),
        (["decode", "--model=gpt3"], "no model 'gpt3'; fix: did you mean gpt?"),
        (["train", "--batch-size=0"], "--batch-size=0 must be above 0"),
        (["train", "--batchsize=2"], "--batchsize"),
        (["decode", "--prompt-tokens=128"], "leaves no room for new tokens in 128"),
    ],
)
def test_errors_are_one_line(words, message, capsys):
    assert cli.main(["bench", *words]) == 2
    assert message in error_line(capsys)


def test_vocabularies_are_the_tokenizers(capsys):
    sizes = {}
    for name, *words in (
        ["tiny"],
        ["gpt2-124m"],
        ["modern"],
        ["tiny", "--data.tokenizer=byte"],
    ):
        options, rest = bench._parser().parse_known_args(["train", "--preset", name, *words])
        run, _ = bench._run(options, rest)
        sizes[(name, *words)] = run.model.vocab_size
    assert list(sizes.values()) == [128, 50_257, 32_000, 257]


def test_the_page_names_every_option():
    page = (Path(cli.__file__).parents[2] / "docs" / "speed.md").read_text()
    assert all(f"`--{name}`" in page for name in bench.NAMES if name != "help")
