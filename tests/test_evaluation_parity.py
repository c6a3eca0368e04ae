# SPDX-License-Identifier: Apache-2.0
"""Our scores against those that transformers computes row by row, example by example.

It needs the extra `parity`, in this interpreter or in the one that JAXGPT_PARITY_PYTHON names. A
small trained model stands beside a developer's checkout; JAXGPT_REAL_MODELS may name a folder with
`smollm2-135m` in it, which takes minutes.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxgpt.interop import load
from jaxgpt.study.evaluation import run_task
from jaxgpt.study.evaluation.texts import evaluate_text

OTHER = os.environ.get("JAXGPT_PARITY_PYTHON")
REAL = os.environ.get("JAXGPT_REAL_MODELS")
SCRIPT = Path(__file__).with_name("transformers_scores.py")
TOLERANCE = 1e-3  # nats, of a log-likelihood of up to a hundred tokens
COUNT = 200
TEXT = 20_000, 512, 256  # characters, context, stride

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parity,
    pytest.mark.skipif(
        OTHER is None and importlib.util.find_spec("torch") is None,
        reason="the extra parity is not installed",
    ),
]


@pytest.fixture(scope="module", params=["stories260k", "smollm2-135m"])
def scored(request, shared, tmp_path_factory):
    """A model, the data, and what transformers says of it."""
    data, here = shared / "data", tmp_path_factory.mktemp("scores")
    folder = data / request.param if (data / request.param).is_dir() else None
    if folder is None and REAL:
        folder = Path(REAL) / request.param
    if folder is None or not folder.is_dir():
        pytest.skip(f"JAXGPT_REAL_MODELS names no folder with {request.param}")
    files = {
        "lambada": (str(data / "lambada-openai-test.jsonl"), COUNT),
        "hellaswag": (str(data / "hellaswag-val-1000.jsonl"), COUNT),
    }
    if request.param != "stories260k":  # it has a BOS, which we put before every window
        files["text"] = (str(data / "wikitext2-test.txt"), *TEXT)
    (here / "request.json").write_text(json.dumps({"folder": str(folder), **files}))
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [OTHER or sys.executable, str(SCRIPT), "request.json", "said.json"]
    done = subprocess.run(words, cwd=here, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return load(folder), files, json.loads((here / "said.json").read_text())


def run(scored, name):
    model, files, said = scored
    result = run_task(name, *model, file=files[name][0], limit=COUNT)
    assert result.n == len(result.answers) == len(said[name]) == COUNT
    return result, said[name]


def test_last_words(scored):
    result, said = run(scored, "lambada")
    ours = np.array([each.log_probs[0] for each in result.answers])
    theirs = np.array([each[0] for each in said])
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
    assert [each.greedy for each in result.answers] == [each[1] for each in said]
    assert result.metrics["accuracy"].value == np.mean([each[1] for each in said])
    want = np.exp(-theirs.mean())
    np.testing.assert_allclose(result.metrics["word_perplexity"].value, want, rtol=TOLERANCE)


def test_endings(scored):
    result, said = run(scored, "hellaswag")
    ours = np.array([each.log_probs for each in result.answers])
    np.testing.assert_allclose(ours, [each[0] for each in said], rtol=0, atol=TOLERANCE)
    assert [each.best for each in result.answers] == [each[1] for each in said]
    assert [each.best_norm for each in result.answers] == [each[2] for each in said]


def test_a_text_in_overlapping_windows(scored):
    model, files, said = scored
    if "text" not in files:
        pytest.skip("this model's windows begin with a BOS")
    file, chars, context, stride = files["text"]
    text = Path(file).read_text(encoding="utf-8")[:chars]
    score = evaluate_text(*model, [text], context=context, stride=stride)
    nats, count = said["text"]
    assert score.total.n_tokens == count
    np.testing.assert_allclose(score.total.nats, nats, rtol=1e-5)
