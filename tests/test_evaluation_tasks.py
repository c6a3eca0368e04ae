# SPDX-License-Identifier: Apache-2.0
"""Tasks on local files and on a hub, by a byte-level model that finds all bytes equally likely."""

import functools
import io
import json
import math
from pathlib import Path

import fakehub
import jax
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.errors import ConfigError, ResourceError
from jaxgpt.model import init_params
from jaxgpt.study.evaluation import TASKS, reading, run_task, score_data, sets, tasks
from jaxgpt.study.evaluation.reading import HubSet, set_rows
from jaxgpt.testing import tiny

CFG = tiny(vocab_size=256, n_layers=1, context_length=128)
RAW = {
    "activity_label": "Baking",
    "ctx_a": "She takes  a [step] bowl.",
    "ctx_b": "then she",
    "endings": ["stirs it.", "sings [title] loud."],
    "label": "1",
}
BOOK = {
    "sentences": [f"This is sentence {i} ." for i in range(2)],
    "question": "`` The XXXXX sat , '' he said .",
    "options": ["cat", "hen"],
    "answer": "hen",
}


@functools.cache
def model():
    params = jax.jit(init_params, static_argnums=0)(CFG, jax.random.key(0))
    return CFG, jax.tree.map(np.zeros_like, params), ByteTokenizer()


def rows(path, *content):
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def run(name, file, **options):
    return run_task(name, *model(), file=file, **options)


def question(name, row):
    return TASKS[name].read("here", row)


def test_the_last_word(tmp_path):
    file = rows(tmp_path / "l.jsonl", {"text": "I see the dog"}, {"text": "We met a bear"})
    result = run("lambada", file)
    assert (result.n, result.unit) == (2, "passages")
    assert result.metrics["accuracy"] == (0, 0)
    assert result.metrics["word_perplexity"].value == pytest.approx(256**4.5, rel=1e-5)
    assert result.answers[0].log_probs[0] == pytest.approx(-4 * math.log(256))
    assert run("lambada", file, limit=1).n == 1
    asked = question("lambada", {"text": "I see the dog"})
    assert (asked.context, asked.continuations) == ("I see the", [" dog"])


def test_the_likeliest_ending(tmp_path):
    asked = question("hellaswag", RAW)
    assert asked.context == "Baking: She takes a bowl. Then she"
    assert asked.choices == ("stirs it.", "sings.  loud.".replace("  ", " ")) and asked.gold == 1
    assert asked.continuations[0] == " stirs it."
    ready = {"query": "A", "choices": ["long ending", "end"], "gold": 1}
    result = run("hellaswag", rows(tmp_path / "h.jsonl", ready, ready | {"gold": 0}))
    assert [answer.best for answer in result.answers] == [1, 1], "fewer bytes"
    assert [answer.best_norm for answer in result.answers] == [0, 0], "the space counts less"
    assert {key: each.value for key, each in result.metrics.items()} == {
        "accuracy": 0.5,
        "accuracy_norm": 0.5,
    }


def test_the_missing_word_of_a_book(tmp_path):
    asked = question("cbt-cn", BOOK)
    assert asked.context == 'This is sentence 0. This is sentence 1. "The'
    assert asked.continuations == [' cat sat," he said.', ' hen sat," he said.'] and asked.gold == 1
    first = question("cbt-ne", BOOK | {"question": "`` XXXXX sat ."})
    assert first.context.endswith('1. "') and first.continuations[0] == "cat sat."
    lines = [f"{i} {s}" for i, s in enumerate(BOOK["sentences"], 1)]
    lines.append(f"3 {BOOK['question']}\t{BOOK['answer']}\t\t{'|'.join(BOOK['options'])}")
    (tmp_path / "cbt.txt").write_text("\n".join([*lines, "", *lines, ""]))
    found, facts = set_rows("cbt-cn", None, tmp_path / "cbt.txt", TASKS["cbt-cn"].parse)
    assert [row for _, row in found] == [BOOK, BOOK] and set(facts) == {"file", "sha256"}
    assert run("cbt-cn", tmp_path / "cbt.txt").n == 2


def test_words_are_those_of_the_original(tmp_path):
    file = tmp_path / "wiki.txt"
    file.write_text(" \n = One = \n A @-@ B , c . \n")
    result = run("wikitext2", file)
    made = "\n= One =\nA-B, c.\n"
    assert result.n == result.data["bytes"] == len(made) and result.data["unscored_tokens"] == 0
    n_words = 9 + 3  # and line ends
    assert result.data["words"] == n_words
    want = math.exp(len(made) * math.log(256) / n_words)
    assert result.metrics["word_perplexity"].value == pytest.approx(want, rel=1e-5)
    assert run("wikitext2", file, limit=2).data["words"] == 3 + 2
    (tmp_path / "lm1b").write_text("It 's me .\nNo !\n")
    lines = run("1bw", tmp_path / "lm1b")
    assert lines.data["documents"] == 2 and lines.n == len("It's me.\nNo!\n")


