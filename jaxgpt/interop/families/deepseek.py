# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 and V3: latent attention and experts behind the first few layers."""

from typing import Any

from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.rope import RoPE
from jaxgpt.errors import ConfigError
from jaxgpt.interop.families.base import (
    BLOCK,
    ENDS,
    LAYER,
    MLP,
    PRE_NORMS,
    Family,
    edits_at,
    gated,
    gated_mlp,
    head,
    linear,
    norm,
    rms_norms,
    sizes,
)
from jaxgpt.interop.families.moe import EXPERTS, expert_of, write_mixed
from jaxgpt.interop.families.writing import (
    box_of,
    boxes,
    require_divisible,
    write_head,
    write_rms_norms,
    write_sizes,
)
from jaxgpt.interop.reading import Config
from jaxgpt.interop.ropes import DEEPSEEK, read_rope, write_rope
from jaxgpt.interop.rows import Row
from jaxgpt.model import ModelConfig

ROWS = (
    *ENDS,
    *PRE_NORMS,
    *linear(f"{LAYER}.self_attn.q_proj", f"{BLOCK}/attention/q"),
    *linear(f"{LAYER}.self_attn.q_a_proj", f"{BLOCK}/attention/q_down"),
    *norm(f"{LAYER}.self_attn.q_a_layernorm", f"{BLOCK}/attention/q_norm"),
    *linear(f"{LAYER}.self_attn.q_b_proj", f"{BLOCK}/attention/q_up"),
    *linear(f"{LAYER}.self_attn.kv_a_proj_with_mqa", f"{BLOCK}/attention/kv_down"),
    *norm(f"{LAYER}.self_attn.kv_a_layernorm", f"{BLOCK}/attention/kv_norm"),
    *linear(f"{LAYER}.self_attn.kv_b_proj", f"{BLOCK}/attention/kv_up"),
    *linear(f"{LAYER}.self_attn.o_proj", f"{BLOCK}/attention/out"),
    *MLP,
    *EXPERTS,
    Row(f"{LAYER}.mlp.gate.e_score_correction_bias", f"{BLOCK}/ffn/balance_bias"),
    *gated_mlp(f"{LAYER}.mlp.shared_experts", f"{BLOCK}/ffn/shared"),
)


def _model(c: Config, *, interleaved: bool, first_dense: int, **routing: Any) -> ModelConfig:
    n_layers, n_heads = c.count("num_hidden_layers"), c.count("num_attention_heads")
    nope, rope = c.count("qk_nope_head_dim"), c.count("qk_rope_head_dim")
    c.only("num_key_value_heads", n_heads, None)
    c.only("head_dim", rope, None)
    c.only("qk_head_dim", nope + rope, None)
    c.only("mlp_bias", False)
    c.only("moe_layer_freq", 1)
    first = c.count("first_k_dense_replace", default=first_dense)
    shared = c.count("n_shared_experts", default=None)
    return ModelConfig(
        **sizes(c),
        **rms_norms(c),
        position=read_rope(c, scalings=DEEPSEEK, layout="neighbours" if interleaved else "halves"),
        attention=MLA(
            n_heads=n_heads,
            kv_rank=c.count("kv_lora_rank"),
            q_rank=c.count("q_lora_rank", default=1536, null=None),
            nope_dim=nope,
            rope_dim=rope,
            v_dim=c.count("v_head_dim"),
            use_bias=c.flag("attention_bias", default=False),
        ),
        ffn=MoE(
            n_experts=c.count("n_routed_experts", "num_local_experts"),
            top_k=c.count("num_experts_per_tok"),
            expert=gated(c, "moe_intermediate_size"),
            shared=gated(c, "moe_intermediate_size", times=shared) if shared else None,
            **routing,
        ),
        head=head(c, tied=False),
        edits=edits_at(range(min(first, n_layers)), n_layers, ffn=gated(c)),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    mla, moe = box_of(cfg, "attention", MLA), box_of(cfg, "ffn", MoE)
    mixed = [isinstance(box, MoE) for box in boxes(cfg, "ffn")]
    width = expert_of(cfg).width(cfg.dims())
    shared = moe.shared.width(cfg.dims()) // width if isinstance(moe.shared, GatedMLP) else 0
    if any(mixed) and not shared:
        raise ConfigError("its mixtures have no shared expert")
    return {
        **write_sizes(cfg),
        **write_rms_norms(cfg),
        **write_rope(box_of(cfg, "position", RoPE)),
        **write_head(cfg),
        **write_mixed(cfg),
        "num_attention_heads": mla.n_heads,
        "num_key_value_heads": mla.n_heads,
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim,
        "attention_bias": mla.use_bias,
        "n_routed_experts": moe.n_experts,
        "n_shared_experts": shared,
        "num_experts_per_tok": moe.top_k,
        "first_k_dense_replace": mixed.index(True) if any(mixed) else cfg.n_layers,
        "moe_layer_freq": 1,
        "n_group": moe.n_groups,
        "topk_group": moe.top_groups,
        "routed_scaling_factor": float(moe.routed_scaling),
        "norm_topk_prob": moe.normalize,
        "aux_loss_alpha": float(moe.balance_coef),
    }


def deepseek_v2(c: Config) -> ModelConfig:
    """DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434."""
    c.only("scoring_func", "softmax")
    c.only("norm_topk_prob", False, None)  # Transformers ignores true, DeepSeek's code does not
    groups = c.count("n_group", default=1, null=1), c.count("topk_group", default=1, null=1)
    limited = c.choice(
        {"greedy": False, "group_limited_greedy": True}, "topk_method", default="greedy"
    )
    n_groups, top_groups = groups if limited else (1, 1)
    return _model(
        c,
        interleaved=True,
        first_dense=0,
        score="softmax",
        normalize=False,
        routed_scaling=c.number("routed_scaling_factor", default=1.0),
        n_groups=n_groups,
        top_groups=top_groups,
        group_score="max",
    )


def write_deepseek_v2(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `deepseek_v2`."""
    require_divisible(cfg)
    keys = _write(cfg)
    limited = "group_limited_greedy" if keys["n_group"] > 1 else "greedy"
    return keys | {"norm_topk_prob": False, "scoring_func": "softmax", "topk_method": limited}


def deepseek_v3(c: Config) -> ModelConfig:
    """DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437; the rate is that of its section 4.2."""
    c.only("scoring_func", "sigmoid")
    c.only("topk_method", "noaux_tc")
    c.count("num_nextn_predict_layers", "num_mtp_layers", default=1)
    return _model(
        c,
        interleaved=c.flag("rope_interleave", default=True),
        first_dense=3,
        score="sigmoid",
        normalize=c.flag("norm_topk_prob", default=True),
        routed_scaling=c.number("routed_scaling_factor", default=2.5),
        n_groups=c.count("n_group", default=8),
        top_groups=c.count("topk_group", default=4),
        group_score="top2",
        balance_rate=0.001,
    )


def write_deepseek_v3(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `deepseek_v3`: no layers that predict further ahead."""
    return _write(cfg) | {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": box_of(cfg, "position", RoPE).layout == "neighbours",
        "num_nextn_predict_layers": 0,
    }


FAMILIES = {
    "deepseek_v2": Family(deepseek_v2, ROWS, write_deepseek_v2, "DeepseekV2ForCausalLM"),
    "deepseek_v3": Family(
        deepseek_v3,
        ROWS,
        write_deepseek_v3,
        "DeepseekV3ForCausalLM",
        extra_layers=("num_nextn_predict_layers", "model.layers.{i}."),
    ),
}
