# SPDX-License-Identifier: Apache-2.0
"""The adapter for lm-evaluation-harness: its requests here, its tasks where it is installed."""

import importlib.util
import json
from types import SimpleNamespace

import hubfolders
import numpy as np
import pytest
from chatfolders import chat_folder, rows

from jaxgpt import Sampling, generate
from jaxgpt.errors import ConfigError
from jaxgpt.interop import load
from jaxgpt.study.evaluation import encode_pair, evaluate_text, loglikelihoods, run_task
from jaxgpt.study.evaluation.harness import Answers, harness_model, rolling_pairs

CONTEXT = 64
ROUNDING = 1e-6  # the harness asks for both tasks at once, and so other rows stand side by side
LAST_WORD = """\
task: last_word
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' '+text.split(' ')[-1]}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
ENDINGS = """\
task: endings
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_target: "{{gold}}"
doc_to_choice: "choices"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
PASSAGES = [
    {"text": f"{who} went to the {place} and saw a {thing}"}
    for who in ("Ann", "A tall man", "Nobody")
    for place, thing in (("wood", "bear"), ("town", "big dog"), ("sea", "ab cd"))
]
QUESTIONS = [
    {
        "query": row["text"],
        "choices": [f"and {w}." for w in ("ran", "sat down", "ab")],
        "gold": i % 3,
    }
    for i, row in enumerate(PASSAGES)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tensors = hubfolders.llama()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.random.default_rng(1).normal(size=(264, 8)).astype(np.float32)
    config = hubfolders.LLAMA | {"vocab_size": 264, "max_position_embeddings": CONTEXT}
    folder = chat_folder(tmp_path_factory.mktemp("hub") / "model")
    return load(hubfolders.write(folder, config, tensors))


@pytest.fixture
def answers(model):
    return Answers(*model, None, None)


def asked(*args):
    return SimpleNamespace(args=args)


def test_log_likelihoods(model, answers):
    cfg, params, tokenizer = model
    words = [("I see", " a dog"), ("", "ab"), ("so ", "ab cd")]
    found = answers.loglikelihood([asked(*pair) for pair in words])
    want = loglikelihoods(cfg, params, [encode_pair(tokenizer, *pair) for pair in words])
    assert [x for x, _ in found] == want.log_probs.tolist()
    assert all(type(x) is float and type(greedy) is bool for x, greedy in found)


def test_rolling_windows_are_those_of_the_harness():
    found = [*rolling_pairs([99], list(range(10)), 4)]  # of the docstring of its class LM
    assert found == [
        ([99], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]
    assert [*rolling_pairs([99], [], 4)] == []


def test_rolling_log_likelihoods(model, answers):
    cfg, params, tokenizer = model
    short, long = "ab cd", "one word and another " * 6
    first, second, none = answers.loglikelihood_rolling([asked(short), asked(long), asked("")])
    start = [tokenizer.bos_id]
    alone = evaluate_text(cfg, params, tokenizer, [short], prefix=start)
    assert -first == pytest.approx(alone.total.nats, rel=1e-5) and none == 0.0
    ids = [int(i) for i in tokenizer.encode(long)]
    parts = loglikelihoods(cfg, params, [*rolling_pairs(start, ids, CONTEXT)]).log_probs
    assert len(parts) == 2 and second == pytest.approx(parts.sum(), rel=1e-6)


@pytest.mark.slow
def test_generation_ends_at_the_first_stop(model, answers):
    cfg, params, tokenizer = model
    greedy = {"until": [], "max_gen_toks": 12, "do_sample": False}
    prompts = ["ab cd", "a longer prompt", "ab"]
    whole = answers.generate_until([asked(prompt, dict(greedy)) for prompt in prompts])
    for prompt, text in zip(prompts, whole, strict=True):
        ids = [int(i) for i in tokenizer.encode(prompt)]
        found = generate(
            *(cfg, params, [ids]),
            max_new_tokens=12,
            sampling=Sampling(temperature=0.0),
            stop_ids=tokenizer.end_ids,
        )
        assert text == tokenizer.decode([i for i in found.ids[0] if i not in tokenizer.end_ids])
    stop = whole[0][2:4]
    cut = answers.generate_until([asked(prompts[0], greedy | {"until": stop})])
    assert stop and cut == [whole[0][: whole[0].index(stop)]]


def test_options_that_are_refused(answers):
    with pytest.raises(ConfigError, match="options that we have not: num_beams"):
        answers.generate_until([asked("a", {"num_beams": 3, "max_gen_toks": 4})])
    with pytest.raises(ConfigError, match="max_gen_toks=64 leaves no room in 64 tokens"):
        answers.generate_until([asked("a", {"max_gen_toks": 64})])


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="it is installed")
def test_the_package_is_named_where_it_is_missing(model):
    with pytest.raises(ConfigError, match=r'fix: pip install "jaxgpt\[lm-eval\]"'):
        harness_model(*model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tasks_of_the_harness_equal_ours(model, tmp_path, monkeypatch):
    """Two tasks on local files, example by example."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    files = {"last_word": rows(tmp_path / "l.jsonl", *PASSAGES)}
    files["endings"] = rows(tmp_path / "h.jsonl", *QUESTIONS)
    for name, text in (("last_word", LAST_WORD), ("endings", ENDINGS)):
        path = tmp_path / "tasks" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("FILE", json.dumps(str(files[name]))))
    found = lm_eval.simple_evaluate(
        model=harness_model(*model),
        tasks=list(files),
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        bootstrap_iters=0,
    )
    lambada = run_task("lambada", *model, file=files["last_word"])
    theirs = sorted(found["samples"]["last_word"], key=lambda each: each["doc_id"])
    assert len(theirs) == lambada.n == len(PASSAGES)
    for ours, sample in zip(lambada.answers, theirs, strict=True):
        [[x, greedy]] = sample["filtered_resps"]
        assert x == pytest.approx(ours.log_probs[0], rel=ROUNDING)
        assert greedy == ours.greedy == sample["acc"]
    metrics = found["results"]["last_word"]
    assert metrics["acc,none"] == lambada.metrics["accuracy"].value
    want = lambada.metrics["word_perplexity"].value
    assert metrics["perplexity,none"] == pytest.approx(want)

    hellaswag = run_task("hellaswag", *model, file=files["endings"])
    theirs = sorted(found["samples"]["endings"], key=lambda each: each["doc_id"])
    assert len(theirs) == hellaswag.n == len(QUESTIONS)
    for ours, sample, row in zip(hellaswag.answers, theirs, QUESTIONS, strict=True):
        found_x = [x for x, _ in sample["filtered_resps"]]
        assert found_x == pytest.approx(list(ours.log_probs), rel=ROUNDING)
        assert sample["acc"] == (ours.best == row["gold"])
        assert sample["acc_norm"] == (ours.best_norm == row["gold"])
    metrics = found["results"]["endings"]
    assert metrics["acc,none"] == hellaswag.metrics["accuracy"].value
    assert metrics["acc_norm,none"] == hellaswag.metrics["accuracy_norm"].value
