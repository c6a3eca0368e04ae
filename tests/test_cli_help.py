# SPDX-License-Identifier: Apache-2.0
import dataclasses
import re

import pytest
from commandline import python

from jaxgpt import cli
from jaxgpt.cli.help import field_docs
from jaxgpt.presets import RUNS
from jaxgpt.train.config import OptimConfig, TrainConfig
from jaxgpt.train.optimizers import AdamW


def test_help_fits_a_screen_and_shows_the_preset_s_values(capsys):
    assert cli.train_main(["--help", "--preset=gpt2-124m"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 100
    for part in [*RUNS, "--run", "--config", "--help-all", "--data.path", "--model.attention=GQA"]:
        assert part in text
    assert re.search(r"--optim\.lr=0\.0006 +peak rate", text)
    assert "--model.n_layers=12" in text and "The values of gpt2-124m" in text


def test_help_all_has_every_name_with_its_comment(capsys):
    assert cli.train_main(["--help-all"]) == 0
    text = capsys.readouterr().out
    for group, part in vars(RUNS["tiny"]()).items():
        for name in vars(part) if dataclasses.is_dataclass(part) else ():
            if name != "layers":
                assert f"--{group}.{name}=" in text
    assert "--init_from=null" in text and "--lora.targets=[attention/*]" in text
    assert re.search(r"--model\.attention\.window=null +\[int or null\] keys a query sees", text)
    assert "GatedMLP" in text and "8/3 d_model rounded" in text, "boxes that the preset has not"
    assert max(map(len, text.splitlines())) <= 101


def test_field_docs_are_the_trailing_comments():
    docs = field_docs(OptimConfig)
    assert docs["lr"] == "peak rate" and docs["clip"].startswith("largest global")
    assert field_docs(AdamW)["beta1"] == "memory of the gradient's mean"
    assert docs["schedule"].startswith("wsd: warmup, stable, decay")
    assert docs["multipliers"] == "{path: factor on lr}"
    assert set(field_docs(TrainConfig)) == set(TrainConfig.__dataclass_fields__)
    local = type("Local", (), {"__annotations__": {"x": int}, "x": 1})
    assert field_docs(dataclasses.dataclass(local)) == {"x": ""}


QUICK = """
import sys
from jaxgpt.cli import main
assert main([sys.argv[1], "--help"]) == 0
from jax._src import xla_bridge
heavy = {"orbax", "datasets", "matplotlib", "tokenizers", "torch"} & set(sys.modules)
assert not heavy, heavy
assert not xla_bridge.backends_are_initialized()
"""


@pytest.mark.parametrize("command", ["train", "sample", "plot", "params"])
def test_help_imports_and_starts_nothing_heavy(command):
    out = python("-c", QUICK, command)
    assert out.returncode == 0, out.stderr
    assert "usage" in out.stdout
