# SPDX-License-Identifier: Apache-2.0
"""The examples run, and a box of one's own passes what ours pass."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from jaxgpt.testing import check_box

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


def test_research(capsys):
    runpy.run_path(str(EXAMPLES / "research.py"))
    out = capsys.readouterr().out
    assert "continues with [3, 4, 0, 1, 2, 3, 4]" in out  # it has learned to count
    source = (EXAMPLES / "research.py").read_text().split("# --- forty lines")[0]
    code = source[source.index("# A model") :]
    assert len([line for line in code.splitlines() if line.strip()]) < 40


def test_my_attention_passes_the_contract_suite():
    check_box(runpy.run_path(str(EXAMPLES / "my_attention.py"))["MeanPool"](scale=0.5))


def test_my_attention_from_the_command_line(tmp_path):
    """Trained and sampled by import path; nothing in jaxgpt knows of it."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox\n" * 40)
    run = tmp_path / "run"
    sizes = "--model.d_model=16 --model.n_layers=1 --model.context_length=8 --train.steps=3"
    train = f"--preset tiny --run {run} --data.path={text} --optim.warmup_steps=1 {sizes}"
    box = "--model.attention=my_attention.MeanPool --model.attention.scale=0.5"
    for command in (f"train.py {train} {box}", f"sample.py --run {run} --max-new-tokens 5"):
        script, *words = command.split()
        done = subprocess.run(
            [sys.executable, str(ROOT / script), *words],
            cwd=EXAMPLES,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    assert "my_attention.MeanPool" in (run / "config.yaml").read_text()


@pytest.mark.parametrize("name", ["research.py", "my_attention.py"])
def test_readme_names_the_example(name):
    assert f"examples/{name}" in (ROOT / "README.md").read_text()
