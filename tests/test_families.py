# SPDX-License-Identifier: Apache-2.0
"""Configs of all families, in words; that the models are right is in test_parity.py."""

import json

import pytest
from hubfolders import GPT2, LLAMA
from published import PUBLISHED

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import Parallel, PostNorm, PreNorm
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Tied, Untied
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.norm import LayerNorm, NoNorm, RMSNorm
from jaxgpt.boxes.position import Learned, NoPosition
from jaxgpt.boxes.rope import RoPE
from jaxgpt.errors import ConfigError
from jaxgpt.flops import count_params
from jaxgpt.interop import FAMILIES, read_config
from jaxgpt.model import ModelConfig


def like_llama(model_type, **keys):
    return read_config(LLAMA | {"num_hidden_layers": 6, "model_type": model_type} | keys)


def windows_of(cfg):
    return [layer.attention.window for layer in cfg.layers]


# --- published configs ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_their_size(name):
    want, data = PUBLISHED[name]
    assert sum(count_params(read_config(data)).values()) == want


def test_gpt2_is_the_default_model():
    assert read_config(PUBLISHED["gpt2"][1]) == ModelConfig()


# --- what is peculiar to a family -----------------------------------------------------------------


def test_gpt2_scales():
    config = GPT2 | {"n_layer": 3, "scale_attn_by_inverse_layer_idx": True}
    scales = [layer.attention.scale for layer in read_config(config).layers]
    assert scales == [None, 0.5 / 2, 0.5 / 3]
    assert read_config(GPT2 | {"scale_attn_weights": False}).attention == GQA(n_heads=2, scale=1.0)
    with pytest.raises(ConfigError, match="n_ctx=9 is not supported"):
        read_config(GPT2 | {"n_ctx": 9})


def test_gpt():
    cfg = read_config(GPT2 | {"model_type": "openai-gpt", "afn": "gelu"})
    assert (cfg.block, cfg.final_norm, cfg.ffn) == (
        PostNorm(),
        NoNorm(),
        MLP(activation="gelu_tanh"),
    )


