# SPDX-License-Identifier: Apache-2.0
"""Models with experts beside GQA: Mixtral, Qwen3-MoE and gpt-oss."""

from typing import Any

from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.rope import RoPE
from jaxgpt.interop.families.base import (
    ATTENTION,
    BLOCK,
    ENDS,
    LAYER,
    MLP,
    PRE_NORMS,
    Family,
    attention,
    edits_at,
    gated,
    gated_mlp,
    head,
    layer_types,
    linear,
    rms_norms,
    sizes,
    windows,
)
from jaxgpt.interop.families.writing import (
    WORDS,
    box_of,
    boxes,
    write_attention_bias,
    write_ffn,
    write_head,
    write_heads,
    write_layer_types,
    write_rms_norms,
    write_sizes,
    write_switched_window,
    write_window,
)
from jaxgpt.interop.reading import Config
from jaxgpt.interop.ropes import read_rope, write_rope
from jaxgpt.interop.rows import Row
from jaxgpt.model import ModelConfig

EXPERTS = (
    *linear(f"{LAYER}.mlp.gate", f"{BLOCK}/ffn/router"),
    *gated_mlp(f"{LAYER}.mlp.experts.{{e}}", f"{BLOCK}/ffn/experts"),
)
"""A tensor for each expert."""

MIXTRAL_ROWS = (
    *linear(f"{LAYER}.block_sparse_moe.gate", f"{BLOCK}/ffn/router"),
    *gated_mlp(f"{LAYER}.block_sparse_moe.experts.{{e}}", f"{BLOCK}/ffn/experts", "w1 w3 w2"),
)
GPT_OSS_ROWS = (
    Row(f"{LAYER}.self_attn.sinks", f"{BLOCK}/attention/sinks"),
    *linear(f"{LAYER}.mlp.router", f"{BLOCK}/ffn/router"),
    # All experts in one tensor, [in, out], with columns of gate and up in turn.
    Row(f"{LAYER}.mlp.experts.gate_up_proj", f"{BLOCK}/ffn/experts/{{gate,up}}/kernel", run=1),
    Row(f"{LAYER}.mlp.experts.gate_up_proj_bias", f"{BLOCK}/ffn/experts/{{gate,up}}/bias", run=1),
    Row(f"{LAYER}.mlp.experts.down_proj", f"{BLOCK}/ffn/experts/down/kernel"),
    Row(f"{LAYER}.mlp.experts.down_proj_bias", f"{BLOCK}/ffn/experts/down/bias"),
)


