# SPDX-License-Identifier: Apache-2.0
"""Models with experts beside GQA: Mixtral, Qwen3-MoE and gpt-oss."""

from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.boxes.moe import MoE
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
from jaxgpt.interop.reading import Config
from jaxgpt.interop.ropes import read_rope
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


FAMILIES = {
    "mixtral": Family(mixtral, (*ENDS, *PRE_NORMS, *ATTENTION, *MIXTRAL_ROWS)),
    "qwen3_moe": Family(qwen3_moe, (*ENDS, *PRE_NORMS, *ATTENTION, *MLP, *EXPERTS)),
    "gpt_oss": Family(gpt_oss, (*ENDS, *PRE_NORMS, *ATTENTION, *GPT_OSS_ROWS)),
}
