# SPDX-License-Identifier: Apache-2.0
"""What README.md tells a person to type works: Python blocks always, shell blocks when slow."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code):
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


@pytest.mark.slow
def test_shell_blocks_run(tmp_path):
    """Every command in order, in a copy of the project; installing and testing are CI's own."""
    for name in ("train.py", "sample.py", "README.md", "jaxgpt"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    programs = {
        "python": [sys.executable],
        "jaxgpt": [sys.executable, "-c", "from jaxgpt.cli import main; raise SystemExit(main())"],
    }
    ran = 0
    for command in "".join(blocks("sh")).splitlines():
        program, *words = shlex.split(command)
        if program == "pip" or words[:2] == ["-m", "pytest"]:
            continue
        done = subprocess.run(
            [*programs[program], *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip()
        ran += 1
    assert ran >= 6
