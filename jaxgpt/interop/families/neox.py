# SPDX-License-Identifier: Apache-2.0
"""GPT-NeoX (Pythia), Phi and StableLM: layer norms, and a rope on a part of each head."""

from typing import Any

from jaxgpt.boxes import ffn
from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import BlockBox
from jaxgpt.boxes.block import Parallel, PreNorm
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.norm import LayerNorm
from jaxgpt.boxes.rope import RoPE
from jaxgpt.interop.families.base import (
    BLOCK,
    INV_FREQ,
    LAYER,
    MASK,
    MLP,
    PRE_NORMS,
    QKV,
    Family,
    activation,
    attention,
    gated,
    head,
    layer_norms,
    linear,
    norm,
    sizes,
)
from jaxgpt.interop.families.writing import (
    GPT_WORDS,
    box_of,
    write_attention_bias,
    write_ffn,
    write_gated,
    write_head,
    write_heads,
    write_layer_norms,
    write_sizes,
)
from jaxgpt.interop.reading import Config
from jaxgpt.interop.ropes import read_rope, write_rope
from jaxgpt.interop.rows import Row
from jaxgpt.model import ModelConfig


def head_dim(cfg: ModelConfig) -> int:
    """Width of a head."""
    assert isinstance(cfg.attention, GQA)
    return cfg.attention.width(cfg.dims())


NEOX = "gpt_neox.layers.{i}"
NEOX_ROWS = (
    Row("gpt_neox.embed_in.weight", "embed/embedding"),
    *norm(f"{NEOX}.input_layernorm", f"{BLOCK}/attention_norm"),
    *norm(f"{NEOX}.post_attention_layernorm", f"{BLOCK}/ffn_norm"),
    # Head by head: the rows of its q, of its k, of its v.
    *linear(f"{NEOX}.attention.query_key_value", f"{BLOCK}/attention/{{q,k,v}}", run=head_dim),
    *linear(f"{NEOX}.attention.dense", f"{BLOCK}/attention/out"),
    *linear(f"{NEOX}.mlp.dense_h_to_4h", f"{BLOCK}/ffn/up"),
    *linear(f"{NEOX}.mlp.dense_4h_to_h", f"{BLOCK}/ffn/down"),
    *norm("gpt_neox.final_layer_norm", "final_norm"),
    *linear("embed_out", "head/out"),
)
NEOX_SKIPS = {
    f"{NEOX}.attention.bias": MASK,
    f"{NEOX}.attention.masked_bias": MASK,
    f"{NEOX}.attention.rotary_emb.inv_freq": INV_FREQ,
}
PHI_ROWS = (
    Row("model.embed_tokens.weight", "embed/embedding"),
    *norm(f"{LAYER}.input_layernorm", f"{BLOCK}/attention_norm"),
    *QKV,
    *linear(f"{LAYER}.self_attn.dense", f"{BLOCK}/attention/out"),
    *norm(f"{LAYER}.self_attn.q_layernorm", f"{BLOCK}/attention/q_norm"),
    *norm(f"{LAYER}.self_attn.k_layernorm", f"{BLOCK}/attention/k_norm"),
    *linear(f"{LAYER}.mlp.fc1", f"{BLOCK}/ffn/up"),
    *linear(f"{LAYER}.mlp.fc2", f"{BLOCK}/ffn/down"),
    *norm("model.final_layernorm", "final_norm"),
    *linear("lm_head", "head/out"),
)
STABLELM_ROWS = (
    Row("model.embed_tokens.weight", "embed/embedding"),
    *PRE_NORMS,
    *QKV,
    *linear(f"{LAYER}.self_attn.o_proj", f"{BLOCK}/attention/out"),
    # A norm for each head, without bias.
    Row(f"{LAYER}.self_attn.q_layernorm.norms.{{h}}.weight", f"{BLOCK}/attention/q_norm/scale"),
    Row(f"{LAYER}.self_attn.k_layernorm.norms.{{h}}.weight", f"{BLOCK}/attention/k_norm/scale"),
    *MLP,
    *norm("model.norm", "final_norm"),
    *linear("lm_head", "head/out"),
)


