# SPDX-License-Identifier: Apache-2.0
"""Gemma 1 to 3: a scaled embedding, norms times 1 + weight, and from 2 on norms on the outputs."""

from typing import Any

from jaxgpt.boxes.block import Sandwich
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import GatedMLP
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
    head,
    layer_types,
    norm,
    rms_norms,
    sizes,
    windows,
)
from jaxgpt.interop.reading import Config
from jaxgpt.interop.ropes import read_rope, rope_of
from jaxgpt.model import ModelConfig

SANDWICH_NORMS = (
    *norm(f"{LAYER}.input_layernorm", f"{BLOCK}/attention_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", f"{BLOCK}/attention_out_norm"),
    *norm(f"{LAYER}.pre_feedforward_layernorm", f"{BLOCK}/ffn_norm"),
    *norm(f"{LAYER}.post_feedforward_layernorm", f"{BLOCK}/ffn_out_norm"),
)
SANDWICH_ROWS = (*ENDS, *SANDWICH_NORMS, *ATTENTION, *MLP)

TANH = {word: "gelu_tanh" for word in ("gelu", "gelu_new", "gelu_pytorch_tanh")}
"""A plain "gelu" is an old value of the official files, which means the tanh approximation."""


def _common(c: Config) -> dict[str, Any]:
    """What the three have in common."""
    c.only("use_bidirectional_attention", False, None)
    activations = {
        c.choice(TANH, key, default="gelu", null="gelu")
        for key in ("hidden_act", "hidden_activation")
    }
    return {
        **sizes(c),
        **rms_norms(c, one_plus=True),
        "embed": Embed(scale=True),
        "ffn": GatedMLP(d_ff=c.count("intermediate_size"), activation=activations.pop()),
    }


def _attention(c: Config, **knobs: Any) -> Any:
    return attention(c, head_dim=256, use_bias=c.flag("attention_bias", default=False), **knobs)


def gemma(c: Config) -> ModelConfig:
    """Gemma Team 2024, https://arxiv.org/abs/2403.08295."""
    return ModelConfig(
        **_common(c), position=read_rope(c), attention=_attention(c), head=head(c, tied=True)
    )


def gemma2(c: Config) -> ModelConfig:
    """Gemma Team 2024, https://arxiv.org/abs/2408.00118: every second layer has no window."""
    sliding = layer_types(c, (i % 2 == 0 for i in range(c.count("num_hidden_layers"))))
    window, edits = windows(sliding, _window(c))
    return ModelConfig(
        **_common(c),
        block=Sandwich(),
        position=read_rope(c),
        attention=_attention(c, window=window, **_scores(c, 50.0)),
        head=_capped_head(c, 30.0),
        edits=edits,
    )


def gemma3(c: Config) -> ModelConfig:
    """Gemma Team 2025, https://arxiv.org/abs/2503.19786: another rope in the global layers."""
    n_layers = c.count("num_hidden_layers")
    every = c.count("sliding_window_pattern", "_sliding_window_pattern", default=6, least=1)
    sliding = layer_types(c, ((i + 1) % every != 0 for i in range(n_layers)))
    window = _window(c)
    local_rope, global_rope = _ropes(c)
    full = [i for i in range(n_layers) if not sliding[i]]
    change: dict[str, Any] = {"position": global_rope, "set": {"attention.window": None}}
    qk_norm = rms_norms(c, one_plus=True)["norm"]
    return ModelConfig(
        **_common(c),
        block=Sandwich(),
        position=local_rope,
        attention=_attention(c, window=window, qk_norm=qk_norm, **_scores(c, None)),
        head=_capped_head(c, None),
        edits=edits_at(full, n_layers, **change),
    )


def _window(c: Config) -> int | None:
    return c.count("sliding_window", "sliding_window_size", default=4096, null=None) or None


def _ropes(c: Config) -> tuple[RoPE, RoPE]:
    """Of local and of global layers."""
    length = c.count("max_position_embeddings")
    both = c.section("rope_parameters")
    if both is None:
        local = RoPE(theta=c.number("rope_local_base_freq", default=10_000.0))
        return local, read_rope(c, theta=1_000_000.0)
    ropes = []
    for kind, theta in (("sliding_attention", 10_000.0), ("full_attention", 1_000_000.0)):
        entry = both.section(kind)
        rope = RoPE(theta=theta)
        ropes.append(rope if entry is None else rope_of(entry, length, theta=theta))
    both.close()
    return ropes[0], ropes[1]


def _scores(c: Config, softcap: float | None) -> dict[str, Any]:
    """Knobs of the attention box; the soft cap is for configs that do not say."""
    scalar = c.number("query_pre_attn_scalar", default=256)
    if scalar <= 0:
        raise c.error("query_pre_attn_scalar", "is not positive")
    return {
        "scale": scalar**-0.5,
        "softcap": c.number("attn_logit_softcapping", default=softcap, null=None),
    }


def _capped_head(c: Config, softcap: float | None) -> Any:
    softcap = c.number("final_logit_softcapping", default=softcap, null=None)
    return head(c, tied=True, softcap=softcap)


FAMILIES = {
    "gemma": Family(gemma, DECODER),
    "gemma2": Family(gemma2, SANDWICH_ROWS),
    "gemma3_text": Family(gemma3, SANDWICH_ROWS),
}
