# SPDX-License-Identifier: Apache-2.0
"""Gemma 1 to 3: a scaled embedding, norms times 1 + weight, and from 2 on norms on the outputs."""

from typing import Any

from jaxgpt.boxes.attention import GQA
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
from jaxgpt.interop.families.writing import (
    box_of,
    require_divisible,
    write_attention_bias,
    write_ffn,
    write_head,
    write_heads,
    write_layer_types,
    write_rms_norms,
    write_sizes,
)
from jaxgpt.interop.reading import Config
from jaxgpt.interop.ropes import read_rope, rope_of, write_rope
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


def _write(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `_common` and `gemma`."""
    return {
        **write_sizes(cfg),
        **write_rms_norms(cfg),
        **write_rope(box_of(cfg, "position", RoPE)),
        **write_heads(cfg, width=True),
        **write_attention_bias(cfg),
        **write_ffn(cfg, box_of(cfg, "ffn", GatedMLP)),
        **write_head(cfg),
        **dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh"),
    }


def _write_scores(cfg: ModelConfig) -> dict[str, Any]:
    """What `_scores` and `_capped_head` read; Transformers wants a whole number for the scale."""
    box, cap = box_of(cfg, "attention", GQA), getattr(cfg.head, "softcap", None)
    width = box.width(cfg.dims()) or 1
    return {
        **write_layer_types(cfg),
        "query_pre_attn_scalar": round(box.scale**-2) if box.scale else width,
        "attn_logit_softcapping": None if box.softcap is None else float(box.softcap),
        "final_logit_softcapping": None if cap is None else float(cap),
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


def write_gemma2(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `gemma2`."""
    require_divisible(cfg)
    return {**_write(cfg), **_write_scores(cfg)}


def gemma3(c: Config) -> ModelConfig:
    """Gemma Team 2025, https://arxiv.org/abs/2503.19786: another rope in the global layers."""
    c.only("attn_logit_softcapping", None)  # Transformers ignores it
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


def write_gemma3(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `gemma3`: the rope of layers with a window, and that of the others."""
    require_divisible(cfg)
    ropes = {True: RoPE(1_000_000.0), False: RoPE()}
    for layer in reversed(cfg.layers):
        if isinstance(layer.position, RoPE):
            ropes[getattr(layer.attention, "window", None) is None] = layer.position
    both = {"full_attention": ropes[True], "sliding_attention": ropes[False]}
    return {
        **_write(cfg),
        **_write_scores(cfg),
        **write_rope(ropes[True]),
        "rope_parameters": {
            kind: write_rope(rope)["rope_parameters"] for kind, rope in both.items()
        },
        "rope_local_base_freq": float(ropes[False].theta),
    }


def _window(c: Config) -> int | None:
    return c.count("sliding_window", "sliding_window_size", default=4096, null=None) or None


def _ropes(c: Config) -> tuple[RoPE, RoPE]:
    """Of local and of global layers."""
    length = c.count("max_position_embeddings")
    c.only("partial_rotary_factor", 1, None)
    local = RoPE(theta=c.number("rope_local_base_freq", default=10_000.0))
    wide = RoPE(theta=c.number("rope_theta", default=1_000_000.0))
    older, both = c.section("rope_scaling"), c.section("rope_parameters")
    if older is not None:
        wide = rope_of(older, length, theta=wide.theta)
    if both is None:
        return local, wide
    ropes = []
    for kind, rope in (("sliding_attention", local), ("full_attention", wide)):
        entry = both.section(kind)
        ropes.append(rope if entry is None else rope_of(entry, length, theta=rope.theta))
    both.close()
    for key, rope in zip(("rope_local_base_freq", "rope_theta"), ropes, strict=True):
        if c.number(key, default=None) not in (None, rope.theta):
            raise c.error(key, f"contradicts {rope.theta} in rope_parameters")
    if older is not None and ropes[1] != wide:
        raise c.error("rope_scaling", "contradicts rope_parameters", fix="one of the two")
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
    "gemma": Family(gemma, DECODER, _write, "GemmaForCausalLM"),
    "gemma2": Family(gemma2, SANDWICH_ROWS, write_gemma2, "Gemma2ForCausalLM"),
    "gemma3_text": Family(gemma3, SANDWICH_ROWS, write_gemma3, "Gemma3ForCausalLM"),
}
