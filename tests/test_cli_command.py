# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys

import jax
import pytest
from commandline import ROOT, error_line, python

from jaxgpt.cli import command
from jaxgpt.cli.command import emit, run_command
from jaxgpt.errors import CheckpointError, DivergedError, Interrupted


def fails(error):
    def work():
        raise error

    return run_command(work)


@pytest.mark.parametrize(
    ("heavy", "only_cpu", "tuned"), [(True, True, 1), (False, True, 0), (True, False, 0)]
)
def test_a_cpu_is_tuned_for_what_is_there_to_compute(heavy, only_cpu, tuned, monkeypatch):
    calls = []
    monkeypatch.setattr(command, "tune_cpu", lambda: calls.append("tuned"))
    monkeypatch.setattr(command, "only_cpu", lambda device: only_cpu)
    monkeypatch.setattr(command, "use_compilation_cache", lambda: calls.append("started"))
    command.start_jax("cpu", heavy=heavy)
    assert calls == ["tuned"] * tuned + ["started"]


@pytest.mark.parametrize(
    "error, code, message",
    [
        (DivergedError("not finite", fix="a lower rate"), 3, "not finite; fix: a lower rate"),
        (CheckpointError("none\nusable"), 4, "none usable"),
        (Interrupted("stopped", signum=15), 143, "stopped"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError("cannot allocate 7 bytes"), 5, "cannot allocate 7 bytes; fix: lower --train."),
        (MemoryError(), 5, "--model.context_length, or raise --train.accumulate"),
        (BrokenPipeError(32, "Broken pipe"), 5, "the output is lost: Broken pipe"),
        (
            jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes\nmore"
            ),
            5,
            "Out of memory allocating 9 bytes; fix: lower --train.batch_size or --model.context_l",
        ),
    ],
)
def test_exit_codes(capsys, error, code, message):
    assert fails(error) == code
    assert message in error_line(capsys)


def test_what_nobody_foresaw_is_raised():
    with pytest.raises(ZeroDivisionError):
        fails(ZeroDivisionError())
    with pytest.raises(jax.errors.JaxRuntimeError):
        fails(jax.errors.JaxRuntimeError("INTERNAL: broken"))


def test_debug_shows_the_traceback(capsys, monkeypatch):
    monkeypatch.setenv("JAXGPT_DEBUG", "1")
    assert fails(DivergedError("not finite")) == 3
    err = capsys.readouterr().err
    assert "Traceback" in err and err.endswith("error: not finite\n")


EMIT = """
from jaxgpt.cli.command import emit, run_command
raise SystemExit(run_command(lambda: [emit("café\\n") for _ in range(100_000)]))
"""


def test_lost_output_is_an_error_and_no_traceback():
    with open("/dev/full", "w") as full:
        out = python("-c", EMIT, stdout=full)
    assert out.returncode == 5 and out.stderr.count("\n") == 1 and "No space left" in out.stderr
    for redirect, reason in ((">&-", "stdout is closed"), ("| true", "Broken pipe")):
        command = f'set -o pipefail; "$0" -c "$1" {redirect}'
        out = subprocess.run(
            ["bash", "-c", command, sys.executable, EMIT],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert out.returncode == 5, (redirect, out)
        assert out.stderr.count("\n") == 1 and reason in out.stderr


def test_an_ascii_terminal_gets_escapes():
    code = "from jaxgpt.cli.command import *; run_command(lambda: emit('caf\\xe9 \\u0153'))"
    out = python("-c", code, env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert (out.returncode, out.stdout, out.stderr) == (0, "caf\\xe9 \\u0153", "")


CACHE = """
from jaxgpt.cli.command import use_compilation_cache
import jax
use_compilation_cache()
print(jax.config.jax_compilation_cache_dir)
jax.jit(lambda x: x * 3 + 1)(2.0)
"""


@pytest.mark.slow
def test_compiled_programs_are_kept_where_that_can_be(tmp_path):
    def found(**env):
        env = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **env}
        command = [sys.executable, "-c", CACHE]
        out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert (out.returncode, out.stderr) == (0, ""), out.stderr
        return out.stdout.strip()

    assert found(HOME=str(tmp_path)) == str(tmp_path / ".cache/jaxgpt/xla")
    assert any((tmp_path / ".cache/jaxgpt/xla").iterdir())
    xdg = tmp_path / "xdg"
    assert found(HOME=str(tmp_path), XDG_CACHE_HOME=str(xdg)) == str(xdg / "jaxgpt/xla")
    (tmp_path / "file").touch()
    assert found(HOME=str(tmp_path / "file")) == "None", "cannot be made: silently off"
    assert found() == "None", "no HOME"
    own = str(tmp_path / "own")
    assert found(HOME=str(tmp_path), JAX_COMPILATION_CACHE_DIR=own) == own


def test_emit_writes_at_once(capsys):
    emit("x")
    assert capsys.readouterr().out == "x"
