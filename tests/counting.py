# SPDX-License-Identifier: Apache-2.0
"""How many parameters a model has, box by box, in closed form: nothing here asks the modules."""

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import OutputNorm, Parallel, PostNorm, PreNorm, Sandwich
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.norm import LayerNorm, NoNorm, RMSNorm
from jaxgpt.boxes.position import Learned


def n_params(cfg):
    """Of the model; the vocabulary counts with its padding."""
    d, vocab = cfg.d_model, -(-cfg.vocab_size // cfg.vocab_multiple) * cfg.vocab_multiple
    width, untied = cfg.embed.width or d, isinstance(cfg.head, Untied)
    total = vocab * width + norm(cfg.final_norm, d)
    if width != d:
        total += width * d * (1 if untied else 2)
    if isinstance(cfg.position, Learned):
        total += (cfg.context_length + cfg.position.offset) * d
    if untied:
        total += vocab * (d + cfg.head.use_bias)
    for layer in cfg.layers:
        total += n_norms(layer.block) * norm(layer.norm, d)
        total += attention(layer.attention, d) + ffn(layer.ffn, d)
    return total


def n_norms(block):
    match block:
        case PreNorm() | PostNorm() | OutputNorm():
            return 2
        case Sandwich():
            return 4
        case Parallel(one_norm=one_norm):
            return 1 if one_norm else 2
    raise NotImplementedError(f"{block} has no formula")


def norm(box, width):
    match box:
        case LayerNorm(use_bias=bias):
            return width * (1 + bias)
        case RMSNorm():
            return width
        case NoNorm() | None:
            return 0
    raise NotImplementedError(f"{box} has no formula")


def attention(box, d):
    match box:
        case GQA(n_heads=n):
            k, h = box.n_kv_heads or n, box.head_dim or d // n
            out_bias = box.use_bias if box.use_out_bias is None else box.use_out_bias
            projections = (n + 2 * k) * h * (d + box.use_bias) + d * (n * h + out_bias)
            norms = {
                "head": 2 * norm(box.qk_norm, h),
                "each_head": (n + k) * norm(box.qk_norm, h),
                "all": norm(box.qk_norm, (n + k) * h),
            }
            return projections + norms[box.qk_norm_of] + n * box.sinks
        case MLA(n_heads=n, kv_rank=r, q_rank=q, use_bias=bias):
            queries = n * (box.nope_dim + box.rope_dim)
            total = d * queries if q is None else q * (d + bias + queries) + norm(box.norm, q)
            total += (r + box.rope_dim) * (d + bias) + norm(box.norm, r)
            return total + r * n * (box.nope_dim + box.v_dim) + d * (n * box.v_dim + bias)
    raise NotImplementedError(f"{box} has no formula")


def ffn(box, d):
    match box:
        case MLP(use_bias=bias):
            f = box.d_ff or 4 * d
            return 2 * d * f + bias * (f + d)
        case GatedMLP(use_bias=bias):
            f = box.d_ff or 32 * -(-8 * d // 96)
            return 3 * d * f + bias * (2 * f + d)
        case MoE(n_experts=e):
            shared = 0 if box.shared is None else ffn(box.shared, d)
            balance = 0 if box.balance_rate is None else e
            return e * (d + box.router_bias + ffn(box.expert, d)) + balance + shared
    raise NotImplementedError(f"{box} has no formula")
