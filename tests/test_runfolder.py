# SPDX-License-Identifier: Apache-2.0
import os
import shutil
import signal
import subprocess
import threading

import pytest
from checkpointing import names, run_python, start_python

from jaxgpt.errors import CheckpointError, ConfigError, ResourceError
from jaxgpt.train import files, runfolder
from jaxgpt.train.runfolder import Signals, newest_run, open_run, run_path


def committed(run, step, at=None):
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "commit_success.txt").write_text("x")
    if at is not None:
        os.utime(folder / "commit_success.txt", (at, at))


def test_paths_are_absolute_from_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    run = open_run("runs/é x")
    monkeypatch.chdir("elsewhere")
    assert run.path == tmp_path / "runs" / "é x" and run.path.is_dir()
    expected = [
        "config.yaml",
        "tokenizer.json",
        "run.json",
        "metrics.jsonl",
        "tokens",
        "checkpoints",
    ]
    paths = [run.config_path, run.tokenizer_path, run.facts_path, run.metrics_path]
    paths += [run.tokens_path, run.checkpoints_path]
    assert [p.name for p in paths] == expected and {p.parent for p in paths} == {run.path}
    assert names(run.path) == []  # the probe is gone


@pytest.mark.parametrize("name", ["tiny", "a.b-c_1", "2024-01-01", "x" * 100])
def test_run_names(name, tmp_path):
    assert run_path(name, tmp_path) == tmp_path / name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "-x", "a b", "a\n", "C:\\x", "..\\x", "a\0b", "a/\0b", "é", "~"],
)
def test_names_that_are_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="no run name") as error:
        run_path(name, tmp_path)
    assert error.value.exit_code == 2 and names(tmp_path) == []


def test_a_name_with_a_slash_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert run_path("./x y") == tmp_path / "x y"
    assert str(run_path("/data/run7")) == "/data/run7"
    assert run_path("~/r") == tmp_path / "home" / "r"


@pytest.mark.parametrize("path", ["file", "file/below", "file/far/below", "x" * 300, "loop/x"])
def test_impossible_folders(path, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="no run folder can be there") as error:
        open_run(tmp_path / path)
    assert "\n" not in str(error.value) and (tmp_path / "file").read_text() == "x"


OPEN = """
import sys
from jaxgpt.errors import JaxgptError
from jaxgpt.train.runfolder import open_run
try:
    open_run(sys.argv[1] if len(sys.argv) > 1 else {path!r})
except JaxgptError as error:
    sys.exit(f"{{error.exit_code}} {{error}}")
"""


@pytest.mark.parametrize("below", ["", "new/run"])
def test_unwritable_folder(tmp_path, below):
    setpriv = (
        ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if not os.getuid() else ()
    )
    if setpriv and not shutil.which("setpriv"):
        pytest.skip("root may write everywhere, and there is no setpriv")
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    _, _, err = run_python(OPEN.format(path=str(folder / below)), *setpriv)
    folder.chmod(0o755)
    assert err.startswith("5 the run folder cannot be written: Permission denied"), err
    assert len(err.splitlines()) == 1 and names(folder) == []


def test_read_only_mount(tmp_path):
    command = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(tmp_path)]
    if os.getuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("cannot mount here")
    try:
        with pytest.raises(ResourceError, match="Read-only file system"):
            open_run(tmp_path / "run")
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_space_is_required(tmp_path, monkeypatch):
    run = open_run(tmp_path / "run")
    run.require_space(1000, n_files=3)
    with pytest.raises(
        ResourceError, match=r"needs 1e\+06 TB and 100 files, free are .* files"
    ) as error:
        run.require_space(10**18)
    assert error.value.exit_code == 5
    monkeypatch.setattr(runfolder, "free_space", lambda path: (10**12, 2.0))
    with pytest.raises(ResourceError, match="free are 1 TB and 2 files"):
        run.require_space(1000, n_files=3)
    assert files.free_space(tmp_path)[0] > 0


