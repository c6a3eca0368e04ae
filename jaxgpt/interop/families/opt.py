# SPDX-License-Identifier: Apache-2.0
"""OPT: learned positions with an offset of 2, and in one model a narrower embedding."""

from typing import Any

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import PostNorm, PreNorm
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import MLP
from jaxgpt.boxes.norm import LayerNorm, NoNorm
from jaxgpt.boxes.position import Learned
from jaxgpt.interop.families.base import (
    ACTIVATIONS,
    BLOCK,
    Family,
    head,
    linear,
    norm,
    sizes,
)
from jaxgpt.interop.families.writing import WORDS, box_of, write_head, write_sizes
from jaxgpt.interop.reading import Config
from jaxgpt.interop.rows import Row
from jaxgpt.model import ModelConfig

LAYER = "model.decoder.layers.{i}"
OPT_ROWS = (
    Row("model.decoder.embed_tokens.weight", "embed/embedding"),
    Row("model.decoder.embed_positions.weight", "position/embedding"),
    *linear("model.decoder.project_in", "embed/project_in"),
    *linear("model.decoder.project_out", "embed/project_out"),
    *norm(f"{LAYER}.self_attn_layer_norm", f"{BLOCK}/attention_norm"),
    *linear(f"{LAYER}.self_attn.q_proj", f"{BLOCK}/attention/q"),
    *linear(f"{LAYER}.self_attn.k_proj", f"{BLOCK}/attention/k"),
    *linear(f"{LAYER}.self_attn.v_proj", f"{BLOCK}/attention/v"),
    *linear(f"{LAYER}.self_attn.out_proj", f"{BLOCK}/attention/out"),
    *norm(f"{LAYER}.final_layer_norm", f"{BLOCK}/ffn_norm"),
    *linear(f"{LAYER}.fc1", f"{BLOCK}/ffn/up"),
    *linear(f"{LAYER}.fc2", f"{BLOCK}/ffn/down"),
    *norm("model.decoder.final_layer_norm", "final_norm"),
    *linear("lm_head", "head/out"),
)


def opt(c: Config) -> ModelConfig:
    """Zhang et al. 2022, https://arxiv.org/abs/2205.01068: OPT-350M alone is post-norm."""
    c.only("layer_norm_elementwise_affine", True)
    before = c.flag("do_layer_norm_before", default=True)
    bare = c.flag("_remove_final_layer_norm", default=False) or not before
    bias = c.flag("enable_bias", default=True)
    d_model = c.count("hidden_size")
    width = c.count("word_embed_proj_dim", default=d_model, null=d_model)
    if width != d_model:
        c.only("tie_word_embeddings", True)
    return ModelConfig(
        **sizes(c),
        embed=Embed(width=None if width == d_model else width),
        position=Learned(offset=2),
        block=PreNorm() if before else PostNorm(),
        norm=LayerNorm(eps=1e-5),
        final_norm=NoNorm() if bare else LayerNorm(eps=1e-5),
        attention=GQA(n_heads=c.count("num_attention_heads"), use_bias=bias),
        ffn=MLP(
            d_ff=c.count("ffn_dim"),
            activation=c.choice(ACTIVATIONS, "activation_function", default="relu"),
            use_bias=bias,
        ),
        head=head(c, tied=True),
    )


def write_opt(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `opt`."""
    ffn = box_of(cfg, "ffn", MLP)
    before = not isinstance(cfg.block, PostNorm)
    return {
        **write_sizes(cfg),
        "num_attention_heads": box_of(cfg, "attention", GQA).n_heads,
        "ffn_dim": ffn.width(cfg.dims()),
        "activation_function": WORDS[ffn.activation],
        "enable_bias": ffn.use_bias,
        "do_layer_norm_before": before,
        "_remove_final_layer_norm": before and isinstance(cfg.final_norm, NoNorm),
        "word_embed_proj_dim": getattr(cfg.embed, "width", None) or cfg.d_model,
        **write_head(cfg),
    }


FAMILIES = {"opt": Family(opt, OPT_ROWS, write_opt, "OPTForCausalLM", skips={})}
