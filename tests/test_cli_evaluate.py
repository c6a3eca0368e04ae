# SPDX-License-Identifier: Apache-2.0
"""`jaxgpt evaluate`: a table, a record, and one line for each thing that cannot be scored."""

import json
import math
from pathlib import Path

import hubfolders
import numpy as np
import pytest
from chatfolders import chat_folder, rows
from commandline import error_line

from jaxgpt import cli
from jaxgpt.cli import evaluate

TEXT = "one two three\nfour five six\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A public model, random and tiny, with a byte-level tokenizer."""
    tensors = hubfolders.llama()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.random.default_rng(1).normal(size=(264, 8)).astype(np.float32)
    config = hubfolders.LLAMA | {"vocab_size": 264, "max_position_embeddings": 32}
    folder = chat_folder(tmp_path_factory.mktemp("hub") / "model")
    return str(hubfolders.write(folder, config, tensors))


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    rows(Path("l.jsonl"), {"text": "I see the dog"}, {"text": "We met a bear"})
    return tmp_path


def run(*words):
    return cli.main(["evaluate", *words])


def test_a_table_and_a_record(model, data, capsys):
    words = ["--data", "text.txt", "--tasks", "lambada=l.jsonl", "--context=16", "--stride=8"]
    assert run(model, *words, "--out=out.json", "--examples") == 0
    out, err = capsys.readouterr()
    assert err == "" and "float32, windows of 16 tokens every 8" in out.splitlines()[0]
    record = json.loads(Path("out.json").read_text())
    assert record["settings"] == {
        "context": 16,
        "stride": 8,
        "limit": None,
        "batch_size": None,
        "dtype": "float32",
    }
    assert record["failed"] == [] and len(record["parameters_digest"]) == 16
    assert {"jaxgpt", "machine", "tokenizer", "model"} <= record.keys()
    text, lambada = record["results"]
    found = text["metrics"]
    n_bytes, nats = text["data"]["bytes"], found["nats_per_token"]["value"] * text["scored"]
    assert n_bytes == len(TEXT) - 1 and text["data"]["unscored_tokens"] == 1
    assert found["bits_per_byte"]["value"] == pytest.approx(nats / math.log(2) / n_bytes)
    assert found["bits_per_byte"]["stderr"] > 0 and text["data"]["windows"] > 1
    assert f"text.txt         token perplexity  {found['token_perplexity']['value']:10.4f}" in out
    assert "1 with nothing before them not" in out
    assert (lambada["scored"], lambada["unit"]) == (2, "passages")
    assert [len(each["log_probs"]) for each in lambada["examples"]] == [1, 1]
    assert lambada["data"]["file"] == "l.jsonl" and len(lambada["data"]["sha256"]) == 64


def test_what_cannot_be_scored_stops_nothing_else(model, data, capsys):
    words = ["--data", "no.txt", "text.txt", "--tasks", "enwik8", "lambada=no.jsonl", "--limit=1"]
    assert run(model, *words) == 2
    out, err = capsys.readouterr()
    assert "text.txt" in out and "lambada" not in out
    lines = err.splitlines()
    assert len(lines) == 3 and all(line.startswith("error: ") for line in lines)
    assert "no.txt not scored: no text at no.txt" in lines[0] and "fix: --data FILE" in lines[0]
    assert lines[1].endswith("fix: --tasks enwik8=FILE")
    assert lines[2].endswith("there is no file no.jsonl; fix: --tasks lambada=FILE")


@pytest.mark.slow
def test_a_run(finished, data, capsys):
    path = finished / "runs" / "micro"
    Path("text.txt").write_text("abc dab\ncab")
    assert run(str(path), "--data", "text.txt", "--batch-size=2") == 0
    assert "windows of 16 tokens every 16" in capsys.readouterr().out
    Path("text.txt").write_text("xyz")
    assert run(str(path), "--data", "text.txt") == 2
    assert "not among the" in error_line(capsys)


def test_help_names_every_option(capsys):
    assert run("--help") == 0
    assert capsys.readouterr().out == evaluate.HELP
    options = evaluate._parser()._option_string_actions
    assert all(f"{name} " in evaluate.HELP for name in options if name != "-h")
    assert len(evaluate.HELP.splitlines()) <= 45
    from jaxgpt.study.evaluation import TASKS

    assert all(name in evaluate.HELP for name in TASKS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no model"),
        (["M"], "nothing to score"),
        (["M", "--data", "x", "--limit=0"], "--limit=0 must be at least 1"),
        (["M", "--tasks", "lambda"], "did you mean lambada?"),
        (
            ["M", "--data", "x", "--examples"],
            "--examples is for what --out writes; fix: --out FILE",
        ),
        (["M", "--data", "x", "--contexts=3"], "did you mean --context?"),
        (["MODEL", "--data", "x", "--context=64"], "between 2 and the model's 32 tokens"),
        (
            ["MODEL", "--data", "x", "--stride=33"],
            "stride=33 must be between 1 and the window of 32",
        ),
    ],
)
def test_mistakes_end_with_2_and_one_line(model, words, message, capsys):
    assert run(*(model if word == "MODEL" else word for word in words)) == 2
    assert message in error_line(capsys)


def test_the_page_names_every_option():
    page = (Path(cli.__file__).parents[2] / "docs" / "evaluation.md").read_text()
    options = evaluate._parser()._option_string_actions
    assert all(f"`{name}`" in page for name in options if name not in ("-h", "--help"))
