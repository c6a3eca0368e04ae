# SPDX-License-Identifier: Apache-2.0
import json

import numpy as np
from runpages import EVIL, FACTS, samples, shown
from test_page import Reader
from test_page_parts import text

from jaxgpt.study import page_results
from jaxgpt.study.page import joined
from jaxgpt.study.page_results import SAMPLE_CHARS, SAMPLES, Seen
from jaxgpt.study.plots import attention_figure


def test_samples_are_text_and_the_newest_is_open():
    made = joined(page_results.samples(list(samples())))
    read = Reader(made)
    assert set(read.tags) == {"p", "pre", "details", "summary"} and "<script" not in made
    assert read.tags.count("pre") == SAMPLES and made.index("step 20") < made.index("<details>")
    shown_ = EVIL.replace("\x00", r"\x00").replace("\x1b", r"\x1b").replace("\ud800", r"\ud800")
    assert shown_ in read.text and "The sample 1" in read.text
    assert f"{SAMPLES} of 20 samples" in made


def test_few_long_and_no_samples():
    one = [{"step": 3, "text": "x" * 9000}, {"step": 4}, {"text": "a"}, {"step": 5, "text": None}]
    made = joined(page_results.samples(one))
    assert made.count("<pre") == 1 and f"{9000 - SAMPLE_CHARS:,} further characters" in made
    assert "none was written" in text(page_results.samples([]))


def test_attention_is_described_or_said_to_be_missing():
    maps = {0: np.ones((1, 2, 2)), 3: np.ones((1, 2, 2))}
    figure = attention_figure(maps, ["<", "b"], heads=[0], name="a")
    made = joined(page_results.attention(Seen(figure, [0, 3], ["<", "b"], "7")))
    assert "Of layers 0, 3, checkpoint: step 7. The text: &#x27;&lt;b&#x27;" in made
    assert "Attention of layers 0, 3 over 2 tokens" in made
    assert text(page_results.attention("no <step>")) == "No attention maps: no <step>."


def test_last_and_best_loss_and_files_of_results(tmp_path):
    (tmp_path / "evaluation-a.json").write_text(json.dumps({"task": {"acc": 0.5, "<se>": 0.01}}))
    (tmp_path / "evaluation-b.json").write_text("{")
    (tmp_path / "evaluation-c.json").write_text(" " * (page_results.LARGEST_BYTES + 1))
    said = text(page_results.evaluation(shown(), tmp_path))
    assert "|step|nats per token|perplexity of tokens|bits per character|last|400|1.6458|" in said
    assert "byte" not in said and "|best|" not in said
    assert "|evaluation-a.json|acc|<se>|task|0.5|0.01|" in said
    assert "No table of evaluation-b.json: it cannot be read" in said
    assert "No table of evaluation-c.json: it has more than 4 MB" in said
    scored = [{"step": i, "val_nats_per_token": x} for i, x in ((1, 2.0), (2, 1.0), (3, 1.5))]
    said = text(page_results.evaluation(shown(records=scored), tmp_path / "none"))
    assert "|last|3|1.5|best|2|1|" in said and "no evaluation*.json" in said
    assert "not evaluated yet" in text(page_results.evaluation(shown(records=[]), tmp_path))


def test_where_it_ran():
    said = text(page_results.environment(shown(), "python <train.py>"))
    assert "|0|2026-01-02T03:04:05+00:00|0.10.2|cpu|" in said
    assert f"|source|{FACTS['source']}|" in said and said.endswith("|python <train.py>")
    assert "the run has not begun" in text(page_results.environment(shown(facts={}), ""))
