# SPDX-License-Identifier: Apache-2.0
"""What a pass over a model costs, box by box: FLOPs of its products, and bytes that must move.

The bytes are the least there can be: each product reads its inputs and writes its output once, all
else is fused into the products (norms, activations, softmax, positions), and no score of attention
leaves the chip. Attention of other classes than ours counts with its kernels alone.

Source: 6 N D and 2 N: Kaplan et al. 2020, section 2.1, https://arxiv.org/abs/2001.08361; FLOPs
  against bytes: Williams et al. 2009, Roofline, https://doi.org/10.1145/1498765.1498785; the cache:
  Shazeer 2019, https://arxiv.org/abs/1911.02150, Ainslie et al. 2023,
  https://arxiv.org/abs/2305.13245, DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.mla import MLA
from jaxgpt.flops import (
    Leaf,
    Rule,
    count_active_params,
    has_own_head,
    keys_per_query,
    leaves,
    pair_width,
)
from jaxgpt.layers import Layer
from jaxgpt.model import ModelConfig

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.5}
"""Of one number; the scales of int8 and int4 weights are left out."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of a box in one pass.

    Attributes:
      flops: Multiplications and additions of products.
      weight_bytes: Parameters read, and when training their gradients and moments too.
      cache_bytes: Keys and values, or latents, read from and written to caches.
      other_bytes: Inputs and outputs of products.
    """

    flops: float = 0.0
    weight_bytes: float = 0.0
    cache_bytes: float = 0.0
    other_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """All that moves."""
        return self.weight_bytes + self.cache_bytes + self.other_bytes

    @property
    def intensity(self) -> float:
        """FLOPs for each byte. Below a machine's own ratio of the two its memory is the limit."""
        return self.flops / self.bytes if self.bytes else 0.0

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """The least time on a machine with these rates: the slower of its two limits."""
        return max(self.flops / flops_per_s, self.bytes / bytes_per_s)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(_fields(self), _fields(other), strict=True)))


def total(costs: Mapping[str, Cost]) -> Cost:
    """Of all boxes together."""
    return sum(costs.values(), Cost())


def train_costs(
    cfg: ModelConfig,
    batch: int,
    tokens: int | None = None,
    *,
    dtype: str = "float32",
    causal: bool = False,
    moments: int = 2,
) -> dict[str, Cost]:
    """One optimizer step on `batch` rows of T tokens, by box.

        FLOPs: batch * T * train_flops_per_token, that is 6 N D beside attention
        bytes of a parameter: 2 passes in the compute dtype; the float32 gradient written and read;
          the float32 parameter and moments read and written: `optimizer`
        bytes of a product: 3 (inputs + outputs), once forward and twice backward

    Args:
      cfg: The model.
      batch: Rows.
      tokens: T; None: the full context length.
      dtype: Of compute.
      causal: Count the keys that queries see instead of all T; see `train_flops_per_token`.
      moments: Float32 numbers that the optimizer keeps for each parameter: AdamW's 2.
    """
    forward = _pass(cfg, batch, tokens or cfg.context_length, dtype, dtype, causal=causal)
    costs = {
        box: Cost(3 * one.flops, 2 * one.weight_bytes, 0.0, 3 * one.other_bytes)
        for box, one in forward.items()
    }
    n = sum(leaf.size for leaf in leaves(cfg))
    return costs | {"optimizer": Cost(weight_bytes=BYTES["float32"] * n * (4 + 2 * moments))}


def prefill_costs(
    cfg: ModelConfig,
    batch: int,
    tokens: int,
    *,
    dtype: str = "float32",
    weights: str | float | None = None,
    causal: bool = True,
) -> dict[str, Cost]:
    """A prompt of `tokens` in each of `batch` rows, into empty caches, logits of the last token.

    About 2 N FLOPs a token without the head, and all weights read once.

    Args:
      cfg: The model.
      batch: Rows.
      tokens: Of each row.
      dtype: Of compute and caches.
      weights: In which the weights are kept, a name of `BYTES`, or bytes a number; None: `dtype`.
      causal: Count the keys that queries see instead of all.
    """
    costs = _pass(cfg, batch, tokens, dtype, weights or dtype, causal=causal, last_only=True)
    return _with_cache(cfg, costs, batch * tokens * kv_bytes_per_token(cfg, dtype))


def decode_costs(
    cfg: ModelConfig,
    batch: int,
    keys: int,
    *,
    dtype: str = "float32",
    weights: str | float | None = None,
) -> dict[str, Cost]:
    """One new token for each of `batch` rows that have `keys` tokens with it, by box.

        FLOPs: 2 N a row, and attention: 2 keys * n_heads * (width of keys + width of values)
        bytes: the weights once, whatever the batch; of experts those that some row chose, on
          average over even choices; each row's cache, min(keys, window) tokens of a layer

    Args:
      cfg: The model.
      batch: Rows.
      keys: Tokens of a row, the new one included.
      dtype: Of compute and caches.
      weights: In which the weights are kept, a name of `BYTES`, or bytes a number; None: `dtype`.
    """
    costs = _pass(cfg, batch, 1, dtype, weights or dtype, keys=keys, last_only=True)
    written = kv_bytes_per_token(cfg, dtype)
    read = sum(
        min(keys, _window(layer) or keys) * cache_numbers(cfg, layer) for layer in cfg.layers
    )
    return _with_cache(cfg, costs, batch * (written + BYTES[dtype] * read))


def kv_bytes_per_token(cfg: ModelConfig, dtype: str = "bfloat16") -> float:
    """Bytes that a token leaves in the caches of all layers."""
    return BYTES[dtype] * sum(cache_numbers(cfg, layer) for layer in cfg.layers)


