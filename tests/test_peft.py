# SPDX-License-Identifier: Apache-2.0
"""Adapters written for PEFT and put together by hand; PEFT itself is asked in test_export.py."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from exports import grown, shrunk
from safetensors.numpy import load_file

from jaxgpt.boxes.head import Untied
from jaxgpt.errors import ConfigError, DivergedError
from jaxgpt.interop.families import FAMILIES, write_config
from jaxgpt.interop.peft import save_adapter
from jaxgpt.interop.rows import plan, true_shapes
from jaxgpt.interop.save import on_host
from jaxgpt.train.config import LoraConfig
from jaxgpt.train.digest import by_path
from jaxgpt.train.lora import init_lora, merged

LORA = LoraConfig(rank=3, alpha=5.0)


def adapted(cfg, lora, seed=1):
    """Parameters with adapters that change something."""
    params = init_lora(grown(cfg), lora, jax.random.key(seed))
    rng = np.random.default_rng(seed)
    tree = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(np.float32), params["lora"])
    return params | {"lora": tree}


def tensors(cfg, params):
    """A model as tensors of its family."""
    shapes, flat, out = true_shapes(cfg), by_path(params), {}
    for piece in plan(FAMILIES[write_config(cfg)["model_type"]].rows, cfg, shapes):
        out |= piece.write({path: on_host(flat[path], shapes[path]) for path in piece.params})
    return out


def by_hand(base, folder):
    """PEFT's rule: W + B A alpha / r, the other way round for [in, out]."""
    config = json.loads((folder / "adapter_config.json").read_text())
    adapters = load_file(folder / "adapter_model.safetensors")
    out, seen = dict(base), 0
    for name, a in adapters.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = adapters[name.replace("lora_A", "lora_B")]
        [target] = [t for t in config["target_modules"] if f".{module}".endswith(f".{t}")]
        rank = config["rank_pattern"].get(target, config["r"])
        alpha = config["alpha_pattern"].get(target, config["lora_alpha"])
        assert a.shape[0] == b.shape[1] == rank
        delta = b @ a * (alpha / rank)
        out[f"{module}.weight"] = base[f"{module}.weight"] + (
            delta.T if config["fan_in_fan_out"] else delta
        )
        seen += 2
    assert seen == len(adapters)
    matched = [n.removesuffix(".weight") for n in base]
    targets = tuple(f".{t}" for t in config["target_modules"])
    assert seen == 2 * sum(f".{n}".endswith(targets) for n in matched), "no other module matches"
    return out


@pytest.mark.parametrize(
    "preset, targets",
    [
        ("llama-7b", ("attention/*", "ffn/*", "head/*")),
        ("smollm2-135m", ("attention/q", "block_1/ffn/down")),
        ("gpt2", ("attention/*",)),
        ("gpt2", ("attention/q", "attention/v", "block_0/attention/k", "attention/out")),
        ("gpt", ("ffn/*",)),
        ("pythia-70m", ("attention/k", "attention/v")),
        ("deepseek-v3", ("attention/*",)),
        ("mixtral-8x7b", ("attention/*",)),
        ("olmo2-7b", ("*/attention/out",)),
    ],
)
def test_adapters_put_together_by_hand_are_the_merged_model(tmp_path, preset, targets):
    cfg, lora = shrunk(preset), dataclasses.replace(LORA, targets=targets)
    params = adapted(cfg, lora)
    saved = save_adapter(tmp_path / "out", cfg, params, lora)
    base = tensors(cfg, {name: leaf for name, leaf in params.items() if name != "lora"})
    got, want = by_hand(base, tmp_path / "out"), tensors(cfg, merged(params, lora))
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, atol=1e-5, err_msg=name)
    assert any(not np.array_equal(want[name], base[name]) for name in want)
    file = tmp_path / "out" / "adapter_model.safetensors"
    assert saved.n_params == sum(array.size for array in load_file(file).values())


def test_settings(tmp_path):
    cfg = shrunk("llama-7b")
    how = {"base": "meta-llama/Llama-2-7b-hf", "revision": "abc"}
    save_adapter(tmp_path / "out", cfg, adapted(cfg, LORA), LORA, **how)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "meta-llama/Llama-2-7b-hf"
    assert (config["r"], config["lora_alpha"], config["revision"]) == (3, 5, "abc")
    names = [f"self_attn.{x}_proj" for x in "koqv"]
    assert config["target_modules"] == names and config["rank_pattern"] == {}
    assert config["task_type"] == "CAUSAL_LM" and config["fan_in_fan_out"] is False


def test_one_matrix_of_several_parts_has_the_rank_of_all(tmp_path):
    cfg = shrunk("gpt2")
    save_adapter(tmp_path / "out", cfg, adapted(cfg, LORA), LORA)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"attn.c_attn": 9}
    assert config["alpha_pattern"] == {"attn.c_attn": 15}
    assert config["target_modules"] == ["attn.c_attn", "attn.c_proj"] and config["fan_in_fan_out"]


@pytest.mark.parametrize(
    "preset, targets, what",
    [
        ("mixtral-8x7b", "ffn/experts/up", "no adapter for block_0/ffn/experts/up/kernel"),
        ("gpt-oss-20b", "ffn/experts/*", "which is model.layers.0.mlp.experts.gate_up_proj there"),
        ("qwen3-30b-a3b", "ffn/router", "no adapter for block_0/ffn/router/kernel"),
        ("deepseek-v3", "ffn/shared/up", "which is model.layers.3.mlp.shared_experts.up_proj"),
        ("deepseek-v3", "block_0/ffn/up", "which is model.layers.0.mlp.up_proj.weight there"),
        ("pythia-70m", "head/*", "no adapter for head/out/kernel, which is embed_out.weight"),
    ],
)
def test_what_peft_cannot_adapt_is_named(tmp_path, preset, targets, what):
    cfg, lora = shrunk(preset), dataclasses.replace(LORA, targets=(targets,))
    with pytest.raises(ConfigError, match=what):
        save_adapter(tmp_path / "out", cfg, adapted(cfg, lora), lora)
    assert not list(tmp_path.iterdir())


def test_an_adapted_head_has_no_padding(tmp_path):
    cfg, lora = shrunk("llama-7b"), dataclasses.replace(LORA, targets=("head/out",))
    assert isinstance(cfg.head, Untied)
    save_adapter(tmp_path / "out", cfg, adapted(cfg, lora), lora)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found["base_model.model.lm_head.lora_B.weight"].shape == (96, 3)


def test_what_is_refused(tmp_path):
    cfg = shrunk("llama-7b")
    params = adapted(cfg, LORA)
    with pytest.raises(ConfigError, match="there are no adapters"):
        save_adapter(tmp_path / "out", cfg, params, LoraConfig())
    params["lora"]["block_0"]["attention"]["q"]["a"][0, 0] = np.nan
    with pytest.raises(DivergedError, match=r"q_proj.lora_A.weight holds numbers that are not"):
        save_adapter(tmp_path / "out", cfg, params, LORA)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"holds notes\.txt"):
        save_adapter(tmp_path / "mine", cfg, params, LORA, force=True)