def _block(c: Config, *, parallel: bool, one_norm: bool) -> BlockBox:
    """Parallel or one after the other; `parallel` is for configs that do not say."""
    if c.flag("use_parallel_residual", default=parallel):
        return Parallel(one_norm=one_norm)
    return PreNorm()


def gpt_neox(c: Config) -> ModelConfig:
    """Black et al. 2022; Biderman et al. 2023 (Pythia): each branch has its norm."""
    return ModelConfig(
        **sizes(c),
        **layer_norms(c),
        block=_block(c, parallel=True, one_norm=False),
        position=read_rope(
            c, theta_names=("rotary_emb_base",), fraction=0.25, fraction_names=("rotary_pct",)
        ),
        attention=GQA(
            n_heads=c.count("num_attention_heads"), use_bias=c.flag("attention_bias", default=True)
        ),
        ffn=ffn.MLP(d_ff=c.count("intermediate_size"), activation=activation(c, "gelu")),
        head=head(c, tied=False),
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    """What the three have in common; their heads have no width of their own."""
    keys = {
        **write_sizes(cfg),
        **write_layer_norms(cfg),
        **write_rope(box_of(cfg, "position", RoPE), partial=True),
        **write_heads(cfg),
        **write_head(cfg),
    }
    keys.pop("head_dim", None)
    return keys


def write_gpt_neox(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `gpt_neox`."""
    keys = _write(cfg)
    del keys["num_key_value_heads"]
    return {
        **keys,
        **write_attention_bias(cfg),
        **write_ffn(cfg, box_of(cfg, "ffn", ffn.MLP)),
        "rotary_pct": keys["partial_rotary_factor"],
        "rotary_emb_base": keys["rope_theta"],
        "use_parallel_residual": isinstance(cfg.block, Parallel),
    }


def phi(c: Config) -> ModelConfig:
    """Gunasekar et al. 2023; Li et al. 2023: one norm feeds both branches, all has a bias."""
    c.only("tie_word_embeddings", False)
    norms = layer_norms(c)
    qk_norm = norms["norm"] if c.flag("qk_layernorm", default=False) else None
    return ModelConfig(
        **sizes(c),
        **norms,
        block=Parallel(one_norm=True),
        position=read_rope(c, fraction=0.5),
        attention=attention(c, use_bias=True, qk_norm=qk_norm),
        ffn=ffn.MLP(d_ff=c.count("intermediate_size"), activation=activation(c, "gelu_new")),
        head=Untied(use_bias=True),
    )


def write_phi(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `phi`."""
    mlp = box_of(cfg, "ffn", ffn.MLP)
    return {
        **_write(cfg),
        **write_ffn(cfg, mlp),
        "hidden_act": GPT_WORDS[mlp.activation],
        "qk_layernorm": box_of(cfg, "attention", GQA).qk_norm is not None,
    }


def stablelm(c: Config) -> ModelConfig:
    """Bellagente et al. 2024, https://arxiv.org/abs/2402.17834."""
    norms = layer_norms(c)
    each = LayerNorm(eps=norms["norm"].eps, use_bias=False)
    return ModelConfig(
        **sizes(c),
        **norms,
        block=_block(c, parallel=False, one_norm=True),
        position=read_rope(c, fraction=0.25),
        attention=attention(
            c,
            use_bias=c.flag("use_qkv_bias", default=False),
            use_out_bias=False,
            qk_norm=each if c.flag("qk_layernorm", default=False) else None,
            qk_norm_of="each_head",
        ),
        ffn=gated(c),
        head=head(c, tied=False),
    )


def write_stablelm(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `stablelm`."""
    attention = box_of(cfg, "attention", GQA)
    return {
        **_write(cfg),
        **write_gated(cfg),
        "use_qkv_bias": attention.use_bias,
        "qk_layernorm": attention.qk_norm is not None,
        "use_parallel_residual": isinstance(cfg.block, Parallel),
    }


FAMILIES = {
    "gpt_neox": Family(
        gpt_neox,
        NEOX_ROWS,
        write_gpt_neox,
        "GPTNeoXForCausalLM",
        prefix="gpt_neox.",
        skips=NEOX_SKIPS,
    ),
    "phi": Family(phi, PHI_ROWS, write_phi, "PhiForCausalLM"),
    "stablelm": Family(stablelm, STABLELM_ROWS, write_stablelm, "StableLmForCausalLM"),
}