def cost_rules(
    cfg: ModelConfig, batch: int, tokens: int, *, dtype: str = "bfloat16"
) -> tuple[Rule, ...]:
    """The usual formulas for FLOPs and for the cache, N the parameters that one token uses.

        6 N D      FLOPs of training on D = batch * tokens tokens
        2 N T      FLOPs of prefill, T tokens a row
        2 N        FLOPs of decoding a token of a row that has T with it
        2 L d c    bytes of a token's cache, each query head with keys and values of its own

    What is counted has the keys that queries see (`causal`), and logits of the last token alone
    but in training. Attention that keeps no keys has no rule for its cache.

    Args:
      cfg: The model.
      batch: Rows.
      tokens: Of each row.
      dtype: Of the caches; c is its bytes.
    """
    n, each = count_active_params(cfg), batch * tokens
    counted = (
        train_costs(cfg, batch, tokens, causal=True),
        prefill_costs(cfg, batch, tokens),
        decode_costs(cfg, batch, tokens),
    )
    train, prefill, decode = (total(costs).flops for costs in counted)
    rules = [
        Rule("6 N D", "FLOPs of a training step", 6.0 * n * each, train),
        Rule("2 N T", "FLOPs of prefill", 2.0 * n * each, prefill),
        Rule("2 N", "FLOPs of decoding a token", 2.0 * n * batch, decode),
    ]
    if cache := kv_bytes_per_token(cfg, dtype):
        keys = 2 * cfg.n_layers * cfg.d_model * BYTES[dtype]
        rules.append(Rule("2 L d c", "bytes of a token's cache", keys, cache))
    return tuple(rules)


def cache_numbers(cfg: ModelConfig, layer: Layer) -> int:
    """Numbers that a token leaves in a layer's cache.

    2 K H: multi-head attention has K = N, grouped-query K = N / G, multi-query K = 1. MLA: R + P,
    whatever the number of heads. 0 for attention of other classes.
    """
    box = layer.attention
    if isinstance(box, GQA):
        return 2 * box.kv_heads * box.width(cfg.dims(layer))
    return box.kv_rank + box.rope_dim if isinstance(box, MLA) else 0


def _pass(
    cfg: ModelConfig,
    batch: int,
    tokens: int,
    dtype: str,
    weights: str | float,
    *,
    keys: int | None = None,
    causal: bool = False,
    last_only: bool = False,
) -> dict[str, Cost]:
    """One forward pass; `keys` of a row where they are in a cache, else those of the tokens."""
    costs: dict[str, Cost] = defaultdict(Cost)
    weight_bytes = BYTES[weights] if isinstance(weights, str) else weights
    own_head, rows = has_own_head(cfg), batch * tokens
    for leaf in leaves(cfg):
        box, n_in = leaf.path[0], rows
        if leaf.is_table:
            costs["embed"] += Cost(weight_bytes=weight_bytes * rows * leaf.shape[1])
            if own_head:
                continue
        if box == "head" or leaf.is_table or leaf.path[:2] == ("embed", "project_out"):
            box, n_in = "head", batch if last_only else rows
        if leaf.path[-2:] == ("kv_up", "kernel") and not _absorbs(leaf.layer, tokens, keys):
            n_in = batch * (keys or tokens)
        multiplied = leaf.path[-1] == "kernel" or leaf.is_table
        costs[box] += Cost(
            2.0 * n_in * leaf.active if multiplied else 0.0,
            weight_bytes * _read(leaf, rows, multiplied),
            0.0,
            BYTES[dtype] * n_in * _ends(leaf) if multiplied else 0.0,
        )
    for layer in cfg.layers:
        mine = keys and min(keys, _window(layer) or keys)
        seen = mine or keys_per_query(layer, tokens, causal=causal)
        width = pair_width(cfg, layer)
        if isinstance(box := layer.attention, MLA) and _absorbs(layer, tokens, keys):
            width = box.n_heads * 2 * (box.kv_rank + box.rope_dim)
        fresh = 0 if keys else cache_numbers(cfg, layer)  # of a cache: counted with it
        heads = width + fresh  # queries and outputs are as wide as one pair of all heads
        costs["scores"] += Cost(2.0 * rows * seen * width, 0.0, 0.0, BYTES[dtype] * rows * heads)
    return dict(costs)


def _with_cache(cfg: ModelConfig, costs: dict[str, Cost], cache_bytes: float) -> dict[str, Cost]:
    return costs | {"scores": costs["scores"] + Cost(cache_bytes=cache_bytes)}


def _window(layer: Layer) -> int | None:
    return getattr(layer.attention, "window", None)


def _absorbs(layer: Layer, tokens: int, keys: int | None) -> bool:
    """Whether MLA takes its absorbed form: only over a cache, and where that is less work."""
    box = layer.attention
    return isinstance(box, MLA) and keys is not None and box.absorbs(tokens, keys)


def _ends(leaf: Leaf) -> int:
    """Inputs and outputs of a kernel for one token, in all layers that have it."""
    some, _ = leaf.chosen
    return (leaf.shape[-2] + leaf.shape[-1]) * some * leaf.times


def _read(leaf: Leaf, rows: int, multiplied: bool) -> float:
    """Of a leaf's numbers those that a pass over `rows` tokens reads."""
    if not multiplied and len(leaf.shape) > 1:  # looked up: a row for each token
        return float(min(leaf.size, rows * leaf.shape[-1] * leaf.times))
    some, parts = leaf.chosen
    return leaf.size * (1 - (1 - some / parts) ** rows)


def _fields(cost: Cost) -> tuple[float, ...]:
    return cost.flops, cost.weight_bytes, cost.cache_bytes, cost.other_bytes
