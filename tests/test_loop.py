# SPDX-License-Identifier: Apache-2.0
"""The loop in this process; faults that kill a process are in test_reliability.py."""

import dataclasses
import json
import os
import random
import re
import signal
from pathlib import Path

import jax
import pytest
from micro import MODEL, OPTIM

from jaxgpt.data.config import DataConfig
from jaxgpt.errors import ConfigError, DivergedError, Interrupted
from jaxgpt.train.config import OptimConfig, TrainConfig
from jaxgpt.train.files import read_metrics
from jaxgpt.train.loop import fit
from jaxgpt.train.runfolder import open_run
from jaxgpt.train.stepfolder import read_meta, step_folders

TRAIN = TrainConfig(
    steps=15, batch_size=4, accumulate=2, eval_every=5, save_every=5, log_every=1, keep=9
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A text of 600 characters: 32 windows, so that an epoch ends in the eighth step."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(random.Random(0).choices("abcdefg \n", k=600)))
    return DataConfig(path=str(path))


def train(path, data, *, model=MODEL, optim=OPTIM, hooks=(), listeners=(), endings=(), **changes):
    folder = open_run(path)
    with folder.lock():
        train = dataclasses.replace(TRAIN, **changes)
        shows = dict(hooks=hooks, listeners=listeners, endings=endings)
        fit(folder, model, data, optim, train, **shows)
    return folder


def digest(folder, step=15):
    return read_meta(step_folders(folder.checkpoints_path)[step], step)["digest"]


def records(folder):
    """What was logged for each step, without the clock."""
    return [
        {k: v for k, v in record.items() if not re.search("wall_s|_per_s|mfu", k)}
        for record in read_metrics(folder.metrics_path)
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """An uninterrupted run."""
    return train(tmp_path_factory.mktemp("runs") / "whole", data)


def stop_at(step):
    def hook(at, params, metrics):
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return hook


def test_the_same_seed_gives_the_same_bits(tmp_path, data, whole):
    """Row C11."""
    assert digest(train(tmp_path / "again", data)) == digest(whole)
    assert digest(train(tmp_path / "other", data, seed=1)) != digest(whole)


def test_resumed_twice_equals_uninterrupted(tmp_path, data, whole):
    """Case T07, row B6: dropout, accumulation, across the end of an epoch; logs included."""
    for step in (5, 10):
        with pytest.raises(Interrupted) as stopped:
            train(tmp_path / "run", data, hooks=[stop_at(step)])
        assert stopped.value.exit_code == 143
        assert f"after step {step}, which is saved" in str(stopped.value)
    folder = train(tmp_path / "run", data)
    assert digest(folder) == digest(whole)
    assert records(folder) == records(whole)
    sessions = json.loads(folder.facts_path.read_text())["sessions"]
    assert [s["from_step"] for s in sessions] == [0, 5, 10]


def test_a_finished_run_is_left_alone(tmp_path, data, capsys):
    """Row B9."""
    folder = train(tmp_path / "run", data)
    before = {p: p.stat().st_mtime_ns for p in folder.path.rglob("*") if p.is_file()}
    train(tmp_path / "run", data)
    assert "is finished at step 15; nothing is done" in capsys.readouterr().out
    after = {p: p.stat().st_mtime_ns for p in folder.path.rglob("*") if p.is_file()}
    del before[folder.path / ".lock"], after[folder.path / ".lock"]
    assert before == after


def test_more_steps_go_on_at_the_final_rate(tmp_path, data, whole):
    """Row B13: the horizon of the schedule is that of the first start."""
    folder = train(tmp_path / "run", data)
    train(tmp_path / "run", data, steps=20)
    lr = {r["step"]: r["lr"] for r in read_metrics(folder.metrics_path) if "lr" in r}
    assert lr[15] == pytest.approx(1e-3) and lr[20] == lr[15] and lr[2] == pytest.approx(1e-2)
    assert digest(folder) == digest(whole)
    assert sorted(step_folders(folder.checkpoints_path)) == [5, 10, 15, 20]


def test_changed_text_is_refused(tmp_path, data):
    """Row B7."""
    text = tmp_path / "text.txt"
    text.write_text(Path(data.path).read_text())
    with pytest.raises(Interrupted):
        train(tmp_path / "run", DataConfig(path=str(text)), hooks=[stop_at(5)])
    text.write_text(text.read_text() + "a")
    with pytest.raises(ConfigError, match="the text has changed since this run began"):
        train(tmp_path / "run", DataConfig(path=str(text)))


def test_divergence_stops_the_run_and_saves_nothing(tmp_path, data):
    optim = OptimConfig(lr=1e30, warmup_steps=0, clip=None)
    with pytest.raises(DivergedError, match="not finite at step") as stopped:
        train(tmp_path / "run", data, optim=optim)
    assert stopped.value.exit_code == 3
    assert step_folders(open_run(tmp_path / "run").checkpoints_path) == {}


def test_an_error_in_the_loop_loses_no_save_under_way(tmp_path, data):
    """Row A22."""

    def fail(step, params, metrics):
        if step == 6:
            raise RuntimeError("hook")

    with pytest.raises(RuntimeError, match="hook"):
        train(tmp_path / "run", data, hooks=[fail], eval_every=1)
    folder = open_run(tmp_path / "run")
    read_meta(step_folders(folder.checkpoints_path)[5], 5)


def test_a_text_shorter_than_the_context(tmp_path, data):
    """Row D2: both numbers and the flag."""
    model = dataclasses.replace(MODEL, context_length=1000)
    with pytest.raises(ConfigError, match=r"540 tokens.*1001.*--model\.context_length"):
        train(tmp_path / "run", data, model=model)


def test_hooks_see_every_evaluation(tmp_path, data):
    seen = []
    train(tmp_path / "run", data, hooks=[lambda *a: seen.append(a)])
    assert [step for step, _, _ in seen] == [5, 10, 15]
    assert set(seen[0][2]) == {
        "val_nats_per_token",
        "val_token_perplexity",
        "val_bits_per_char",
        "val_bits_per_byte",
    }


def test_listeners_and_endings(tmp_path, data, capsys):
    """Every record is handed on; endings come once, after the last checkpoint."""
    heard, ended = [], []

    def end(params):
        ended.append(sorted(step_folders(tmp_path / "run" / "checkpoints")))
        assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(params))
        return "the end"

    shows = dict(listeners=[heard.append], endings=[end], hooks=[lambda step, *_: f"at {step}"])
    folder = train(tmp_path / "run", data, **shows)
    assert heard == read_metrics(folder.metrics_path) and len(heard) == 18
    assert ended == [[5, 10, 15]]
    lines = capsys.readouterr().out.splitlines()
    assert lines.index("at 5") < lines.index("at 15") < lines.index("the end")
    train(tmp_path / "run", data, **shows)
    assert len(ended) == 1 and len(heard) == 18, "a finished run"


def test_the_attention_kernel_is_named_once(tmp_path, data, capsys):
    """With its reason, on a line of its own; another one can be asked for."""
    plain = dataclasses.replace(MODEL, dropout=0.0)
    for kernel, want in (("auto", "reference (scores of at most 64 MiB; "), ("xla", "xla (asked")):
        train(tmp_path / kernel, data, model=plain, steps=2, kernel=kernel)
        said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("att")]
        assert len(said) == 1 and said[0].startswith(f"attention: {want}")
    with pytest.raises(ConfigError, match="'xla' cannot serve this call: the call has dropout"):
        train(tmp_path / "dropped", data, steps=2, kernel="xla")
