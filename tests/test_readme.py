# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/ tell a person to type works: Python always, shell blocks when slow.

What needs the network stands in blocks `sh network` and `python network`. Of the commands only the
options are checked; Python gets a tiny model in the place of each of the hub.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import hubfolders
import numpy as np
import pytest
from chatfolders import chat_folder

from jaxgpt.cli import export, origin, prepare, sample
from jaxgpt.cli.train import train_main
from jaxgpt.config import RunConfig, resolve
from jaxgpt.interop import pretrained

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(document.relative_to(ROOT)) for document in DOCUMENTS]


def blocks(document, language):
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, document.read_text(), re.MULTILINE | re.DOTALL)


def python_blocks():
    for document, name in zip(DOCUMENTS, NAMES, strict=True):
        for number, code in enumerate(blocks(document, "python")):
            yield pytest.param(name, code, id=f"{name}-{number}")


@pytest.mark.parametrize(("name", "code"), list(python_blocks()))
def test_python_blocks_run(name, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, name, "exec"), {"__name__": "readme"})


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Every name of the hub is a tiny chat model; the current folder is empty."""
    tensors = hubfolders.llama()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.random.default_rng(1).normal(size=(264, 8)).astype(np.float32)
    config = hubfolders.LLAMA | {"vocab_size": 264, "max_position_embeddings": 128}
    folder = hubfolders.write(chat_folder(tmp_path / "hub"), config, tensors)
    for module in (pretrained, origin):
        monkeypatch.setattr(module, "fetch_model", lambda *_, **options: (folder, "0" * 40))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_python_blocks_for_the_network_run(document, hub):
    for code in blocks(document, "python network"):
        exec(compile(code, str(document), "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        assert target.startswith("https://") or (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_options_of_network_blocks_exist(document, hub):
    for command in "".join(blocks(document, "sh network")).splitlines():
        program, script, *words = shlex.split(command)
        if (program, script) == ("jaxgpt", "export"):
            assert export._parser().parse_args(words).out, command
            continue
        if (program, script) == ("jaxgpt", "prepare"):
            options, words = prepare._parser().parse_known_args(words)
            assert options.out and resolve(RunConfig(), (), words), command
            continue
        assert program == "python"
        if script == "sample.py":
            assert sample._parser().parse_args(words), command
        else:
            assert script == "train.py"
            assert train_main([*words, "--print_config"]) == 0, command


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_shell_blocks_run(document, tmp_path):
    """Every command in order, in a copy of the project; installing and testing are CI's own."""
    for name in ("train.py", "sample.py", "README.md", "jaxgpt"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    programs = {
        "python": [sys.executable],
        "jaxgpt": [sys.executable, "-c", "from jaxgpt.cli import main; raise SystemExit(main())"],
    }
    ran = 0
    for command in "".join(blocks(document, "sh")).splitlines():
        words = shlex.split(command)
        settings = {}
        while re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            settings[name] = value
        program, *words = words
        if program == "pip" or words[:2] == ["-m", "pytest"]:
            continue
        done = subprocess.run(
            [*programs[program], *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path)} | settings,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip()
        ran += 1
    assert ran >= 6 or document.parent.name == "docs"
