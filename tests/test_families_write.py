# SPDX-License-Identifier: Apache-2.0
"""What is written as config.json; that transformers reads it is in test_export.py."""

import dataclasses
import json

import pytest
from exports import HUB, VARIANTS, shrunk, variant

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.rope import RoPE
from jaxgpt.boxes.scaling import NTKScaling
from jaxgpt.errors import ConfigError
from jaxgpt.interop import FAMILIES, read_config
from jaxgpt.interop.families import write_config
from jaxgpt.interop.rows import plan, true_shapes
from jaxgpt.interop.same import differences, resolved
from jaxgpt.presets import MODELS, RUNS


def check(cfg, family=None):
    """Written and read it is the same model, and every parameter has a tensor."""
    data = json.loads(json.dumps(write_config(cfg, family)))
    assert differences(resolved(cfg), resolved(read_config(data))) == []
    plan(FAMILIES[data["model_type"]].rows, cfg, true_shapes(cfg))
    return data


@pytest.mark.parametrize("name", HUB)
def test_published_models_can_be_said(name):
    """At full size, for which no shape of a parameter is computed."""
    cfg = MODELS[name]()
    assert differences(resolved(cfg), resolved(read_config(write_config(cfg)))) == []


@pytest.mark.parametrize(
    "name",
    "gpt gpt2 llama3.2-1b mistral-7b mixtral-8x7b smollm3-3b qwen2-7b qwen3-8b qwen3-30b-a3b "
    "deepseek-v2 deepseek-v3 gemma-2b gemma2-2b gemma3-1b pythia-1b olmo2-7b gpt-oss-20b".split(),
)
def test_small_ones_have_all_their_tensors(name):
    check(shrunk(name))


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_unusual_can_be_said(name):
    check(variant(name), VARIANTS[name]["model_type"])


def test_both_dialects_stand_side_by_side():
    yarn = write_config(variant("llama-wide"))
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    scaling |= {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.5}
    assert (yarn["rope_theta"], yarn["rope_scaling"]) == (5e4, scaling)
    assert yarn["rope_parameters"] == {"rope_theta": 5e4} | scaling
    plain = write_config(shrunk("gemma3-1b"))
    assert (plain["rope_theta"], plain["rope_local_base_freq"]) == (1e6, 1e4)
    assert plain["rope_scaling"] is None and plain["rope_parameters"] == {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    experts = write_config(shrunk("qwen3-30b-a3b"))
    assert experts["num_experts"] == experts["num_local_experts"] == 8


@pytest.mark.parametrize(
    "theirs",
    [
        {"rope_local_base_freq": 2.0},
        {"rope_theta": 2.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_gemma3_dialects_must_agree(theirs):
    with pytest.raises(ConfigError, match=f"{next(iter(theirs))}=.* contradicts"):
        read_config(write_config(shrunk("gemma3-1b")) | theirs)


def test_the_first_family_that_can_is_taken_or_the_one_asked_for():
    cfg = shrunk("llama2-7b")
    assert write_config(cfg)["model_type"] == "llama"
    assert check(cfg, "mistral")["architectures"] == ["MistralForCausalLM"]
    with pytest.raises(ConfigError, match="no family 'bert'; fix: one of gpt2, openai-gpt, llama"):
        write_config(cfg, "bert")


# --- what no family can say -----------------------------------------------------------------------


def test_the_nearest_family_is_named_with_what_differs():
    tiny = dataclasses.replace(RUNS["tiny"]().model, vocab_size=96)
    with pytest.raises(ConfigError) as caught:
        write_config(tiny)
    assert caught.value.what == (
        "no family of public checkpoints has this model; the nearest is qwen3, but ffn is MLP, "
        "there GatedMLP"
    )
    banded = MODELS["gpt3-125m"]()
    with pytest.raises(ConfigError, match=r"is gpt2, but attention.window is 256, there None in "):
        write_config(banded)


@pytest.mark.parametrize(
    "preset, family, change, what",
    [
        ("llama-7b", "llama", {"norm": RMSNorm(eps=1e-3)}, "final_norm.eps is 1e-06, there 0.001"),
        ("llama-7b", "llama", {"position": RoPE(scaling=NTKScaling())}, "position.scaling is NTK"),
        ("llama-7b", "llama", {"position": RoPE(fraction=0.5)}, "position.fraction is 0.5"),
        ("llama-7b", "llama", {"d_model": 66, "attention": GQA(4, head_dim=16)}, "d_model=66 is"),
        ("llama-7b", "llama", {"vocab_size": None}, "vocab_size is None"),
        ("gpt2", "gpt2", {"attention": GQA(4, 2)}, "attention.n_kv_heads is 2, there 4"),
        ("gpt", "openai-gpt", {"ffn": MLP(activation="gelu")}, "ffn.activation=gelu is none of"),
        ("gemma2-2b", "gemma2", {"attention": GQA(4, 2, 24, False, scale=0.3)}, "scale is 0.3"),
        ("deepseek-v2", "deepseek_v2", {"ffn": MoE(expert=GatedMLP(32))}, "no shared expert"),
        ("gpt2", "deepseek_v3", {}, "attention is GQA, there MLA"),
    ],
)
def test_what_a_family_cannot_say_is_named(preset, family, change, what):
    cfg = dataclasses.replace(shrunk(preset), **change)
    with pytest.raises(ConfigError, match=what):
        write_config(cfg, family)
