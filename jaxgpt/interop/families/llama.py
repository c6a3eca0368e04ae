# SPDX-License-Identifier: Apache-2.0
"""Llama and the dense models that differ from it in a knob or two."""

from typing import Any

from jaxgpt.boxes.block import OutputNorm
from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.position import NoPosition
from jaxgpt.boxes.rope import RoPE
from jaxgpt.interop.families.base import (
    ATTENTION,
    BLOCK,
    DECODER,
    ENDS,
    LAYER,
    MLP,
    Family,
    attention,
    edits_at,
    gated,
    head,
    layer_types,
    norm,
    rms_norms,
    sizes,
    windows,
)
from jaxgpt.interop.families.writing import (
    box_of,
    boxes,
    require_divisible,
    write_attention_bias,
    write_gated,
    write_head,
    write_heads,
    write_rms_norms,
    write_sizes,
    write_switched_window,
    write_window,
)
from jaxgpt.interop.reading import Config
from jaxgpt.interop.ropes import read_rope, write_rope
from jaxgpt.layers import LayerEdit
from jaxgpt.model import ModelConfig

OUTPUT_NORMS = (
    *norm(f"{LAYER}.post_attention_layernorm", f"{BLOCK}/attention_out_norm"),
    *norm(f"{LAYER}.post_feedforward_layernorm", f"{BLOCK}/ffn_out_norm"),
)


def write_decoder(cfg: ModelConfig) -> dict[str, Any]:
    """What a config.json of all these models has."""
    return {
        **write_sizes(cfg),
        **write_rms_norms(cfg),
        **write_rope(box_of(cfg, "position", RoPE)),
        **write_heads(cfg),
        **write_gated(cfg),
        **write_head(cfg),
    }


def llama(c: Config) -> ModelConfig:
    """Touvron et al. 2023; Grattafiori et al. 2024."""
    c.only("rope_interleaved", False)
    return ModelConfig(
        **sizes(c),
        **rms_norms(c),
        position=read_rope(c),
        attention=attention(c, use_bias=c.flag("attention_bias", default=False)),
        ffn=gated(c, use_bias=c.flag("mlp_bias", default=False)),
        head=head(c, tied=False),
    )


