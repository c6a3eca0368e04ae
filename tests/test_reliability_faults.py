# SPDX-License-Identifier: Apache-2.0
"""Killed, stopped, starved and damaged runs: the commands against rows A, C10 and I of the faults.

What is below the commands is tested where it is: damaged steps in test_restore.py, refused writes
in test_storage.py, locks and signals in test_runfolder.py, the loop in test_loop.py.
"""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from commandline import ROOT, error_line
from commands import (
    ENV,
    LAST,
    LIMIT_S,
    MICRO,
    TEXT,
    Command,
    checkpoints,
    digest,
    only_error,
    steps,
    train,
    tree,
    unfinished,
)

from jaxgpt import cli
from jaxgpt.cli import sources
from jaxgpt.cli.train import stored_run
from jaxgpt.data.tokenizer import load_tokenizer
from jaxgpt.errors import CheckpointError
from jaxgpt.train import evaluate, rundata
from jaxgpt.train.files import read_metrics
from jaxgpt.train.runfolder import RunFolder
from jaxgpt.train.storage import Storage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's pipes")


def verify(folder, wanted):
    """The arrays of these steps, and of no more, are on the disk as they were saved."""
    assert steps(folder) == wanted
    run = RunFolder(folder / "runs" / "micro")
    config = stored_run(run)
    assert config is not None
    model = rundata.with_vocabulary(config.model, load_tokenizer(run.tokenizer_path))
    for step in wanted:
        sources.load_params(run, model, str(step))


# --- A2 to A7: signals ----------------------------------------------------------------------------


def test_stopped_and_gone_on_with(finished, fresh):
    """Rows A2, A6, A7: SIGTERM to the process, then a closed terminal: SIGHUP to its group."""
    stopped_at = 0
    for number, line in ((signal.SIGTERM, "step 7/20"), (signal.SIGHUP, "step 13/20")):
        with Command(*MICRO, cwd=fresh) as command:
            if stopped_at:
                command.until(f"going on from step {stopped_at}")
            command.until(line)
            os.killpg(command.process.pid, number) if stopped_at else command.kill(number)
            code, lines, err = command.end()
        stopped_at = steps(fresh)[-1]
        name = signal.Signals(number).name
        assert code == 128 + number and only_error(err) == (
            f"error: stopped by {name} after step {stopped_at}, which is saved; "
            "fix: the same command goes on from there\n"
        )
        assert f"saved step {stopped_at}\n" in lines
    assert train() == 0
    assert digest(fresh) == digest(finished) and unfinished(fresh) == []


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_while_the_step_compiles(copy, number):
    """Row A3: neither a crash nor a loss."""
    before = tree(checkpoints(copy))
    more = "--train.steps=40"
    with Command(*MICRO, more, cwd=copy, JAX_ENABLE_COMPILATION_CACHE="false") as command:
        command.until(f"going on from step {LAST}")
        time.sleep(0.5)
        command.kill(number)
        code, _, err = command.end()
    assert code == 128 + number, err
    only_error(err)
    assert before.items() <= tree(checkpoints(copy)).items() and max(steps(copy)) < 30


def test_a_second_interrupt_ends_at_once(finished, fresh):
    """Row A4: also where the first one cannot be looked at, here in a write to a full pipe."""
    with Command(*MICRO, cwd=fresh) as command:
        command.until("step 7/20")
        time.sleep(0.2)
        command.kill(signal.SIGINT)
        time.sleep(0.2)
        assert command.process.poll() is None
        command.kill(signal.SIGINT)
        assert command.process.wait(LIMIT_S) == 130
        _, _, err = command.end()
    assert err == "stopped by a second signal; unfinished work is lost\n"
    assert steps(fresh) in ([], [5]) and all(
        digest(fresh, s) == digest(finished, s) for s in steps(fresh)
    )


