# SPDX-License-Identifier: Apache-2.0
"""Several processes train one run: real ones, over the CPU's collectives, with real faults."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from commands import ENV, LAST, MICRO, checkpoints, digest, only_error, steps, train

from jaxgpt.train import processes
from jaxgpt.train.files import read_metrics
from jaxgpt.train.joining import GONE
from jaxgpt.train.stepfolder import read_meta, step_folders

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's pipes")

LIMIT_S = 300
START = "from jaxgpt.cli import train_main\nraise SystemExit(train_main())"
WATCH = """
import json, os
from jaxgpt.data.batches import Batches
read, rows = Batches.samples, []

def samples(self, sample_B):
    rows.append(sample_B.tolist())
    with open("rows" + os.environ["JAX_PROCESS_ID"], "w") as file:
        json.dump(rows, file)
    return read(self, sample_B)

Batches.samples = samples
"""


class Team(contextlib.AbstractContextManager):
    """The train command, started N times for one run.

    Args:
      words: Those of the command, after `MICRO`.
      cwd: Where it runs; a list: each of them.
      n: How many.
      code: Python that each runs before the command.
      own: More words, of each.
      env: Variables to set.
    """

    def __init__(self, *words, cwd, n=2, code="", own=None, **env):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        folders = cwd if isinstance(cwd, list) else [cwd] * n
        joined = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": str(n)}
        # What C++ logs of a death that it hears of itself; one line each.
        joined["TF_CPP_MIN_LOG_LEVEL"] = "3"
        self.logs = [folders[0] / f"log{i}" for i in range(n)]
        self.processes = []
        for i, log in enumerate(self.logs):
            command = [sys.executable, "-c", code + START, *MICRO, *words, *(own or [()] * n)[i]]
            variables = {**os.environ, **ENV, **joined, "JAX_PROCESS_ID": str(i), **env}
            with open(f"{log}.out", "w") as out, open(f"{log}.err", "w") as err:
                self.processes.append(
                    subprocess.Popen(command, cwd=folders[i], env=variables, stdout=out, stderr=err)
                )

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def until(self, text):
        """Wait until process 0 has said this."""
        end = time.monotonic() + LIMIT_S
        while text not in self.said(0):
            assert time.monotonic() < end and self.processes[0].poll() is None, self.said(0)
            time.sleep(0.02)

    def said(self, i, stream="out"):
        with open(f"{self.logs[i]}.{stream}") as file:
            return file.read()

    def end(self):
        """Exit codes and standard errors."""
        codes = [process.wait(LIMIT_S) for process in self.processes]
        errors = [self.said(i, "err") for i in range(len(codes))]
        assert not any("Traceback" in error for error in errors), errors
        return codes, errors


def losses(folder):
    records = read_metrics(folder / "runs/micro/metrics.jsonl")
    keys = ("loss_nats", "val_nats_per_token", "n_tokens")
    return [(r["step"], [r[key] for key in keys if key in r]) for r in records]


def same(folder, other, tolerance=1e-5):
    mine, theirs = losses(folder), losses(other)
    assert [step for step, _ in mine] == [step for step, _ in theirs]
    for (step, a), (_, b) in zip(mine, theirs, strict=True):
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance), step


def run_team(folder, *words, **options):
    with Team(*words, cwd=folder, **options) as team:
        codes, errors = team.end()
    assert set(codes) == {0} and set(errors) == {""}, errors
    return team


@pytest.fixture(scope="module")
def together(tmp_path_factory, finished):
    """An uninterrupted run of two processes."""
    folder = tmp_path_factory.mktemp("together")
    shutil.copy(finished / "text.txt", folder)
    run_team(folder, code=WATCH)
    return folder


def test_two_processes_train_as_one(finished, together):
    """The same losses to 1e-5; each reads its half of every batch, and process 0 alone speaks."""
    same(together, finished)
    for i in range(2):
        half = [[4 * step + 2 * i, 4 * step + 2 * i + 1] for step in range(LAST)]
        assert json.loads((together / f"rows{i}").read_text()) == half
    said = [line for line in (together / "log1.out").read_text().splitlines() if "Gloo" not in line]
    assert said == [] and "in 2 processes" in (together / "log0.out").read_text()
    facts = json.loads((together / "runs/micro/run.json").read_text())
    assert len(facts["sessions"]) == 1 and len(facts["sessions"][0]["devices"]) == 2
    assert not (together / "runs/micro/.shared").exists()


def test_a_single_process_talks_to_nobody():
    assert processes.leads() and processes.count() == 1 and not processes.several()
    assert processes.exchange("x", {"a": 1}) == [{"a": 1}]
    assert processes.lead("x", lambda: 3) == 3
    assert not processes.may_be_lost(ValueError())


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_killed_and_resumed_together(together, fresh, victim):
    """The others stop with one line and 5; started again they reach the same parameters."""
    n = 3 if victim == 2 else 2
    rows = "--train.batch_size=6" if n == 3 else "--train.batch_size=4"
    with Team(rows, cwd=fresh, n=n) as team:
        team.until("saved step 5")
        team.processes[victim].kill()
        codes, errors = team.end()
    for i, (code, error) in enumerate(zip(codes, errors, strict=True)):
        assert (code, error) == ((-9, "") if i == victim else (5, f"error: {GONE}\n"))
    saved = steps(fresh)
    assert saved and max(saved) < LAST
    run_team(fresh, rows, n=n)
    assert f"going on from step {max(saved)}" in (fresh / "log0.out").read_text()
    if n == 2:
        assert digest(fresh) == digest(together)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("receiver", [0, 1])
def test_a_signal_to_one_stops_all(together, fresh, receiver, number):
    """All stop after the same step, which is saved once; then they go on."""
    with Team(cwd=fresh) as team:
        team.until("step 7/20")
        team.processes[receiver].send_signal(number)
        codes, errors = team.end()
    assert codes == [128 + number] * 2, errors
    stopped = max(steps(fresh))
    assert (
        7 <= stopped < LAST
        and errors
        == [
            f"error: stopped by {number.name} after step {stopped}, which is saved; "
            "fix: the same command goes on from there\n"
        ]
        * 2
    )
    assert team.said(0).count(f"saved step {stopped}\n") == 1
    run_team(fresh)
    assert digest(fresh) == digest(together)


@pytest.mark.slow
@pytest.mark.parametrize("seen_by", ["both", "process 1"])
def test_a_damaged_step_is_passed_over_by_all(together, fresh, seen_by):
    shutil.copytree(together, fresh, dirs_exist_ok=True)
    code = ""
    if seen_by == "both":
        files = [p for p in (checkpoints(fresh) / "step_00000020/params").rglob("d/*")]
        largest = max(files, key=lambda p: p.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 4
        largest.write_bytes(content)
    else:
        code = """
