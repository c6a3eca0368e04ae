# SPDX-License-Identifier: Apache-2.0
"""Small models of all families for tests of export, with parameters that show every feature."""

import dataclasses

import numpy as np

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.moe import MoE
from jaxgpt.interop import read_config
from jaxgpt.interop.rows import flat_shapes, nested, true_shapes
from jaxgpt.presets import MODELS

OWN = ("transformer-2017", "wikitext2-char")
HUB = [name for name in MODELS if name not in OWN and not name.startswith("gpt3")]
"""Presets that a family can say: those of a checkpoint, and `modern`."""

IDS = [[(i * 37 + 5) % 96 for i in range(48)]]

COMMON = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
GPT = {"vocab_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
LATENT |= {"qk_nope_head_dim": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXED = ["full_attention", "sliding_attention", "full_attention"]


def rope(kind, **keys):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5e4, **keys}}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.5)
VARIANTS = {
    "gpt2-scales": GPT
    | {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True, "n_inner": 80}
    | {"activation_function": "relu2", "layer_norm_epsilon": 1e-3},
    "gpt2-unscaled": GPT | {"model_type": "gpt2", "scale_attn_weights": False},
    "gpt2-untied": GPT | {"model_type": "gpt2", "tie_word_embeddings": False},
    "gpt-relu": GPT | {"model_type": "openai-gpt", "afn": "relu"},
    "llama-wide": COMMON | {"model_type": "llama", "head_dim": 24, "hidden_act": "gelu"} | YARN,
    "llama-dynamic": COMMON | {"model_type": "llama"} | rope("dynamic", factor=2.0),
    "mistral": COMMON | {"model_type": "mistral", "head_dim": 24, "sliding_window": 9},
    "mixtral-window": COMMON
    | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 3}
    | {"sliding_window": 9, "tie_word_embeddings": True}
    | rope("dynamic", factor=2.0),
    "qwen2-windows": COMMON
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9}
    | {"layer_types": MIXED, "head_dim": 24},
    "qwen3-bias": COMMON
    | {"model_type": "qwen3", "attention_bias": True, "use_sliding_window": True}
    | {"sliding_window": 9, "max_window_layers": 1, "head_dim": 24},
    "qwen3-moe": COMMON
    | {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3}
    | {"moe_intermediate_size": 24, "decoder_sparse_step": 2, "head_dim": 24}
    | {"hidden_act": "gelu_pytorch_tanh"},
    "smollm3": COMMON
    | {"model_type": "smollm3", "no_rope_layers": [0, 1, 0], "attention_bias": True}
    | {"mlp_bias": True, "tie_word_embeddings": False, "use_sliding_window": True}
    | {"sliding_window": 9, "layer_types": MIXED},
    "olmo2": COMMON | {"model_type": "olmo2", "attention_bias": True, "rms_norm_eps": 1e-3},
    "gpt-oss": COMMON
    | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 24}
    | {"attention_bias": False, "layer_types": MIXED, "sliding_window": 9}
    | rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    | {"swiglu_limit": 7.0},
    "deepseek-v2-groups": COMMON
    | LATENT
    | {"model_type": "deepseek_v2", "q_lora_rank": None, "n_routed_experts": 6, "n_group": 3}
    | {"topk_group": 2, "topk_method": "group_limited_greedy", "n_shared_experts": 3}
    | {"first_k_dense_replace": 2, "attention_bias": True, "routed_scaling_factor": 3.0},
    "deepseek-v3-halves": COMMON
    | LATENT
    | {"model_type": "deepseek_v3", "q_lora_rank": 24, "n_routed_experts": 6, "n_group": 1}
    | {"topk_group": 1, "n_shared_experts": 2, "first_k_dense_replace": 0}
    | {"rope_interleave": False, "norm_topk_prob": False, "hidden_act": "gelu"}
    | rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.9),
    "deepseek-v3-dense": COMMON
    | LATENT
    | {"model_type": "deepseek_v3", "q_lora_rank": 24, "n_routed_experts": 6, "n_group": 1}
    | {"topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 3, "hidden_act": "relu"},
    "gemma-bias": COMMON | {"model_type": "gemma", "head_dim": 24, "attention_bias": True},
    "gemma2": COMMON
    | {"model_type": "gemma2", "head_dim": 24, "query_pre_attn_scalar": 7}
    | {"attn_logit_softcapping": None, "final_logit_softcapping": 5.0, "sliding_window": 9},
    "gemma3": COMMON
    | {"model_type": "gemma3_text", "head_dim": 24, "query_pre_attn_scalar": 31}
    | {"layer_types": MIXED, "sliding_window": 9, "rope_theta": 5e5, "rope_local_base_freq": 5e3}
    | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma3-full": COMMON
    | {"model_type": "gemma3_text", "head_dim": 24, "query_pre_attn_scalar": 24}
    | {"layer_types": ["full_attention"] * 3},
    "neox-sequential": COMMON
    | {"model_type": "gpt_neox", "use_parallel_residual": False, "attention_bias": False}
    | {"rotary_pct": 1.0, "rotary_emb_base": 500, "hidden_act": "gelu_fast"}
    | {"rope_scaling": {"type": "linear", "factor": 2.0}, "tie_word_embeddings": True},
    "phi": COMMON | {"model_type": "phi", "qk_layernorm": True, "partial_rotary_factor": 0.25},
    "stablelm": COMMON
    | {"model_type": "stablelm", "use_qkv_bias": True, "qk_layernorm": True}
    | {"use_parallel_residual": True, "partial_rotary_factor": 0.5},
    "opt": COMMON
    | {"model_type": "opt", "ffn_dim": 80, "enable_bias": False, "activation_function": "gelu"}
    | {"_remove_final_layer_norm": True, "word_embed_proj_dim": 24},
}
for _name in ("neox-sequential", "opt"):
    del VARIANTS[_name]["num_key_value_heads"]
