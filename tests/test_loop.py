# SPDX-License-Identifier: Apache-2.0
"""The loop in this process; faults that kill a process are in test_reliability.py."""

import dataclasses
import json
import os
import random
import re
import signal
import time
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


SHOWS = "hooks", "listeners", "endings", "profile", "began"


def train(path, data, *, model=MODEL, optim=OPTIM, **changes):
    folder = open_run(path)
    with folder.lock():
        shows = {name: changes.pop(name) for name in SHOWS if name in changes}
        fit(folder, model, data, optim, dataclasses.replace(TRAIN, **changes), **shows)
    return folder


def digest(folder, step=15):
    return read_meta(step_folders(folder.checkpoints_path)[step], step)["digest"]


def records(folder):
    """What was logged for each step, without the clock."""
    return [
        {k: v for k, v in record.items() if not re.search("wall_s|_per_s|mfu|_bytes", k)}
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


def test_several_steps_in_a_dispatch(tmp_path, data, whole, capsys):
    """Reported one by one; a signal in the middle waits for its end, and the bits stay the same."""
    more = dict(dispatch=4, eval_every=15, save_every=15)
    folder = train(tmp_path / "several", data, began=time.monotonic() - 100, **more)
    one, several = ([r for r in records(f) if "loss_nats" in r] for f in (whole, folder))
    assert [r["step"] for r in several] == [r["step"] for r in one] == list(range(1, 16))
    for a, b in zip(several, one, strict=True):
        assert a["loss_nats"] == pytest.approx(b["loss_nats"], rel=1e-4) and a["lr"] == b["lr"]

    def stop(record):
        if record["step"] == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    more |= dict(profile=(2, 3))  # which divides them otherwise
    with pytest.raises(Interrupted, match="after step 11, which is saved"):
        train(tmp_path / "run", data, listeners=[stop], **more)
    train(tmp_path / "run", data, **more)
    assert digest(open_run(tmp_path / "run")) == digest(folder)
    assert records(open_run(tmp_path / "run")) == records(folder)
    said = capsys.readouterr().out
    assert said.count("profile of steps 2 to 3: open") == 1
    assert said.count("no profile: the run ended at step 15, and --profile=2:3 had not come") == 1
    timed = [r for r in read_metrics(folder.metrics_path) if "first_step_wall_s" in r]
    assert [r["step"] for r in timed] == [1] and 0 < timed[0]["compile_wall_s"] < 100
    assert 100 < timed[0]["first_step_wall_s"] < 101 + timed[0]["wall_s"]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"batch_sizes": {7: 8}}, {"ema_decay": 0.9, "accumulate": 1}])
def test_dispatches_end_where_the_batch_size_changes(tmp_path, data, changes):
    one, several = (
        records(train(tmp_path / str(n), data, dispatch=n, **changes)) for n in (1, 100)
    )
    assert [r["step"] for r in one] == [r["step"] for r in several]
    assert [r.get("n_tokens") for r in one] == [r.get("n_tokens") for r in several]
    for a, b in zip(one, several, strict=True):
        assert set(a) == set(b)
        for name in {"loss_nats", "val_nats_per_token", "val_ema_nats_per_token"} & set(a):
            assert a[name] == pytest.approx(b[name], rel=1e-4)


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
