# SPDX-License-Identifier: Apache-2.0
"""A run of a second, and real commands on it that a test can stop at any line of their output."""

import contextlib
import fcntl
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from commandline import ROOT

from jaxgpt import cli
from jaxgpt.train.runfolder import RunFolder
from jaxgpt.train.stepfolder import read_meta, step_folders

TEXT = "".join(random.Random(0).choices("abcdefg \n", k=600))
"""32 windows: an epoch ends in the eighth step."""

MICRO = (
    "--preset=tiny",
    "--run=micro",
    "--data.path=text.txt",
    "--model.n_layers=1",
    "--model.d_model=16",
    "--model.attention.n_heads=2",
    "--model.context_length=16",
    "--model.vocab_multiple=8",
    "--model.dropout=0.1",
    "--train.batch_size=4",
    "--train.steps=20",
    "--train.save_every=5",
    "--train.eval_every=5",
    "--train.log_every=1",
    "--train.keep=9",
    "--optim.lr=0.01",
    "--optim.warmup_steps=2",
    "--show.sample_tokens=0",
    "--show.pictures=false",
)
LAST = 20
LIMIT_S = 120
"""Hangs that the tests look for last longer, or for ever."""

ENV = {
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "",  # not set: lines come because they are flushed
    # What conftest.py sets in this process, for the same bits and the same compiled programs.
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
}


class Command(contextlib.AbstractContextManager):
    """A command whose standard output is a pipe that holds one line.

    It runs at most two lines ahead of what the test has read, then it waits.

    Args:
      words: Those of the command.
      cwd: Where it runs.
      script: `train.py` or `sample.py`.
      prefix: Words before the interpreter.
      env: Variables to set.
    """

    def __init__(self, *words, cwd, script="train.py", prefix=(), **env):
        self._streams = script == "sample.py"  # what a model says has line ends anywhere
        self._out, out = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)  # one write is one packet
        fcntl.fcntl(out, fcntl.F_SETPIPE_SZ, 4096)  # and each packet takes a page
        self._err = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(ROOT / script), *words],
            cwd=cwd,
            env={**os.environ, **ENV, **env},
            stdout=out,
            stderr=self._err,
            start_new_session=True,
        )
        os.close(out)

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self._out)
        self._err.close()

    def piece(self) -> str:
        """What the next write wrote; "" at the end."""
        assert select.select([self._out], [], [], LIMIT_S)[0], f"silent for {LIMIT_S} s"
        piece = os.read(self._out, 4096).decode()
        assert "\r" not in piece and "\x1b" not in piece, piece  # I3
        return piece

    def line(self) -> str:
        """The next line; "" at the end."""
        line = ""
        while not line.endswith("\n") and (piece := self.piece()):
            line += piece
        assert self._streams or line.count("\n") <= 1, f"not flushed line by line: {line}"  # I3
        return line

    def until(self, text: str) -> str:
        """Read on to the first line with this text."""
        while text not in (line := self.line()):
            assert line, f"no line with {text!r}; stderr: {self._stderr()}"
        return line

    def end(self) -> tuple[int, list[str], str]:
        """The exit code, the lines that were not yet read, and all of stderr."""
        lines = list(iter(self.line, ""))
        code = self.process.wait(LIMIT_S)
        err = self._stderr()
        assert "Traceback" not in err, err
        return code, lines, err

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def _stderr(self) -> str:
        self._err.seek(0)
        return self._err.read()


def train(*more: str, words=MICRO) -> int:
    """The train command on the micro run of the current folder, in this process."""
    return cli.train_main([*words, *more])


def make_run(folder: Path, *more: str) -> Path:
    """A text, and an uninterrupted run on it."""
    (folder / "text.txt").write_text(TEXT)
    with contextlib.chdir(folder):
        assert train(*more) == 0
    return folder


def checkpoints(folder: Path) -> Path:
    return RunFolder(folder / "runs" / "micro").checkpoints_path


def steps(folder: Path) -> list[int]:
    return list(step_folders(checkpoints(folder)))


def unfinished(folder: Path) -> list[str]:
    """What saves and deletions that did not end have left."""
    return [p.name for p in checkpoints(folder).iterdir() if "tmp" in p.name or "trash" in p.name]


def digest(folder: Path, step: int = LAST) -> dict[str, str]:
    """What a saved step holds, by its checked meta file."""
    return read_meta(step_folders(checkpoints(folder))[step], step)["digest"]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but the lock."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def only_error(err: str) -> str:
    """The one line that a command may print on stderr."""
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    return err