def test_llama_biases_and_head():
    cfg = like_llama("llama")
    assert (cfg.attention, cfg.head) == (GQA(4, 2, use_bias=False), Untied())
    cfg = like_llama("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert (cfg.attention, cfg.ffn, cfg.head) == (GQA(4, 2), GatedMLP(12, use_bias=True), Tied())
    assert like_llama("llama", num_key_value_heads=None).attention == GQA(4, use_bias=False)
    with pytest.raises(ConfigError, match="rope_interleaved=True is not supported"):
        like_llama("llama", rope_interleaved=True)


@pytest.mark.parametrize("value, window", [(16, 16), (0, None), (None, None)])
def test_a_window_of_null_or_zero_is_none(value, window):  # N07
    assert windows_of(like_llama("mistral", sliding_window=value)) == [window] * 6
    gemma2 = like_llama("gemma2", sliding_window=value, head_dim=2)
    assert windows_of(gemma2) == [window, None] * 3


def test_qwen2():
    cfg = like_llama("qwen2")
    assert cfg.attention == GQA(4, 2, use_bias=True, use_out_bias=False)
    off = {"sliding_window": 8, "max_window_layers": 4}
    assert windows_of(like_llama("qwen2", **off)) == [None] * 6
    on = off | {"use_sliding_window": True}
    assert windows_of(like_llama("qwen2", **on)) == [None] * 4 + [8] * 2
    types = ["sliding_attention", "full_attention"] * 3
    assert windows_of(like_llama("qwen2", layer_types=types, **on)) == [8, None] * 3
    with pytest.raises(ConfigError, match=r"layer_types=.* is not one of"):
        like_llama("qwen2", layer_types=types[:5])
    with pytest.raises(ConfigError, match=r"layer_types=.* is not one of"):
        like_llama("qwen2", layer_types=["linear_attention"] * 6)


def test_qwen3_heads_have_a_width_of_their_own():
    cfg = like_llama("qwen3", rms_norm_eps=1e-5)
    assert cfg.attention == GQA(4, 2, 128, use_bias=False, qk_norm=RMSNorm(eps=1e-5))


def test_smollm3_leaves_the_rope_out():
    plain = {"num_hidden_layers": 9}
    ropes = [isinstance(layer.position, RoPE) for layer in like_llama("smollm3", **plain).layers]
    assert ropes == [True, True, True, False] * 2 + [True]
    cfg = like_llama("smollm3", no_rope_layers=[0, 1, 1, 1, 1, 0])
    assert [isinstance(layer.position, NoPosition) for layer in cfg.layers] == [True] + [
        False
    ] * 4 + [True]
    with pytest.raises(ConfigError, match=r"no_rope_layers=.* is not a 0 or 1 for each of 6"):
        like_llama("smollm3", no_rope_layers=[0, 1])


def test_gemma():
    cfg = like_llama("gemma", hidden_act="gelu", hidden_activation=None, head_dim=32)
    assert (cfg.embed, cfg.head) == (Embed(scale=True), Tied())
    assert cfg.norm == cfg.final_norm == RMSNorm(eps=1e-6, one_plus=True)
    assert cfg.ffn == GatedMLP(12, activation="gelu_tanh")
    for key in ("hidden_act", "hidden_activation"):
        with pytest.raises(ConfigError, match=f"{key}='silu' is not known"):
            like_llama("gemma", **{key: "silu"})
    with pytest.raises(ConfigError, match="use_bidirectional_attention=True is not supported"):
        like_llama("gemma", use_bidirectional_attention=True)


def test_gemma2_caps():
    cfg = like_llama("gemma2", query_pre_attn_scalar=144, head_dim=32)
    assert (cfg.attention.scale, cfg.attention.softcap) == (1 / 12, 50.0)
    assert cfg.head == Tied(softcap=30.0)
    none = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    cfg = like_llama("gemma2", head_dim=32, **none)
    assert (cfg.attention.softcap, cfg.head) == (None, Tied())


def test_gemma3_has_two_ropes():
    cfg = like_llama(
        "gemma3_text",
        num_hidden_layers=7,
        sliding_window=16,
        rope_theta=1e6,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert windows_of(cfg) == [16] * 5 + [None] + [16]
    ropes = [layer.position for layer in cfg.layers]
    assert [rope.theta for rope in ropes] == [2e4] * 5 + [1e6] + [2e4]
    assert [rope.scaling is not None for rope in ropes] == [False] * 5 + [True] + [False]
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping=50\.0 is not supported"):
        like_llama("gemma3_text", attn_logit_softcapping=50.0)  # Transformers ignores it


def test_olmo2_gpt_neox_phi_and_stablelm():
    assert like_llama("olmo2").attention.qk_norm_of == "all"
    plain = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rope_theta")}
    neox = {"model_type": "gpt_neox", "rotary_pct": 1, "hidden_act": "gelu"}
    cfg = read_config(plain | neox)
    assert (cfg.block, cfg.position, cfg.ffn) == (Parallel(), RoPE(), MLP(12, "gelu"))
    assert read_config(plain | neox | {"use_parallel_residual": False}).block == PreNorm()
    cfg = like_llama("phi", qk_layernorm=True, hidden_size=16)
    assert (cfg.block, cfg.head) == (Parallel(one_norm=True), Untied(use_bias=True))
    assert cfg.attention == GQA(4, 2, qk_norm=LayerNorm())
    cfg = like_llama("stablelm", qk_layernorm=True, use_parallel_residual=True, hidden_size=32)
    assert (cfg.block, cfg.attention.qk_norm) == (
        Parallel(one_norm=True),
        LayerNorm(use_bias=False),
    )
    assert (cfg.attention.use_bias, cfg.attention.use_out_bias) == (False, False)


def test_opt():
    config = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rope_theta")}
    config |= {"model_type": "opt", "ffn_dim": 12}
    del config["intermediate_size"]
    cfg = read_config(config)
    assert (cfg.position, cfg.final_norm, cfg.embed) == (Learned(offset=2), LayerNorm(), Embed())
    narrow = {"do_layer_norm_before": False, "word_embed_proj_dim": 4}
    cfg = read_config(config | narrow)
    assert (cfg.block, cfg.final_norm, cfg.embed) == (PostNorm(), NoNorm(), Embed(width=4))
    assert read_config(config | {"_remove_final_layer_norm": True}).final_norm == NoNorm()
    with pytest.raises(ConfigError, match="tie_word_embeddings=False is not supported"):
        read_config(config | narrow | {"tie_word_embeddings": False})


DEEPSEEK = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"} | {
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "n_group": 4,
    "topk_group": 2,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 2,
    "rms_norm_eps": 1e-5,
}


def test_deepseek_v2():
    cfg = read_config(DEEPSEEK | {"model_type": "deepseek_v2"})
    assert cfg.norm == RMSNorm(eps=1e-5)
    assert cfg.attention == MLA(
        4, 8, None, 4, 2, 4
    )  # its norms have 1e-6, whatever the config says
    assert cfg.position == RoPE(layout="neighbours")
    assert [isinstance(layer.ffn, GatedMLP) for layer in cfg.layers] == [True] * 2 + [False] * 3
    moe = cfg.ffn
    assert (moe.n_groups, moe.expert.d_ff, moe.shared.d_ff) == (1, 6, 12)  # greedy knows no groups
    limited = DEEPSEEK | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"}
    moe = read_config(limited).ffn
    assert (moe.n_groups, moe.top_groups, moe.group_score, moe.normalize) == (4, 2, "max", False)
    with pytest.raises(ConfigError, match="norm_topk_prob=True is not supported"):
        read_config(limited | {"norm_topk_prob": True})


def test_deepseek_v3():
    cfg = read_config(DEEPSEEK | {"model_type": "deepseek_v3"})
    moe = cfg.ffn
    assert (moe.score, moe.group_score, moe.routed_scaling) == ("sigmoid", "top2", 2.5)
    assert moe.normalize and moe.balance_rate is not None
    assert (
        read_config(DEEPSEEK | {"model_type": "deepseek_v3", "rope_interleave": False}).position
        == RoPE()
    )


def test_gpt_oss():
    cfg = like_llama("gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=4)
    assert windows_of(cfg) == [4, None] * 3
    assert cfg.attention.sinks and cfg.attention.use_bias and cfg.ffn.router_bias
    assert cfg.ffn.expert == GatedMLP(12, "gelu_sigmoid", True, limit=7.0, up_offset=1.0)
    with pytest.raises(ConfigError, match=r"swiglu_alpha=1\.5 is not supported"):
        like_llama("gpt_oss", num_local_experts=4, num_experts_per_tok=2, swiglu_alpha=1.5)


def test_qwen3_moe_has_dense_layers():
    keys = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    dense = [isinstance(layer.ffn, GatedMLP) for layer in like_llama("qwen3_moe", **keys).layers]
    assert dense == [False] * 6
    some = keys | {"mlp_only_layers": [1], "decoder_sparse_step": 2}
    dense = [isinstance(layer.ffn, GatedMLP) for layer in like_llama("qwen3_moe", **some).layers]
    assert dense == [True, True, True, False, True, False]


# --- errors ---------------------------------------------------------------------------------------


def models(shared, model_type):
    """All configs of a family, in both dialects."""
    for path in sorted((shared / "parity").glob("**/config.json")):
        data = json.loads(path.read_text())
        if data["model_type"] == model_type:
            yield data


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_family_overlooks_a_key(shared, model_type):
    for data in models(shared, model_type):
        with pytest.raises(ConfigError, match="attention_chunk_size=64 is not understood"):
            read_config(data | {"attention_chunk_size": 64})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_odd_values_are_read_or_named(shared, model_type):
    for data in models(shared, model_type):
        odd = [None, -1, 0, 1.5, True, "x", [], [{}] * data.get("num_hidden_layers", 1), {}]
        inside = [key for key, value in data.items() if isinstance(value, dict)]
        cases = [data | {key: value} for key in data for value in odd]
        cases += [{k: v for k, v in data.items() if k != key} for key in data]
        for key in inside:
            cases += [data | {key: data[key] | {k: v}} for k in data[key] for v in odd]
        for case in cases:
            try:
                read_config(case)
            except ConfigError as error:
                assert "\n" not in str(error)


def test_unknown_words_are_named():
    with pytest.raises(ConfigError, match=r"hidden_act='mish' is not known .* one of"):
        like_llama("llama", hidden_act="mish")
    with pytest.raises(ConfigError, match=r"model_type='lama' is not known .* one of .*'llama'"):
        like_llama("lama")
    with pytest.raises(ConfigError, match="model_type=None is not known"):
        read_config({})
    with pytest.raises(ConfigError, match="hidden_size is missing"):
        read_config({k: v for k, v in LLAMA.items() if k != "hidden_size"})


def test_what_a_box_refuses_names_the_file():
    with pytest.raises(ConfigError, match=r"n_heads=4 is not divisible .*\(some/config\.json\)"):
        read_config(LLAMA | {"num_key_value_heads": 3}, "some/config.json")