def test_a_signal_while_the_data_is_prepared(finished, fresh, monkeypatch, capsys):
    """Row A5: nothing is compiled any more; the same command begins anew, and tidies up."""
    made = rundata.train_tokenizer

    def signalled(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return made(*args)

    monkeypatch.setattr(rundata, "train_tokenizer", signalled)
    assert train() == 143
    assert "stopped by SIGTERM while the data was prepared" in error_line(capsys)
    assert not checkpoints(fresh).exists()
    tokens = fresh / "runs/micro/tokens"
    tokens.mkdir()
    (tokens / ".tokens.bin.0123abcd.tmp").touch()  # as after a kill
    monkeypatch.undo()
    monkeypatch.chdir(fresh)
    assert train() == 0 and digest(fresh) == digest(finished)
    assert [p.name for p in tokens.iterdir()] == ["tokens.bin"]


def test_a_signal_while_it_evaluates(finished, fresh, monkeypatch, capsys):
    """Row A5: the pass is given up, the state is saved."""
    batches = evaluate.eval_batches

    def signalled(*args):
        yield from batches(*args)
        os.kill(os.getpid(), signal.SIGTERM)
        yield from batches(*args)

    monkeypatch.setattr(evaluate, "eval_batches", signalled)
    assert train() == 143
    out, err = capsys.readouterr()
    assert "after step 5, which is saved" in only_error(err) and "step 5/20  validation" not in out
    assert steps(fresh) == [5]
    monkeypatch.undo()
    monkeypatch.chdir(fresh)
    assert train() == 0 and digest(fresh) == digest(finished)


@pytest.mark.parametrize(
    "when", ["in the last evaluation", pytest.param("in the last save", marks=pytest.mark.slow)]
)
def test_a_signal_at_the_very_end(finished, fresh, monkeypatch, capsys, when):
    """Row A5: all is saved, and the exit code tells of the signal; what was left out follows."""
    batches, write = evaluate.eval_batches, Storage.write
    passes = []

    def count(function, *args):
        passes.append(function)
        if len(passes) == 4:  # steps 5, 10, 15, 20
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*args)

    if when == "in the last save":
        monkeypatch.setattr(Storage, "write", lambda *args: count(write, *args))
    else:
        monkeypatch.setattr(evaluate, "eval_batches", lambda *args: count(batches, *args))
    assert train() == 143
    assert "after step 20, which is saved" in error_line(capsys)
    assert digest(fresh) == digest(finished) and steps(fresh) == [5, 10, 15, 20]
    monkeypatch.undo()
    monkeypatch.chdir(fresh)
    if when == "in the last evaluation":
        assert train() == 0 and "step 20/20  validation" in capsys.readouterr().out
    assert train() == 0 and "nothing is done" in capsys.readouterr().out
    scored, wanted = (
        [r["val_nats_per_token"] for r in read_metrics(run) if "val_nats_per_token" in r]
        for run in (fresh / "runs/micro/metrics.jsonl", finished / "runs/micro/metrics.jsonl")
    )
    assert scored == wanted and len(scored) == 4


