# SPDX-License-Identifier: Apache-2.0
"""Llama and the dense models that differ from it in a knob or two."""

from jaxgpt.boxes.block import OutputNorm
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.position import NoPosition
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
from jaxgpt.interop.reading import Config
from jaxgpt.interop.ropes import read_rope
from jaxgpt.layers import LayerEdit
from jaxgpt.model import ModelConfig

OUTPUT_NORMS = (
    *norm(f"{LAYER}.post_attention_layernorm", f"{BLOCK}/attention_out_norm"),
    *norm(f"{LAYER}.post_feedforward_layernorm", f"{BLOCK}/ffn_out_norm"),
)


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


FAMILIES = {
    "llama": Family(llama, DECODER),
    "mistral": Family(mistral, DECODER),
    "qwen2": Family(qwen2, DECODER),
    "qwen3": Family(qwen3, DECODER),
    "smollm3": Family(smollm3, DECODER),
    "olmo2": Family(olmo2, (*ENDS, *OUTPUT_NORMS, *ATTENTION, *MLP)),
}
