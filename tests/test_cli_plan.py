# SPDX-License-Identifier: Apache-2.0
"""The plan command, in this process; the step is compiled in another one."""

import json
from pathlib import Path

import pytest
from commandline import error_line

from jaxgpt import cli
from jaxgpt.cli import plan
from jaxgpt.study import machine
from jaxgpt.study.machine import Limits

SMALL = (
    *("--preset=tiny", "--model.context_length=16", "--model.d_model=32", "--model.n_layers=1"),
    *("--model.attention.n_heads=2", "--model.ffn.d_ff=64"),
)


def planned(capsys, *words):
    assert cli.main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_gpt3_on_512_devices(capsys):
    words = ["--preset", "gpt3-175b", "--mesh.fsdp=64", "--mesh.tensor=8", "--device", "h100"]
    assert cli.main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert "gpt3-175b: 174,604,259,328 parameters" in text and "512 x h100" in text
    assert "does not fit" in text and "fix: --train.remat=dots" in text and "bfloat16" in text
    more = ["--train.remat=full", "--train.scan=true", "--tokens=300e9", "--price=2.5"]
    found = planned(capsys, *words, *more)
    assert found["fits"] and found["batch_size"] == found["largest_batch_size"] > 64
    assert found["days"] > 0 and found["cost"] == pytest.approx(found["days"] * 24 * 2.5 * 512)


def test_a_recipe_keeps_its_batch(capsys):
    found = planned(capsys, "--preset=gpt2-124m", "--device=a100-80")
    assert found["batch_size"] == 480 and found["fits"]
    less = planned(capsys, "--preset=gpt2-124m", "--device=a100-80", "--memory-gib=8")
    assert less["available_bytes"] == 0.9 * 8 * 2**30
    assert not less["fits"] or less["largest_batch_size"] >= 480


def test_decoding(capsys):
    found = planned(capsys, "--preset=gpt2", "--decode", "32", "1024", "--device=h200")
    assert found["limit"] == "memory" and set(found["memory_bytes"]) == {
        *("weights", "cache", "logits", "all")
    }
    assert found["memory_bytes"]["cache"] == 32 * 1024 * 2 * 12 * 768 * 2
    assert cli.main(["plan", "--preset=gpt2", "--decode", "1", "8"]) == 0
    assert "ms a token" in capsys.readouterr().out


def test_this_machine_is_measured(capsys, monkeypatch):
    rates = Limits("float32", 1e11, 2e10, 1e10)
    monkeypatch.setattr(machine, "measure_limits", lambda dtype: rates)
    words = ["--preset=tiny", "--device=cpu"]
    found = planned(capsys, *words)
    assert found["device"] == "cpu" and 0 < found["mfu"] < 1
    assert cli.main(["plan", *words, "--train.remat=full"]) == 0
    assert "remat without scan saves nothing on a CPU" in capsys.readouterr().out


@pytest.mark.slow
def test_the_real_step_is_compiled_for_devices_that_are_not_there(capsys):
    words = [*SMALL, "--mesh.fsdp=4", "--train.batch_size=64", "--compile"]
    found = planned(capsys, *words)
    compiled = found["compiled"]
    assert compiled["bytes"] == pytest.approx(found["memory_bytes"]["all"], rel=0.25)
    assert compiled["arguments"] < compiled["bytes"] and compiled["device"] == "cpu"
    assert cli.main(["plan", *SMALL, "--train.batch_size=8", "--compile"]) == 0
    text = capsys.readouterr().out
    assert "compiled for cpu" in text and "by the formulas" in text and "nothing allocated" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device=h10"], "no device 'h10'; fix: did you mean h100?"),
        (["--preset=gpt3"], "no model 'gpt3'; fix: did you mean gpt?"),
        (["--preset=tiny", "--model=x"], "exclude each other"),
        (["--tokens=0"], "--tokens=0.0 must be above 0"),
        (["--reserve=1"], "--reserve=1.0 must be in [0, 1)"),
        (["--decode", "0", "8"], "both must be at least 1"),
        (["--mesh.fsdp=5"], "does not split over fsdp=5"),
        (["--train.batch_sise=8"], "did you mean --train.batch_size?"),
        (["--devise=h100"], "--devise"),
    ],
)
def test_errors_are_one_line(words, message, capsys):
    assert cli.main(["plan", *words]) == 2
    assert message in error_line(capsys)


def test_help_is_short_and_the_page_names_every_option(capsys):
    assert cli.main(["plan", "--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 45
    page = (Path(cli.__file__).parents[2] / "docs" / "planning.md").read_text()
    for name in plan.NAMES:
        assert f"--{name}" in text
        assert name == "help" or f"`--{name}" in page, name