import os
from jaxgpt.train.stepfolder import BadStepError
from jaxgpt.train.storage import Storage
usual = Storage.read

def read(self, folder, wanted):
    if os.environ["JAX_PROCESS_ID"] == "1" and folder.name == "step_00000020":
        raise BadStepError("a shard is short")
    return usual(self, folder, wanted)

Storage.read = read
"""
    team = run_team(fresh, code=code)
    line = next(line for line in team.said(0).splitlines() if "is damaged" in line)
    assert "step 20 is damaged (moved to bad-20-1)" in line and "using step 15" in line
    assert seen_by == "both" or "a shard is short, says process 1" in line
    assert digest(fresh) == digest(together)


@pytest.mark.slow
def test_as_many_processes_as_one_likes_go_on(finished, together, fresh):
    """What two saved, one goes on with, and the other way round."""
    for source, go_on in ((together, train), (finished, run_team)):
        shutil.rmtree(fresh / "runs", ignore_errors=True)
        shutil.copytree(source / "runs", fresh / "runs")
        for step in (15, 20):
            shutil.rmtree(step_folders(checkpoints(fresh))[step])
        if go_on is train:
            assert train() == 0
        else:
            run_team(fresh)
        same(fresh, finished)
        meta = read_meta(step_folders(checkpoints(fresh))[10], 10)
        assert meta["digest"] == digest(source, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        (2, "--mesh.fsdp=2", [[0, 1], [2, 3]]),
        (2, "--mesh.tensor=2", [[0, 1, 2, 3]] * 2),
        (4, "--mesh.tensor=2", [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (4, "--mesh.fsdp=4", [[0], [1], [2], [3]]),
    ],
)
def test_the_state_is_split_over_processes(finished, fresh, layout):
    """As one process; a process reads the rows that its devices work on, no others."""
    n, mesh, rows = layout
    run_team(fresh, mesh, n=n, code=WATCH)
    same(fresh, finished)
    assert [json.loads((fresh / f"rows{i}").read_text())[0] for i in range(n)] == rows


@pytest.mark.slow
def test_pictures_and_samples_come_from_process_0(fresh):
    shown = ("--show.sample_tokens=8", "--show.pictures=true", "--mesh.fsdp=2")
    team = run_team(fresh, *shown, "--train.steps=5")
    assert "drew " in team.said(0) and (fresh / "runs/micro/loss.png").exists()


@pytest.mark.slow
def test_processes_that_do_not_belong_together(fresh, tmp_path_factory):
    with Team(cwd=fresh, own=[(), ("--train.seed=7", "--optim.lr=0.5")]) as team:
        codes, errors = team.end()
    assert codes == [2, 2]
    assert "process 1 was started otherwise than process 0: " in only_error(errors[1])
    for change in ("train.seed: 0 -> 7", "optim.lr: 0.01 -> 0.5"):
        assert change in errors[1] and change in errors[0]
    assert only_error(errors[0]).startswith("error: process 1 has stopped: ")
    other = tmp_path_factory.mktemp("other")
    shutil.copy(fresh / "text.txt", other)
    with Team(
        cwd=[fresh, other], code="from jaxgpt.train import joining\njoining.SEEN_S = 1\n"
    ) as t:
        codes, errors = t.end()
    assert codes == [2, 2] and "the run folder is not shared: process 1 on " in only_error(
        errors[1]
    )
    assert not (other / "runs").exists()


@pytest.mark.slow
def test_a_second_job_on_the_same_run(fresh, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    shutil.copy(fresh / "text.txt", other)
    with Team(cwd=fresh) as first:
        first.until("step 1/20")
        pid = first.processes[0].pid
        first.processes[0].send_signal(signal.SIGSTOP)  # it would end before the second begins
        with Team(f"--run={fresh / 'runs/micro'}", cwd=other) as second:
            codes, errors = second.end()
    assert codes == [5, 5] and f"in use by pid {pid}" in only_error(errors[0])
    assert f"process 0 has stopped: the run is in use by pid {pid}" in only_error(errors[1])


@pytest.mark.slow
def test_the_others_do_not_come(fresh):
    code = "from jaxgpt.train import joining\njoining.JOIN_S = 3\n"
    for absent in (0, 1):
        with Team(cwd=fresh, code=code) as team:
            team.processes[absent].kill()
            codes, errors = team.end()
        assert codes[1 - absent] == 5
        line = only_error(errors[1 - absent])
        assert f"process {1 - absent} of 2 did not meet the others at localhost:" in line
        assert "in 3 s; fix: start all of them" in line


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_silent_process_is_dead_after_a_time(fresh, frozen):
    """As the host of one, cut off from the net: no connection is closed."""
    code = "from jaxgpt.train import joining\njoining.HEARTBEAT_S = 5\n"
    with Team(cwd=fresh, code=code) as team:
        team.until("step 5/20")
        team.processes[frozen].send_signal(signal.SIGSTOP)
        other = team.processes[1 - frozen]
        assert other.wait(LIMIT_S) == 5
        assert only_error(team.said(1 - frozen, "err")) == f"error: {GONE}\n"
