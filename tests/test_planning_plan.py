# SPDX-License-Identifier: Apache-2.0
"""A plan: the largest batch fits and one more row does not; what does not fit is told how to."""

import dataclasses

import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig
from jaxgpt.presets import MODELS
from jaxgpt.study.planning.chips import chip
from jaxgpt.study.planning.memory import step_memory
from jaxgpt.study.planning.plan import largest_rows, make_plan
from jaxgpt.study.planning.setting import Setting
from jaxgpt.study.planning.state import state_of
from jaxgpt.study.planning.table import plan_text, record
from jaxgpt.study.planning.timing import EFFICIENCY
from jaxgpt.train.config import MeshConfig, OptimConfig, TrainConfig

MODEL = ModelConfig(vocab_size=512, context_length=64, d_model=64, n_layers=4, attention=GQA(8))


def setting(mesh=None, model=MODEL, **train):
    train = {"batch_size": 32, "dtype": "bfloat16", **train}
    mesh = MeshConfig(**(mesh or {}))
    return Setting(model, OptimConfig(), TrainConfig(**train), mesh, chip("h100"))


@pytest.mark.parametrize("parts", [{}, {"accumulate": 2, "remat": "full"}], ids=str)
def test_the_largest_batch_fits_and_one_row_more_does_not(parts):
    one = setting({"fsdp": 2}, **parts)
    state, available = state_of(one), 2.0**27
    rows = largest_rows(one, state, available)
    assert 1 < rows < 10_000
    needs = [step_memory(one, state, n).bytes for n in (rows, rows + 1)]
    assert needs[0] <= available < needs[1]
    plan = make_plan(one, memory_bytes=available / 0.9)
    assert plan.largest == rows * 2 * one.train.accumulate
    again = make_plan(one.at(rows), memory_bytes=available / 0.9)
    assert again.fits and not make_plan(one.at(rows + 1), memory_bytes=available / 0.9).fits


def test_what_does_not_fit_is_told_how_to():
    one = setting(batch_size=64)
    state = state_of(one)
    one_row = step_memory(one, state, 1).bytes
    plan = make_plan(one, memory_bytes=2 * one_row / 0.9)
    assert not plan.fits and 0 < plan.largest < 64
    words, needs = plan.fixes[0]
    assert "--train.accumulate=" in words and needs <= plan.available
    # Not even the state fits: more devices.
    plan = make_plan(one, memory_bytes=state.parameters + state.moments)
    assert plan.largest == 0
    words, needs = plan.fixes[0]
    assert words.startswith("--mesh.fsdp=") and "remat=full" in words and needs <= plan.available


def test_gpt3_is_planned_in_a_moment():
    model = MODELS["gpt3-175b"]()
    one = setting({"fsdp": 64, "tensor": 8}, model, batch_size=512, remat="full", scan=True)
    plan = make_plan(one, tokens=300e9, price=2.5)
    assert plan.fits and plan.setting.devices == 512
    assert plan.memory.kinds["parameters"] == pytest.approx(4 * 174.6e9 / 512, rel=0.05)
    assert 10 < plan.days < 60 and plan.cost == pytest.approx(plan.days * 24 * 2.5 * 512)
    assert plan.hint_tokens == 20 * 174_604_259_328
    bare = make_plan(dataclasses.replace(one, train=TrainConfig(batch_size=64, dtype="bfloat16")))
    assert not bare.fits and any("remat" in words for words, _ in bare.fixes)


def test_the_table_has_units_and_what_is_assumed():
    plan = make_plan(setting({"fsdp": 8, "tensor": 2}), tokens=1e9, price=2.0)
    text = plan_text(plan, "small", EFFICIENCY["gpu"], 0.1)
    for part in (
        *("GiB", " ms", "tokens/s", "days", "$", "MFU", "assumed:", "https://", "limit is"),
        *("16 x h100", "fsdp 8 x tensor 2", "within a host", "between hosts", "it fits"),
    ):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 130
    data = record(plan)
    assert data["memory_bytes"]["all"] == plan.memory.bytes and data["fits"]
    assert data["cost"] == plan.cost and {s["axis"] for s in data["sent"]} == {"fsdp", "tensor"}


def test_a_batch_that_does_not_split_is_told():
    with pytest.raises(ConfigError, match=r"split over 12 devices .* fix: --train.batch_size=36"):
        make_plan(setting({"data": 12}, batch_size=32))
