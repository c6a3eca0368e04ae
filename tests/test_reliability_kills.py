# SPDX-License-Identifier: Apache-2.0
"""Real kill -9, of training and of exports, and real readers beside a writer: rows A1, A21, A28."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from checkpointing import start_python
from commandline import ROOT
from commands import (
    ENV,
    LAST,
    MICRO,
    TEXT,
    Command,
    checkpoints,
    digest,
    steps,
    train,
    unfinished,
)

from jaxgpt import cli
from jaxgpt.train.files import read_metrics
from jaxgpt.train.runfolder import RunFolder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's pipes")


def logged_steps(folder):
    records = read_metrics(folder / "runs/micro/metrics.jsonl")
    return [record["step"] for record in records if "lr" in record]


def test_killed_three_times(finished, fresh):
    """Row A1: every other kill falls into a save, the rest anywhere after the first line."""
    rng, newest = random.Random(0), 0
    for n in range(3):
        with Command(*MICRO, cwd=fresh) as command:
            if n % 2 == 0 and newest < LAST - 5:
                command.until("validation")
            else:
                for _ in range(rng.randrange(1, 9)):
                    command.line()
            time.sleep(rng.uniform(0, 0.2))
            command.kill()
            command.process.wait()
        if checkpoints(fresh).exists():
            with RunFolder(fresh / "runs/micro").lock():  # freed by the kill
                committed = [s for s in steps(fresh) if digest(fresh, s) == digest(finished, s)]
            assert committed == steps(fresh) and max(committed, default=0) >= newest
            newest = max(committed, default=0)
    with Command(*MICRO, cwd=fresh) as command:
        code, _, err = command.end()
    assert (code, err) == (0, "")
    assert digest(fresh) == digest(finished) and unfinished(fresh) == []
    assert logged_steps(fresh) == list(range(1, LAST + 1))


N_KILLS, N_STEPS = 50, 500
OFTEN = (*MICRO, f"--train.steps={N_STEPS}", "--train.save_every=1", "--train.keep=2")


def start(*words, log, cwd):
    """A command that nobody reads from: what it says goes into a file."""
    with log.open("w") as out:
        command = [sys.executable, str(ROOT / "train.py"), *words]
        env = {**os.environ, **ENV}
        return subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_fifty_kills_at_random(fresh, tmp_path_factory, monkeypatch):
    """Row A1: saves at every step; half of the kills fall into the start, half behind it."""
    whole = tmp_path_factory.mktemp("whole")
    (whole / "text.txt").write_text(TEXT)
    with contextlib.chdir(whole):
        assert train(words=[*OFTEN, f"--train.save_every={N_STEPS}"]) == 0
    rng, log = random.Random(0), fresh / "log.txt"
    reported, trained, start_s = 0, 0, float("inf")
    for n in range(N_KILLS):
        process, began = start(*OFTEN, log=log, cwd=fresh), time.monotonic()
        if n % 2:
            time.sleep(rng.uniform(0, start_s))
        else:
            while "tokens/s" not in log.read_text():
                assert process.poll() is None, log.read_text()
                time.sleep(0.01)
            start_s = min(start_s, time.monotonic() - began)
            time.sleep(rng.uniform(0, 1.5))
        assert process.poll() is None, log.read_text()
        process.kill()
        process.wait()
        said = log.read_text()
        assert "warning" not in said and "rror" not in said, said
        trained += "going on from" in said
        saved = re.findall(r"^saved step (\d+)$", said, re.MULTILINE)
        reported = max(reported, *map(int, saved), 0)
        there = steps(fresh) if checkpoints(fresh).exists() else []
        assert max(there, default=0) >= reported, "a step that was reported is lost"
    assert 0 < reported < N_STEPS and trained >= N_KILLS // 2 - 1, (reported, trained)
    print(f"{N_KILLS} kills, {trained} of them after the start-up, up to step {reported}")
    assert train(words=OFTEN) == 0
    assert digest(fresh, N_STEPS) == digest(whole, N_STEPS) and unfinished(fresh) == []
    assert logged_steps(fresh) == list(range(1, N_STEPS + 1))


EXPORTING = """
import itertools
from pathlib import Path
from jaxgpt.interop.newfolder import new_folder
print("ready", flush=True)
for n in itertools.count():
    with new_folder(Path({place!r}), 1000, force=True) as folder:
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text(f"{{n:06}}" * 5000)
"""


@pytest.mark.slow
def test_killed_while_exporting(tmp_path):
    """Row A28: the folder of an export is whole or absent."""
    rng, place, whole = random.Random(0), tmp_path / "out", 0
    for _ in range(6):
        with start_python(EXPORTING.format(place=str(place))) as process:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            time.sleep(rng.uniform(0, 0.2))
            process.send_signal(signal.SIGKILL)
        if place.exists():
            one, other = ((place / n).read_text() for n in ("config.json", "model.safetensors"))
            assert one == other == one[:6] * 5000
            whole += 1
    assert whole


@pytest.mark.slow
def test_sampling_beside_a_trainer_that_keeps_one(fresh, capsys):
    """Row A21: steps are deleted while they are read; 30 samples all the same."""
    log = fresh / "log.txt"
    process = start(*OFTEN, "--train.keep=1", f"--train.steps={50 * N_STEPS}", log=log, cwd=fresh)
    try:
        while "saved step 2\n" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        for _ in range(30):
            assert cli.sample_main(["--run=micro", "--prompt=abc", "--max-new-tokens=3"]) == 0
            out, err = capsys.readouterr()
            assert err == "" and len(out) == 7
        assert process.poll() is None, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert steps(fresh)[-1] > 20