@pytest.mark.skipif(signal.getsignal(signal.SIGINT) == signal.SIG_IGN, reason="SIGINT is ignored")
def test_interrupted_sampling_does_not_crash(copy, monkeypatch):
    """As rows A3 and A4: Ctrl-C while XLA compiles, with a handler that does not raise."""
    options = {"script": "sample.py", "cwd": copy, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    with Command("--prompt=abc", "--max-new-tokens=15", **options) as command:
        assert command.piece() == "abc"
        time.sleep(0.3)
        command.kill(signal.SIGINT)
        code, _, err = command.end()
    assert (code, err) == (130, "error: interrupted\n")

    def look(*_):  # for one that raises is survived every other time
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        raise CheckpointError("seen")

    monkeypatch.setattr(sources, "load_params", look)
    assert cli.sample_main([]) == 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --- A8 to A20: storage ---------------------------------------------------------------------------


def test_disk_full(finished, fresh):
    """Row A8: the save is refused, the one before stays, and with room it goes on."""
    disk = fresh / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if os.getuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        words = [*MICRO, "--run=./disk/runs/micro"]
        with Command(*words, cwd=fresh) as command:
            command.until("saved step 5")
            command.kill(signal.SIGSTOP)
            os.waitid(os.P_PID, command.process.pid, os.WSTOPPED)
            room = os.statvfs(disk)
            (disk / "filler").write_bytes(bytes(room.f_bavail * room.f_frsize - (40 << 10)))
            command.kill(signal.SIGCONT)
            code, lines, err = command.end()
        assert code == 5, err
        assert "No space left on device" in only_error(err)
        said = err + "".join(lines)  # a line of metrics may be refused first: then a warning has it
        assert "is not saved: No space left on device; it needs about " in said
        assert "free are" in said and "--train.keep" in said
        verify(disk, [s for s in (5, 10, 15, 20) if s == 5 or f"saved step {s}\n" in lines])
        assert len(steps(disk)) < 4 and unfinished(disk) == []
        (disk / "filler").unlink()
        assert train(words=words) == 0
        assert digest(disk) == digest(finished)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_run_folder_that_cannot_be_written(fresh):
    """Row A11: found out before data and compilation, without a hang at exit."""
    setpriv = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    prefix = [] if os.getuid() else setpriv
    if prefix and not shutil.which("setpriv"):
        pytest.skip("root may write everywhere, and there is no setpriv")
    (fresh / "closed").mkdir(mode=0o555)
    with Command(*MICRO, "--run=./closed/micro", cwd=fresh, prefix=prefix) as command:
        code, lines, err = command.end()
    assert (code, lines) == (5, []), err
    assert "cannot be written: Permission denied" in only_error(err)


@pytest.mark.parametrize("path", ["./file", "file/below", "file/far/below"])
def test_a_run_folder_that_cannot_be(fresh, capsys, path):
    """Row A12."""
    (fresh / "file").write_text("x")
    assert train(f"--run={path}") == 2
    assert "no run folder can be there" in error_line(capsys)
    assert (fresh / "file").read_text() == "x" and not (fresh / "runs").exists()


def damage(folder, how):
    """Spoil the largest file of a step's parameters, near its beginning: its end may be unused."""
    path = max(folder.glob("params/**/d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    place = len(content) // 8
    content[place] ^= 1
    path.unlink()
    if how != "absent":
        path.write_bytes({"bit": content, "cut": content[:place], "empty": b""}[how])


@pytest.mark.parametrize("how", ["bit", "cut", "empty", "absent"])
def test_a_damaged_newest_step(finished, copy, capfd, how):
    """Rows A13, A14, A19: back to the step before; what is trained again is saved again."""
    damage(checkpoints(copy) / "step_00000020", how)
    assert train() == 0
    out, err = capfd.readouterr()
    (warning,) = [line for line in out.splitlines() if "warning" in line]
    assert "step 20 is damaged (moved to bad-20-1)" in warning and "using step 15" in warning
    assert err == "" and "going on from step 15\n" in out and "saved step 20\n" in out
    assert digest(copy) == digest(finished)
    verify(copy, [5, 10, 15, 20])


def test_what_only_looks_like_a_newer_step(finished, copy, capsys):
    """Row A16: an empty folder, a half-copied one, and one without its commit."""
    folder = checkpoints(copy)
    (folder / "step_00000099").mkdir()
    shutil.copytree(folder / "step_00000020", folder / "step_00000098")
    shutil.rmtree(folder / "step_00000098" / "params")
    (folder / "step_00000020" / "commit_success.txt").unlink()
    assert train() == 0
    out, err = capsys.readouterr()
    warnings = [line for line in out.splitlines() if "warning" in line]
    assert err == "" and len(warnings) == 3 and all("using step 15" in line for line in warnings)
    assert digest(copy) == digest(finished)
    verify(copy, [5, 10, 15, 20])


def test_no_usable_step(copy, capfd):
    """Row A17: never from the beginning in silence."""
    for folder in checkpoints(copy).iterdir():
        damage(folder, "cut")
    before = tree(copy)
    assert train() == 4
    line = error_line(capfd)
    assert all(f"step {step}: " in line for step in (5, 10, 15, 20)) and "another --run" in line
    assert cli.sample_main(["--run=micro"]) == 4
    assert "no usable checkpoint" in error_line(capfd)
    assert tree(copy) == before


def test_two_trainers(finished, fresh, capsys):
    """Row A20: the second stops at once, the third goes on when the first was killed."""
    with Command(*MICRO, cwd=fresh) as owner:
        owner.until("step 6/20")
        assert train() == 5
        line = error_line(capsys)
        assert f"in use by pid {owner.process.pid} on {os.uname().nodename}" in line
        owner.kill()
        owner.process.wait()
        assert train() == 0
    assert digest(fresh) == digest(finished)


# --- C10 and I: memory, terminal, environment -----------------------------------------------------


def test_out_of_memory(fresh):
    """Row C10."""
    limited = ["bash", "-c", 'ulimit -v 8000000; exec "$@"', "-"]
    with Command(*MICRO, "--train.batch_size=1000000", cwd=fresh, prefix=limited) as command:
        code, _, err = command.end()
    assert code == 5, err
    assert "out of memory: " in only_error(err) and "fix: lower --train.batch_size" in err


@pytest.mark.parametrize(
    "where", ["closed", *(pytest.param(w, marks=pytest.mark.slow) for w in ("full", "gone"))]
)
def test_training_outlives_its_terminal(finished, fresh, monkeypatch, where):
    """Rows I1, I2: the reader went away, the device is full, there is no stdout."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, open("/dev/full", "w") as full:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", {"closed": pipe, "full": full, "gone": None}[where])
            assert train() == 0
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (pipe, full):
            os.dup2(null, stream.fileno())
        os.close(null)
    assert digest(fresh) == digest(finished)


def test_lost_samples_are_an_error(copy):
    """Row I2, for sample.py; closed pipes and outputs of train.py are in test_cli.py."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, str(ROOT / "sample.py"), "--max-new-tokens=5"],
            env={**os.environ, **ENV},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
        )
    assert done.returncode == 5 and "the output is lost: No space left" in only_error(done.stderr)


def test_odd_paths_an_ascii_terminal_and_no_home(tmp_path):
    """Rows I4, I5, I6: relative paths with spaces and letters beyond ASCII, a bare environment."""
    (tmp_path / "tëxts").mkdir()
    (tmp_path / "tëxts" / "ein téxt.txt").write_text(TEXT + "é\u2028ж" * 40, encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    bare = ["env", "-i", "PYTHONIOENCODING=ascii"]
    bare += [f"{name}={value}" for name, value in {**os.environ, **ENV}.items() if "JAX" in name]
    run = "--run=../läufe/lauf 1"
    words = [*MICRO, run, "--data.path=../tëxts/ein téxt.txt"]
    with Command(*words, cwd=tmp_path / "elsewhere", prefix=bare) as command:
        code, lines, err = command.end()
    assert (code, err) == (0, "")
    assert lines[-1] == f"done: {tmp_path}/l\\xe4ufe/lauf 1\n"
    assert (tmp_path / "läufe" / "lauf 1" / "checkpoints" / "step_00000020").is_dir()
    words = [run, "--prompt=ж", "--max-new-tokens=15"]
    here = {"cwd": tmp_path / "elsewhere", "script": "sample.py", "prefix": bare}
    with Command(*words, **here) as command:
        code, lines, err = command.end()
    assert (code, err, lines[0][:6]) == (0, "", "\\u0436")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefix", "env"),
    [
        (("bash", "-c", 'ulimit -n 40; exec "$@"', "-"), {}),  # I10
        ((), {"JAX_ENABLE_X64": "true"}),  # E8
    ],
)
def test_few_files_and_wide_numbers(finished, fresh, prefix, env):
    """Rows I10, E8: the same bits."""
    with Command(*MICRO, cwd=fresh, prefix=prefix, **env) as command:
        code, _, err = command.end()
    assert (code, err) == (0, "")
    assert digest(fresh).keys() == digest(finished).keys()
    specs = [{p: d.rpartition(":")[0] for p, d in digest(f).items()} for f in (fresh, finished)]
    assert specs[0] == specs[1], "dtypes"
    assert env or digest(fresh) == digest(finished)
