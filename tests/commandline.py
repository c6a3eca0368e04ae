# SPDX-License-Identifier: Apache-2.0
"""What the tests of the commands share."""

import os
import subprocess
import sys
from pathlib import Path

from jaxgpt import cli

ROOT = Path(cli.__file__).parents[2]
TEXT = "the quick brown fox jumps over the lazy dog\n" * 40
MICRO = (
    "--data.path=text.txt",
    "--model.n_layers=1",
    "--model.d_model=16",
    "--model.attention.n_heads=2",
    "--model.context_length=16",
    "--train.batch_size=4",
    "--train.steps=4",
    "--optim.lr=0.05",
    "--optim.warmup_steps=2",
    "--train.save_every=2",
    "--train.eval_every=2",
    "--show.sample_tokens=0",
    "--show.pictures=false",
)


def error_line(capsys) -> str:
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and err.startswith("error: "), err
    assert "usage" not in out + err
    return err


def python(*words, stdout=subprocess.PIPE, env=None, **options):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    command = [sys.executable, *words]
    return subprocess.run(
        command, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, **options
    )
