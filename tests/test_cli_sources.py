# SPDX-License-Identifier: Apache-2.0
"""What the sample command draws from: runs, of which one drafts for another."""

import contextlib
import json
import re
import runpy
import shutil

import pytest
from commandline import MICRO, ROOT, TEXT, error_line

from jaxgpt import cli
from jaxgpt.data.tokenizer import CharTokenizer


def train(path, *words):
    with contextlib.chdir(path):
        assert cli.train_main(["--preset=tiny", *MICRO, *words]) == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`late`, the same run two steps `early`, and two of other characters."""
    path = tmp_path_factory.mktemp("runs")
    (path / "text.txt").write_text(TEXT)
    train(path, "--run=late")
    for name, text in {"early": TEXT, "other": TEXT.upper(), "digits": "0123456789"}.items():
        shutil.copytree(path / "runs/late", path / "runs" / name)
        CharTokenizer(text).save(path / "runs" / name / "tokenizer.json")
        (path / "runs" / name / "run.json").unlink()
    shutil.rmtree(path / "runs/early/checkpoints/step_00000004")
    return path


def sample(capsys, *words, code=0):
    capsys.readouterr()
    words = ("--run=late", "--prompt=the ", "--max-new-tokens=11", *words)
    assert cli.sample_main(words) == code
    return capsys.readouterr() if code == 0 else error_line(capsys)


@pytest.mark.slow
def test_a_run_drafts_for_another(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    plain = sample(capsys, "--greedy")
    assert plain.err == ""
    for draft in ("early", "./runs/early"):
        found = sample(capsys, "--greedy", f"--draft={draft}")
        assert found.out == plain.out
        line = re.fullmatch(r"draft: (\d\.\d) of 4 tokens accepted a round\n", found.err)
        assert line and 0 <= float(line[1]) <= 4
    # One that is the model: behind the first token ten in two rounds of five.
    found = sample(capsys, "--greedy", "--draft=late")
    assert found == (plain.out, "draft: 4.0 of 4 tokens accepted a round\n")
    found = sample(capsys, "--draft=early", "--prompt=the quick brown ")
    assert found.err.startswith("draft: not used, for the prompt")


@pytest.mark.slow
def test_one_layer_drafts_for_three(runs, monkeypatch, capsys):
    train(runs, "--run=three", "--model.n_layers=3", "--train.steps=30")
    monkeypatch.chdir(runs)
    for words in (["--greedy"], ["--greedy", "--weights=int8"]):
        plain = sample(capsys, "--run=three", *words)
        found = sample(capsys, "--run=three", "--draft=late", "--draft-tokens=3", *words)
        assert found.out == plain.out and " of 3 tokens accepted" in found.err
    plain = sample(capsys, "--run=three", "--seed=4")
    assert sample(capsys, "--run=three", "--seed=4", "--draft=three").out == plain.out


@pytest.mark.slow
def test_the_benchmark_of_drafts(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    words = "--target late --draft early --draft-tokens 3 --prompt the --new-tokens 12 --rounds 2"
    monkeypatch.setattr("sys.argv", ["speculative.py", *words.split(), "--out=out.json"])
    runpy.run_path(str(ROOT / "benchmarks" / "speculative.py"), run_name="__main__")
    rows = json.loads((runs / "out.json").read_text())["rows"]
    assert [(row["sampling"], row["draft_tokens"]) for row in rows] == [
        (sampling, tokens) for sampling in ("greedy", "sampled") for tokens in ("none", "3")
    ]
    assert all(row["tokens_per_s_best"] > 0 and row["times_as_fast_best"] > 0 for row in rows)
    assert rows[1]["same_text"] and 0 <= rows[1]["accepted"] <= 3 and rows[0]["accepted"] is None
    assert "| greedy | 3 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, code, message",
    [
        (["--draft=digits"], 2, "has a vocabulary of 10 tokens, the model one of 28 (--draft d"),
        (["--draft=other"], 2, "tokenizer is not the model's: ids stand for other texts (--draft"),
        (["--draft=nope"], 2, "'nope' is no folder, and names no model of the hub (--draft nope)"),
        (["--draft=early", "--draft-tokens=0"], 2, "draft_tokens=0"),
        (["--draft-tokens=2"], 2, "--draft-tokens is for a draft"),
        (["--weights=int2"], 2, "invalid choice: 'int2'"),
    ],
)
def test_drafts_that_cannot_be(runs, monkeypatch, capsys, words, code, message):
    monkeypatch.chdir(runs)
    assert message in sample(capsys, *words, code=code)