def mixtral(c: Config) -> ModelConfig:
    """Jiang et al. 2024, https://arxiv.org/abs/2401.04088."""
    window = c.count("sliding_window", default=None) or None
    return ModelConfig(
        **sizes(c),
        **rms_norms(c, default=1e-5),
        position=read_rope(c, theta=1_000_000.0),
        attention=attention(c, use_bias=False, window=window),
        ffn=MoE(
            n_experts=c.count("num_local_experts", "num_experts"),
            top_k=c.count("num_experts_per_tok"),
            expert=gated(c),
        ),
        head=head(c, tied=False),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {
        **write_sizes(cfg),
        **write_rms_norms(cfg),
        **write_rope(box_of(cfg, "position", RoPE)),
        **write_heads(cfg),
        **write_head(cfg),
        "num_local_experts": box_of(cfg, "ffn", MoE).n_experts,
        "num_experts_per_tok": box_of(cfg, "ffn", MoE).top_k,
    }


def expert_of(cfg: ModelConfig) -> GatedMLP:
    """That of the first mixture, or a default."""
    expert = box_of(cfg, "ffn", MoE).expert
    return expert if isinstance(expert, GatedMLP) else GatedMLP()


def write_mixed(cfg: ModelConfig) -> dict[str, Any]:
    """Widths of dense FFNs and of experts, with the activation of those that are there."""
    dense, expert = box_of(cfg, "ffn", GatedMLP), expert_of(cfg)
    keys = write_ffn(cfg, dense) | write_ffn(cfg, expert, "moe_intermediate_size")
    mixed = any(isinstance(box, MoE) for box in boxes(cfg, "ffn"))
    return keys | {"hidden_act": WORDS[(expert if mixed else dense).activation]}


def write_mixtral(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `mixtral`."""
    keys = {**_write(cfg), **write_window(cfg), **write_ffn(cfg, expert_of(cfg))}
    # Transformers does not find the width for a dynamic rope by itself.
    return keys | write_heads(cfg, width=keys["rope_scaling"] is not None)


def qwen3_moe(c: Config) -> ModelConfig:
    """Yang et al. 2025: a dense FFN in some layers, if any."""
    n_layers = c.count("num_hidden_layers")
    every = c.count("decoder_sparse_step", default=1, least=1)
    plain = c.items("mlp_only_layers", default=None) or []
    dense = [i for i in range(n_layers) if i in plain or (i + 1) % every]
    used = c.flag("use_sliding_window", default=False)
    window = c.count("sliding_window", default=4096, null=None)
    if not used:
        c.ignore("max_window_layers")
    return ModelConfig(
        **sizes(c),
        **rms_norms(c),
        position=read_rope(c),
        attention=attention(
            c,
            use_bias=c.flag("attention_bias", default=False),
            window=window if used else None,
            qk_norm=rms_norms(c)["norm"],
        ),
        ffn=MoE(
            n_experts=c.count("num_experts", "num_local_experts"),
            top_k=c.count("num_experts_per_tok"),
            expert=gated(c, "moe_intermediate_size"),
            normalize=c.flag("norm_topk_prob", default=False),
        ),
        head=head(c, tied=False),
        edits=edits_at(dense, n_layers, ffn=gated(c)),
    )


def write_qwen3_moe(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `qwen3_moe`."""
    dense = [i for i, box in enumerate(boxes(cfg, "ffn")) if not isinstance(box, MoE)]
    keys = {**_write(cfg), **write_switched_window(cfg), **write_attention_bias(cfg)}
    del keys["layer_types"], keys["max_window_layers"]
    return {
        **keys,
        **write_mixed(cfg),
        "num_experts": keys["num_local_experts"],
        "norm_topk_prob": box_of(cfg, "ffn", MoE).normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def gpt_oss(c: Config) -> ModelConfig:
    """OpenAI 2025, https://arxiv.org/abs/2508.10925."""
    c.only("hidden_act", "silu")  # in name only: the code has x * sigmoid(1.702 x)
    c.only("swiglu_alpha", 1.702)
    c.ignore("initial_context_length")  # the one of the rope
    top_k = c.count("num_experts_per_tok", "experts_per_token")
    sliding = layer_types(c, (i % 2 == 0 for i in range(c.count("num_hidden_layers"))))
    window, edits = windows(sliding, c.count("sliding_window", default=128, null=None))
    bias = c.flag("attention_bias", default=True)
    return ModelConfig(
        **sizes(c),
        **rms_norms(c, default=1e-5),
        position=read_rope(c, theta=150_000.0),
        attention=attention(c, head_dim=64, use_bias=bias, window=window, sinks=True),
        ffn=MoE(
            n_experts=c.count("num_local_experts", "num_experts"),
            top_k=top_k,
            expert=GatedMLP(
                d_ff=c.count("intermediate_size"),
                activation="gelu_sigmoid",
                use_bias=True,
                limit=c.number("swiglu_limit", default=7.0),
                up_offset=1.0,
            ),
            router_bias=True,
        ),
        head=head(c, tied=False),
        edits=edits,
    )


def write_gpt_oss(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `gpt_oss`."""
    expert = expert_of(cfg)
    return {
        **_write(cfg),
        **write_heads(cfg, width=True),
        **write_layer_types(cfg),
        **write_attention_bias(cfg),
        "intermediate_size": expert.width(cfg.dims()),
        "hidden_act": "silu",
        "swiglu_limit": float(expert.limit or 7.0),
    }


COMMON = (*ENDS, *PRE_NORMS, *ATTENTION)
QWEN3_ROWS = (*COMMON, *MLP, *EXPERTS)

FAMILIES = {
    "mixtral": Family(mixtral, (*COMMON, *MIXTRAL_ROWS), write_mixtral, "MixtralForCausalLM"),
    "qwen3_moe": Family(qwen3_moe, QWEN3_ROWS, write_qwen3_moe, "Qwen3MoeForCausalLM"),
    "gpt_oss": Family(gpt_oss, (*COMMON, *GPT_OSS_ROWS), write_gpt_oss, "GptOssForCausalLM"),
}
