# SPDX-License-Identifier: Apache-2.0
"""The state on one device is what the project's shardings make of the abstract arrays."""

import dataclasses

import jax
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.moe import MoE
from jaxgpt.errors import ConfigError
from jaxgpt.model import LayerEdit, ModelConfig
from jaxgpt.presets import MODELS
from jaxgpt.study.planning.chips import chip
from jaxgpt.study.planning.setting import Setting
from jaxgpt.study.planning.state import abstract_state, one_of_each, shard_bytes, state_of
from jaxgpt.train.config import LoraConfig, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.train.optimizers import Lion, Muon

GPT = ModelConfig(
    vocab_size=500,
    context_length=16,
    d_model=64,
    n_layers=5,
    attention=GQA(8),
    edits=(LayerEdit(every=2, start=1, set={"attention.window": 8}),),
)
MIXED = dataclasses.replace(
    GPT,
    head=Untied(),
    ffn=GatedMLP(128),
    edits=(LayerEdit(start=2, ffn=MoE(8, top_k=2, expert=GatedMLP(32))),),
)
MESHES = [{}, {"fsdp": 8}, {"fsdp": 2, "tensor": 4}, {"data": 2, "expert": 4}, {"context": 4}]


def setting(model, mesh=None, **parts):
    optim, lora = parts.pop("optim", OptimConfig()), parts.pop("lora", LoraConfig())
    train = TrainConfig(**parts)
    return Setting(model, optim, train, MeshConfig(**(mesh or {})), chip("h100"), lora)


def total(tree):
    return sum(shard_bytes(leaf) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("model", "mesh"),
    [*((GPT, mesh) for mesh in MESHES), (MIXED, MESHES[1]), (MIXED, MESHES[3])],
)
def test_bytes_are_those_of_the_sharded_abstract_state(model, mesh):
    one = setting(model, mesh)
    state, abstract = state_of(one), abstract_state(one, model)
    assert state.parameters == total(abstract.params)
    assert state.moments == total(abstract.opt_state)
    assert state.average == 0 and state.trained == state.parameters


@pytest.mark.parametrize(
    "parts",
    [
        {"optim": OptimConfig(Muon())},
        {"optim": OptimConfig(Lion(), state_dtype="float32", multipliers={"block_4/*": 0.5})},
        {"ema_decay": 0.9},
        {"lora": LoraConfig(rank=4)},
    ],
    ids=["muon", "lion", "ema", "lora"],
)
def test_other_optimizers_averages_and_adapters(parts):
    one = setting(GPT, {"fsdp": 2}, **parts)
    plain = setting(GPT, {"fsdp": 2}, **{k: v for k, v in parts.items() if k != "optim"})
    optim = dataclasses.replace(one.optim, multipliers={})
    state = state_of(one)
    abstract = abstract_state(dataclasses.replace(plain, optim=optim), GPT)
    assert state.parameters == total(abstract.params)
    assert state.moments == total(abstract.opt_state)
    assert state.average == total(abstract.extra.get("ema", {}))
    assert (state.average > 0) == ("ema_decay" in parts)
    assert (state.trained < state.parameters / 4) == ("lora" in parts)


def test_what_is_gathered_is_what_fsdp_splits():
    one = setting(GPT, {"fsdp": 4, "tensor": 2}, dtype="bfloat16")
    by_path = {p.path: p for p in state_of(one).params}
    up = by_path["block_0/ffn/up/kernel"]
    assert (up.layers, up.parts, up.split, up.held) == (3, 4, ("fsdp",), ("tensor",))
    assert up.stored == 4 * 64 * 256 / 8 and up.whole == 4 * 64 * 256 / 2
    assert up.used == up.whole / 2  # sent in bfloat16
    bias = by_path["block_0/ffn/up/bias"]
    assert (bias.parts, bias.used) == (1, 4 * 256)
    assert by_path["embed/embedding"].times == 1


def test_equal_layers_are_looked_at_once():
    one, counts = one_of_each(MODELS["gpt3-175b"]())
    assert one.n_layers == 2 and counts == [48, 48]
    assert [layer.attention.window for layer in one.layers] == [None, 256]


def test_the_largest_preset_is_one_twelfth_of_its_state():
    state = state_of(setting(MODELS["gpt3-175b"](), {"fsdp": 64, "tensor": 8}))
    assert state.parameters == pytest.approx(4 * 174_604_259_328 / 512, rel=0.05)
    assert state.moments == pytest.approx(2 * state.parameters, rel=1e-6)


def test_what_does_not_split_is_told():
    with pytest.raises(ConfigError, match="does not split over fsdp=48"):
        state_of(setting(GPT, {"fsdp": 48}))