def test_newest_run_is_the_last_commit(tmp_path):
    for name, step, at in [("a", 900, 1e9), ("b", 5, 2e9), ("c", 7, 1.5e9)]:
        committed(tmp_path / name, step, at)
    committed(tmp_path / "a", 1000, 1.7e9)
    # Newer, and no run with a commit: an unfinished step, a link, a lone metrics file.
    (tmp_path / "d" / "checkpoints" / "step_00000009").mkdir(parents=True)
    (tmp_path / "e" / "checkpoints").mkdir(parents=True)
    (tmp_path / "e" / "checkpoints" / "step_00000001").symlink_to(
        tmp_path / "b" / "checkpoints" / "step_00000005"
    )
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "metrics.jsonl").write_text("{}\n")
    assert newest_run(tmp_path) == tmp_path / "b"


@pytest.mark.parametrize("root", ["absent", "empty", "."])
def test_no_run_yet(root, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"python train\.py --preset tiny") as error:
        newest_run(tmp_path / root)
    assert error.value.exit_code == 4 and names(tmp_path) == ["empty"]


def test_the_lock_is_exclusive_and_freed(tmp_path):
    run = open_run(tmp_path)
    with run.lock():
        assert (tmp_path / ".lock").read_text().startswith(f"pid {os.getpid()} on ")
        with pytest.raises(ResourceError, match=f"in use by pid {os.getpid()} on"), run.lock():
            pass
    with pytest.raises(ZeroDivisionError), run.lock():
        raise ZeroDivisionError
    with run.lock():
        pass
    assert (tmp_path / ".lock").read_text() == ""


def test_kill_frees_the_lock(tmp_path):
    code = f"""
    import time
    from jaxgpt.train.runfolder import open_run
    with open_run({str(tmp_path)!r}).lock():
        print("locked", flush=True)
        time.sleep(60)
    """
    with start_python(code) as owner:
        assert owner.stdout.readline() == "locked\n", owner.stderr.read()
        with pytest.raises(
            ResourceError, match=f"in use by pid {owner.pid} on .*another --run"
        ) as e:
            with open_run(tmp_path).lock():
                pass
        assert e.value.exit_code == 5
        owner.kill()
        owner.wait()
        with open_run(tmp_path).lock():
            assert str(os.getpid()) in (tmp_path / ".lock").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_sets_the_flag_and_handlers_come_back(number):
    seen = []
    before = signal.signal(number, lambda n, frame: seen.append(n))
    try:
        with Signals() as signals:
            assert signals.pending is None
            os.kill(os.getpid(), number)
            assert signals.pending == number and seen == []
        os.kill(os.getpid(), number)
        assert seen == [number]
    finally:
        signal.signal(number, before)


def test_handlers_come_back_after_an_error():
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    with pytest.raises(ZeroDivisionError), Signals():
        raise ZeroDivisionError
    assert before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]


def test_nohup_stays_in_force():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.pending is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_no_handlers_outside_the_main_thread():
    before, inside = signal.getsignal(signal.SIGTERM), []

    def work():
        with Signals() as signals:
            inside.append((signals.pending, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [(None, before)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGINT, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGHUP),
    ],
)
def test_the_second_signal_ends_the_process(first, second):
    code = """
    import signal, time
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    from jaxgpt.train.runfolder import Signals
    with Signals() as signals:
        print("ready", flush=True)
        while signals.pending is None:
            time.sleep(0.01)
        print("noted", flush=True)
        try:
            time.sleep(60)
        finally:
            print("never")
    """
    with start_python(code) as process:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        process.send_signal(first)
        assert process.stdout.readline() == "noted\n"
        process.send_signal(second)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 128 + second
    assert out == "" and len(err.splitlines()) == 1 and "second signal" in err


@pytest.mark.slow
def test_signals_during_compilation_do_not_crash():
    code = """
    import os, signal, threading, time
    import jax, jax.numpy as jnp
    from jaxgpt.train.runfolder import Signals
    def deep(x):
        for i in range(100):
            x = jnp.tanh(x @ x) * (i + 1)
        return x
    with Signals() as signals:
        lowered = jax.jit(jax.grad(lambda x: deep(x).sum())).lower(jnp.ones((8, 8)))
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        lowered.compile()
        timer.join()
        raise SystemExit(128 + signals.pending)
    """
    code, _, err = run_python(code, JAX_ENABLE_COMPILATION_CACHE="false")
    assert code == 143, err