def test_bits_and_the_last_part(tmp_path, monkeypatch):
    (tmp_path / "text8").write_text("a b c d e f")
    result = run("text8", tmp_path / "text8")
    assert result.metrics["bits_per_char"].value == pytest.approx(8, abs=1e-5)
    assert result.n == 11
    (tmp_path / "long").write_text("ab " * 100)  # of more than two windows
    for how in ({}, {"stride": CFG.context_length}, {"stride": 100}):
        assert run("text8", tmp_path / "long", **how).n == 300, "all are scored"
    monkeypatch.setattr(tasks, "WHOLE_BYTES", 11)
    task = sets.dataclasses.replace(TASKS["enwik8"], last=5)
    monkeypatch.setitem(TASKS, "enwik8", task)
    result = run("enwik8", tmp_path / "text8")
    assert result.n == 5 and result.metrics["bits_per_byte"].value == pytest.approx(8, abs=1e-5)


def test_data_of_ones_own(tmp_path):
    rows(tmp_path / "d.jsonl", {"text": "one"}, {"text": ""}, {"text": "two"}, {"text": "six"})
    found = score_data(tmp_path / "d.jsonl", *model(), limit=2)
    assert found.data["documents"] == 2 and found.n == 4 and found.data["unscored_tokens"] == 2
    (tmp_path / "t.txt").write_text("one\ntwo\nsix")
    found = score_data(tmp_path / "t.txt", *model(), limit=2)
    assert found.data["bytes"] == 7 and found.metrics["bits_per_byte"].value == pytest.approx(8)


def test_documents_of_prepared_tokens(tmp_path):
    from jaxgpt.data.bpe import BPETokenizer, train_bpe
    from jaxgpt.data.config import DataConfig
    from jaxgpt.data.prepare import prepare

    texts = [f"number {i} of some" for i in range(20)]
    rows(tmp_path / "d.jsonl", *({"text": text} for text in texts))
    tokenizer = BPETokenizer(train_bpe(texts, 300))
    tokenizer.save(tmp_path / "tokenizer.json")
    data = DataConfig(
        path=str(tmp_path / "d.jsonl"),
        rows="documents",
        tokenizer=str(tmp_path / "tokenizer.json"),
        val_fraction=0.25,
    )
    prepare(tmp_path / "out", data, workers=1, check=lambda: None, say=lambda line: None)
    documents, _ = reading.read_documents(tmp_path / "out", tokenizer)
    assert len(documents) == 5
    assert [tokenizer.decode(ids).removesuffix("<|endoftext|>") in texts for ids in documents]
    assert all(tokenizer.eot_id not in ids[:-1] for ids in documents)
    assert len(reading.read_documents(tmp_path / "out", tokenizer, 2)[0]) == 2
    with pytest.raises(ConfigError, match="was made with the bpe tokenizer"):
        reading.read_documents(tmp_path / "out", ByteTokenizer())


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("lambada", {"txt": "a b"}, "has no str 'text', but txt"),
        ("lambada", {"text": "word"}, "has no last word"),
        ("hellaswag", RAW | {"label": ""}, "does not say which choice is right"),
        ("hellaswag", {"query": "q", "choices": "no", "gold": 0}, "has no list 'choices'"),
        ("cbt-cn", BOOK | {"answer": "dog"}, "not its answer among the options"),
        ("cbt-cn", BOOK | {"question": "no blank"}, "has no XXXXX"),
    ],
)
def test_rows_of_another_form(tmp_path, name, row, message):
    with pytest.raises(ConfigError, match=message) as caught:
        run(name, rows(tmp_path / "x.jsonl", row))
    assert "line 1 of" in str(caught.value) and caught.value.fix


def test_sets_that_are_not_there(tmp_path):
    with pytest.raises(ConfigError, match="fix: --tasks enwik8=FILE"):
        run("enwik8", None)
    for name in ("wikitext2", "lambada"):
        with pytest.raises(ConfigError, match=f"fix: --tasks {name}=FILE"):
            run(name, tmp_path / "nothing")
    with pytest.raises(ResourceError, match="fix: --tasks lambada=FILE"):
        run("lambada", None)  # HF_HUB_OFFLINE=1, and not cached
    with pytest.raises(ConfigError, match="one of lambada"):
        run("glue", None)


@pytest.mark.slow
def test_whole_rows_of_the_hub(tmp_path, monkeypatch):
    from test_hub import use

    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist([BOOK, BOOK]), buffer)
    files = {"README.md": b"# books\n", "data/validation-00000-of-00001.parquet": buffer.getvalue()}
    with fakehub.serve(files) as hub:
        use(monkeypatch, hub.url, tmp_path / "hf")
        there = HubSet("owner/verse", split="validation", column=None)
        found, facts = set_rows("cbt-cn", there, None)
    assert [row for _, row in found] == [BOOK, BOOK]
    assert facts == {"repo": "owner/verse", "commit": fakehub.SHA}


def test_the_page_names_every_task():
    page = (Path(__file__).parents[1] / "docs" / "evaluation.md").read_text()
    for name, task in TASKS.items():
        assert f"| `{name}` |" in page
        if task.hub is not None:
            assert task.hub.repo in page
