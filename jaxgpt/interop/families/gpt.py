# SPDX-License-Identifier: Apache-2.0
"""GPT and GPT-2, whose files hold [in, out] matrices with q, k and v side by side."""

from typing import Any

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import PostNorm
from jaxgpt.boxes.ffn import MLP
from jaxgpt.boxes.norm import LayerNorm, NoNorm
from jaxgpt.errors import ConfigError
from jaxgpt.interop.families.base import ACTIVATIONS, BLOCK, MASK, Family, head, linear, norm
from jaxgpt.interop.families.writing import (
    GPT_WORDS,
    box_of,
    boxes,
    write_head,
    write_layer_norms,
)
from jaxgpt.interop.reading import Config
from jaxgpt.interop.rows import Row
from jaxgpt.layers import LayerEdit
from jaxgpt.model import ModelConfig

H = "transformer.h.{i}"


def conv(tensor: str, param: str) -> tuple[Row, ...]:
    """A matrix that is stored [in, out], and its bias."""
    return Row(f"{tensor}.weight", f"{param}/kernel"), Row(f"{tensor}.bias", f"{param}/bias")


BLOCKS = (
    *norm(f"{H}.ln_1", f"{BLOCK}/attention_norm"),
    *conv(f"{H}.attn.c_attn", f"{BLOCK}/attention/{{q,k,v}}"),
    *conv(f"{H}.attn.c_proj", f"{BLOCK}/attention/out"),
    *norm(f"{H}.ln_2", f"{BLOCK}/ffn_norm"),
    *conv(f"{H}.mlp.c_fc", f"{BLOCK}/ffn/up"),
    *conv(f"{H}.mlp.c_proj", f"{BLOCK}/ffn/down"),
)
GPT2_ROWS = (
    Row("transformer.wte.weight", "embed/embedding"),
    Row("transformer.wpe.weight", "position/embedding"),
    *BLOCKS,
    *norm("transformer.ln_f", "final_norm"),
    *linear("lm_head", "head/out"),
)
GPT_ROWS = (
    Row("transformer.tokens_embed.weight", "embed/embedding"),
    Row("transformer.positions_embed.weight", "position/embedding"),
    *BLOCKS,
    *linear("lm_head", "head/out"),
)
MASKS = {f"{H}.attn.bias": MASK, f"{H}.attn.masked_bias": MASK}

GPT_ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
"""In GPT's files, "gelu" is the tanh approximation."""


def _model(c: Config, **boxes) -> ModelConfig:
    length = c.count("n_positions")
    c.only("n_ctx", length)
    return ModelConfig(
        vocab_size=c.count("vocab_size"),
        context_length=length,
        d_model=c.count("n_embd"),
        n_layers=c.count("n_layer"),
        attention=GQA(n_heads=c.count("n_head"), scale=_scale(c)),
        head=head(c, tied=True),
        **boxes,
    )


def _scale(c: Config) -> float | None:
    return None if c.flag("scale_attn_weights", default=True) else 1.0


def gpt2(c: Config) -> ModelConfig:
    """Radford et al. 2019."""
    norm_box = LayerNorm(eps=c.number("layer_norm_epsilon", default=1e-5))
    ffn = MLP(
        d_ff=c.count("n_inner", default=None),
        activation=c.choice(ACTIVATIONS, "activation_function", default="gelu_new"),
    )
    edits: tuple[LayerEdit, ...] = ()
    if c.flag("scale_attn_by_inverse_layer_idx", default=False):
        scale = _scale(c) or (c.count("n_embd") // c.count("n_head", least=1)) ** -0.5
        edits = tuple(
            LayerEdit(start=i, stop=i + 1, set={"attention.scale": scale / (i + 1)})
            for i in range(1, c.count("n_layer"))
        )
    return _model(c, norm=norm_box, final_norm=norm_box, ffn=ffn, edits=edits)


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": cfg.vocab_size,
        "n_positions": cfg.context_length,
        "n_embd": cfg.d_model,
        "n_layer": cfg.n_layers,
        "n_head": box_of(cfg, "attention", GQA).n_heads,
        **write_layer_norms(cfg, "layer_norm_epsilon"),
        **write_head(cfg),
    }


def write_gpt2(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `gpt2`."""
    ffn, heads = box_of(cfg, "ffn", MLP), [b for b in boxes(cfg, "attention") if type(b) is GQA]
    scales = [box.scale or box.width(cfg.dims()) ** -0.5 for box in heads] or [1.0]
    falling = [scales[0] / (i + 1) for i in range(len(scales))]
    return {
        **_write(cfg),
        "n_inner": ffn.d_ff,
        "activation_function": GPT_WORDS[ffn.activation],
        "scale_attn_weights": scales[0] != 1.0,
        "scale_attn_by_inverse_layer_idx": len(scales) > 1 and scales == falling,
    }


def openai_gpt(c: Config) -> ModelConfig:
    """Radford et al. 2018."""
    return _model(
        c,
        block=PostNorm(),
        norm=LayerNorm(eps=c.number("layer_norm_epsilon", default=1e-5)),
        final_norm=NoNorm(),
        ffn=MLP(activation=c.choice(GPT_ACTIVATIONS, "afn", default="gelu")),
    )


def write_openai_gpt(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `openai_gpt`, which has a head of its own alone as a scale."""
    words = {ours: theirs for theirs, ours in GPT_ACTIVATIONS.items() if theirs != "swish"}
    activation = box_of(cfg, "ffn", MLP).activation
    if activation not in words:
        raise ConfigError(f"ffn.activation={activation} is none of {list(words)}")
    return {**_write(cfg), "afn": words[activation]}


FAMILIES = {
    "gpt2": Family(
        gpt2, GPT2_ROWS, write_gpt2, "GPT2LMHeadModel", prefix="transformer.", skips=MASKS
    ),
    "openai-gpt": Family(
        openai_gpt,
        GPT_ROWS,
        write_openai_gpt,
        "OpenAIGPTLMHeadModel",
        prefix="transformer.",
        skips=MASKS,
    ),
}