def write_llama(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `llama`."""
    require_divisible(cfg)
    mlp_bias = {"mlp_bias": box_of(cfg, "ffn", GatedMLP).use_bias}
    return {**write_decoder(cfg), **write_attention_bias(cfg), **mlp_bias}


def mistral(c: Config) -> ModelConfig:
    """Jiang et al. 2023; a window of null or 0 is none."""
    window = c.count("sliding_window", default=4096, null=None) or None
    return ModelConfig(
        **sizes(c),
        **rms_norms(c),
        position=read_rope(c),
        attention=attention(c, use_bias=False, window=window),
        ffn=gated(c),
        head=head(c, tied=False),
    )


def write_mistral(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `mistral`."""
    return {**write_decoder(cfg), **write_window(cfg)}


def qwen_windows(c: Config) -> tuple[int | None, tuple[LayerEdit, ...]]:
    """Qwen's window, which is off in all public models: of the layers behind the first few."""
    used = c.flag("use_sliding_window", default=False)
    window = c.count("sliding_window", default=4096, null=None)
    first = c.count("max_window_layers", default=28)
    sliding = layer_types(c, (i >= first for i in range(c.count("num_hidden_layers"))))
    return windows(sliding, window if used else None)


def qwen2(c: Config) -> ModelConfig:
    """Yang et al. 2024: q, k and v have biases, with no flag for it."""
    window, edits = qwen_windows(c)
    return ModelConfig(
        **sizes(c),
        **rms_norms(c),
        position=read_rope(c),
        attention=attention(c, use_bias=True, use_out_bias=False, window=window),
        ffn=gated(c),
        head=head(c, tied=False),
        edits=edits,
    )


def write_qwen2(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `qwen2`."""
    return {**write_decoder(cfg), **write_switched_window(cfg)}


def qwen3(c: Config) -> ModelConfig:
    """Yang et al. 2025: each head of q and k is normalised."""
    window, edits = qwen_windows(c)
    return ModelConfig(
        **sizes(c),
        **rms_norms(c),
        position=read_rope(c),
        attention=attention(
            c,
            head_dim=128,
            use_bias=c.flag("attention_bias", default=False),
            window=window,
            qk_norm=rms_norms(c)["norm"],
        ),
        ffn=gated(c),
        head=head(c, tied=False),
        edits=edits,
    )


def write_qwen3(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `qwen3`."""
    return {
        **write_decoder(cfg),
        **write_heads(cfg, width=True),
        **write_switched_window(cfg),
        **write_attention_bias(cfg),
    }


def smollm3(c: Config) -> ModelConfig:
    """Bakouch et al. 2025: no rope in every fourth layer."""
    n_layers = c.count("num_hidden_layers")
    every = c.count("no_rope_layer_interval", default=4, least=1)
    ropes = c.items("no_rope_layers", default=None)
    if ropes is None:
        ropes = [int((i + 1) % every != 0) for i in range(n_layers)]
    if len(ropes) < n_layers or any(r not in (0, 1) for r in ropes):
        raise c.error("no_rope_layers", f"is not a 0 or 1 for each of {n_layers} layers")
    plain = [i for i in range(n_layers) if not ropes[i]]
    used = c.flag("use_sliding_window", default=False)
    window = c.count("sliding_window", default=None)
    c.ignore("max_window_layers")
    sliding = layer_types(c, (i in plain for i in range(n_layers)))
    window, edits = windows(sliding, window if used else None)
    return ModelConfig(
        **sizes(c),
        **rms_norms(c),
        position=read_rope(c, theta=2_000_000.0),
        attention=attention(c, use_bias=c.flag("attention_bias", default=False), window=window),
        ffn=gated(c, use_bias=c.flag("mlp_bias", default=False)),
        head=head(c, tied=True),
        edits=edits + edits_at(plain, n_layers, position=NoPosition()),
    )


def write_smollm3(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `smollm3`."""
    roped = [int(not isinstance(box, NoPosition)) for box in boxes(cfg, "position")]
    return {
        **write_decoder(cfg),
        **write_switched_window(cfg),
        **write_attention_bias(cfg),
        "mlp_bias": box_of(cfg, "ffn", GatedMLP).use_bias,
        "no_rope_layers": roped,
    }


def olmo2(c: Config) -> ModelConfig:
    """Team OLMo 2024: norms on the outputs, and of all heads of q and of k together."""
    eps = c.number("rms_norm_eps", default=1e-5)
    return ModelConfig(
        **sizes(c),
        **rms_norms(c, default=1e-5),
        block=OutputNorm(),
        position=read_rope(c),
        attention=attention(
            c,
            use_bias=c.flag("attention_bias", default=False),
            qk_norm=RMSNorm(eps=eps),
            qk_norm_of="all",
        ),
        ffn=gated(c),
        head=head(c, tied=False),
    )


def write_olmo2(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `olmo2`."""
    return {**write_decoder(cfg), **write_attention_bias(cfg)}


OLMO2_ROWS = (*ENDS, *OUTPUT_NORMS, *ATTENTION, *MLP)

FAMILIES = {
    "llama": Family(llama, DECODER, write_llama, "LlamaForCausalLM"),
    "mistral": Family(mistral, DECODER, write_mistral, "MistralForCausalLM"),
    "qwen2": Family(qwen2, DECODER, write_qwen2, "Qwen2ForCausalLM"),
    "qwen3": Family(qwen3, DECODER, write_qwen3, "Qwen3ForCausalLM"),
    "smollm3": Family(smollm3, DECODER, write_smollm3, "SmolLM3ForCausalLM"),
    "olmo2": Family(olmo2, OLMO2_ROWS, write_olmo2, "Olmo2ForCausalLM"),
}
