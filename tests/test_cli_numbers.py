# SPDX-License-Identifier: Apache-2.0
"""`jaxgpt params` and `jaxgpt flops`: names, runs and folders; records; errors in one line."""

import json
import math
import re
from pathlib import Path

import hubfolders
import pytest
from commandline import error_line

from jaxgpt import cli
from jaxgpt.cli import numbers
from jaxgpt.config import RunConfig, to_yaml
from jaxgpt.costs import decode_costs, kv_bytes_per_token, prefill_costs, total, train_costs
from jaxgpt.data.tokenizer import train_tokenizer
from jaxgpt.flops import count_params
from jaxgpt.presets import MODELS, RUNS


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working directory, without runs."""
    monkeypatch.chdir(tmp_path)


def said(capsys, *words):
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def record(capsys, *words):
    return json.loads(said(capsys, *words, "--json"))


def make_run(name, recipe):
    """A run folder as far as it is there when training begins, with 37 characters."""
    folder = Path("runs", name)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(recipe))
    text = "abcdefghijklmnopqrstuvwxyz0123456789 "
    Path("text.txt").write_text(text)
    from jaxgpt.data.corpus import read_corpus

    tokenizer = train_tokenizer(recipe.data.tokenizer, read_corpus(Path("text.txt")), 0)
    tokenizer.save(folder / "tokenizer.json")


def test_parameters_as_a_bill_and_as_a_record(capsys):
    out = said(capsys, "params", "gpt2")
    lines = out.splitlines()
    assert lines[0] == "gpt2: 12 layers of width 768, 50,257 tokens, context 1,024"
    assert lines[-1].split() == ["total", "124,439,808"]
    assert re.search(r"\nL \(12 d\^2 \+ 2 d\) +the layers +84,953,088 +85,054,464 +-0.12%\n", out)
    found = record(capsys, "params", "gpt2")
    assert found["total"] == found["active"] == 124_439_808 == sum(found["parameters"].values())
    assert found["embedding_share"] == 38_597_376 / 124_439_808
    (kind,) = found["layers"]
    assert kind == {"boxes": "all boxes", "n": 12, "parameters": 7_087_872, "active": 7_087_872}
    assert found["formulas"][0]["formula"] == "12 L d^2"
    assert found["formulas"][2] | {"percent": 0.0} == found["formulas"][2], "V d is exact"


def test_nothing_is_allocated_for_the_largest(capsys):
    out = said(capsys, "params", "gpt3-175b")
    assert "48 layers of 1,812,099,072: attention.window=256\n" in out
    found = record(capsys, "params", "gpt3-175b")
    assert found["total"] == 174_604_259_328
    assert round(100 * found["embedding_share"], 3) == 0.354
    found = record(capsys, "params", "deepseek-v3")
    assert [kind["boxes"] for kind in found["layers"]] == ["GatedMLP", "MoE"]
    assert found["layers"][1]["active"] < found["layers"][1]["parameters"] / 19


def test_flops_as_a_table_and_as_a_record(capsys):
    words = (
        "flops",
        "gpt2",
        "--batch",
        "2",
        "--tokens",
        "512",
        "--dtype=float32",
        "--weights=int8",
    )
    found = record(capsys, *words)
    cfg, kind = MODELS["gpt2"](), {"dtype": "float32", "weights": "int8"}
    want = {
        "training": train_costs(cfg, 2, 512, dtype="float32", causal=True),
        "prefill": prefill_costs(cfg, 2, 512, **kind),
        "decode": decode_costs(cfg, 2, 512, **kind),
    }
    for name, costs in want.items():
        assert set(found[name]["boxes"]) == set(costs)
        for box, cost in [*costs.items(), ("total", total(costs))]:
            got = found[name]["total"] if box == "total" else found[name]["boxes"][box]
            assert (got["flops"], got["bytes"]) == (cost.flops, cost.bytes)
            assert got["flops_per_byte"] == cost.intensity
    assert found["cache_bytes_per_token"] == kv_bytes_per_token(cfg, "float32") == 73_728
    assert found["training"]["flops_over_all_keys"] == total(train_costs(cfg, 2, 512)).flops
    assert [rule["formula"] for rule in found["formulas"]] == ["6 N D", "2 N T", "2 N", "2 L d c"]
    lines = said(capsys, *words).splitlines()
    assert lines[0].endswith("context 1,024; float32, int8 weights")
    heads, units = lines[2], lines[3].split()
    assert heads.split("  ")[-1].strip() == "decode, 2 behind 511"
    assert units == [
        "box",
        "parameters",
        *("GFLOP GB FLOP/B GFLOP GB FLOP/B MFLOP MB FLOP/B".split()),
    ]
    table = {line.split()[0]: line.split()[1:] for line in lines[4:15]}
    assert list(table)[-3:] == ["head", "optimizer", "total"]
    assert set(table) == {*count_params(cfg), "scores", "head", "optimizer", "total"}
    assert table["total"][0] == "124,439,808"
    assert float(table["total"][1]) == pytest.approx(
        found["training"]["total"]["flops"] / 1e9, 0.01
    )
    assert len({len(line) for line in lines[4:13]}) == 1, "columns are aligned"
    assert re.search(r"decoding moves 123.7 MB of weights and 75.64 MB of caches", "\n".join(lines))


def test_models_of_any_size_have_flops(capsys):
    found = record(capsys, "flops", "gpt3-175b", "--batch=32")
    assert found["tokens"] == 2048 and found["decode"]["total"]["flops_per_byte"] < 25
    assert abs(found["formulas"][0]["percent"]) < 1, "6 N D is good where scores are few"
    found = record(capsys, "flops", "deepseek-v3", "--tokens=4096")
    assert found["cache_bytes_per_token"] == 70_272
    assert math.isclose(found["formulas"][3]["value"], 2 * 61 * 7168 * 2)


def test_runs_by_name_and_by_path(capsys):
    make_run("mine", RUNS["tiny"]())
    for name in ("mine", "./runs/mine"):
        found = record(capsys, "params", name)
        assert found["vocab_size"] == 37 and found["parameters"]["embed"] == 37 * 128
    found = record(capsys, "flops", "mine", "--model.n_layers=2")
    assert (found["n_layers"], found["tokens"]) == (2, 128)
    make_run("gpt2", RunConfig(model=MODELS["gpt2-xl"]()))
    assert record(capsys, "params", "gpt2")["n_layers"] == 12, "an architecture goes before a run"
    assert record(capsys, "params", "runs/gpt2")["n_layers"] == 48


def test_folders(capsys, tmp_path):
    hubfolders.write(tmp_path / "bard", hubfolders.LLAMA, hubfolders.llama())
    found = record(capsys, "flops", "bard", "--tokens=4")
    assert found["total"] == sum(found["parameters"].values()) and found["n_layers"] > 0


def test_help(capsys):
    assert said(capsys, "flops") == said(capsys, "flops", "gpt2", "--help") == numbers.FLOPS_HELP
    for name in numbers.OWN:
        assert f"  --{name} " in numbers.FLOPS_HELP
    assert len(numbers.FLOPS_HELP.splitlines()) <= 45
    out = said(capsys, "params", "--help")
    assert out == said(capsys, "params") and out.startswith(numbers.PARAMS_HELP)
    assert all(f"\n  {name} " in out for name in {**RUNS, **MODELS})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["flops", "gpt-2"], "did you mean gpt2?"),
        (["flops", "tiny"], "vocab_size is None"),
        (["flops", "gpt2", "--batch=0"], "--batch=0 and --tokens=1024 must be above 0"),
        (["flops", "gpt2", "--tokens=0"], "--tokens=0 must be above 0"),
        (["flops", "gpt2", "--tokens=2000"], "fix: --model.context_length=2000"),
        (["flops", "gpt2", "--dtype=int8"], "'float32', 'bfloat16', 'float16'"),
        (["flops", "gpt2", "--batchs=2"], "did you mean --batch?"),
        (["params", "gpt2", "--batch=2"], "--batch"),
        (["params", "gpt2", "stray"], "unexpected argument 'stray'"),
        (["params", "./nothing"], "no model './nothing'"),
    ],
)
def test_mistakes_are_one_line(capsys, words, message):
    assert cli.main(words) == 2
    assert message in error_line(capsys)