for _name in ("opt",):
    del VARIANTS[_name]["intermediate_size"]


def variant(name):
    return read_config(VARIANTS[name])


def shrunk(name):
    """A preset with all of its boxes, and few of everything that there can be few of."""
    cfg = MODELS[name]()
    edits = tuple(
        dataclasses.replace(edit, ffn=edit.ffn and _small(edit.ffn)) for edit in cfg.edits
    )
    return dataclasses.replace(
        cfg,
        vocab_size=96,
        context_length=128,
        d_model=64,
        n_layers=7 if edits else 2,
        attention=_small(cfg.attention),
        ffn=_small(cfg.ffn),
        edits=edits,
    )


def _small(box):
    match box:
        case GQA():
            few = 4 if box.kv_heads == box.n_heads else 2
            width = None if box.head_dim is None else 24
            window = None if box.window is None else 9
            changed = {"n_kv_heads": few, "head_dim": width, "window": window}
            scale = None if box.scale is None else 16**-0.5
            return dataclasses.replace(box, n_heads=4, scale=scale, **changed)
        case MLA():
            rank = None if box.q_rank is None else 24
            widths = {"nope_dim": 16, "rope_dim": 8, "v_dim": 12}
            return dataclasses.replace(box, n_heads=4, kv_rank=16, q_rank=rank, **widths)
        case MLP() | GatedMLP():
            return dataclasses.replace(box, d_ff=None if box.d_ff is None else 96)
        case MoE():
            expert = dataclasses.replace(box.expert, d_ff=32)
            shared = box.shared and dataclasses.replace(box.shared, d_ff=64)
            groups = {"n_groups": 4, "top_groups": 2} if box.n_groups > 1 else {}
            few = {"n_experts": 8, "top_k": 2, "expert": expert, "shared": shared}
            return dataclasses.replace(box, **few, **groups)


def grown(cfg, seed=0):
    """Parameters drawn so widely that every feature shows in the logits; padding is zero."""
    rng, flat = np.random.default_rng(seed), {}
    for (path, shape), true in zip(
        flat_shapes(cfg).items(), true_shapes(cfg).values(), strict=True
    ):
        x, name = rng.normal(size=true).astype(np.float32), path.rpartition("/")[2]
        if name == "kernel":
            x = x * np.float32(1.5 * true[-2] ** -0.5)
        else:
            x = np.float32(0.5 if name == "embedding" else 0.2) * x + np.float32(name == "scale")
        flat[path] = np.pad(x, [(0, n - m) for n, m in zip(shape, true, strict=True)])
    return nested(flat)
