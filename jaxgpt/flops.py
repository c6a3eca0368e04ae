# SPDX-License-Identifier: Apache-2.0
"""Counting a model: parameters by box and FLOPs of training, without computing any.

Of the true vocabulary: its padding is left out.
"""

import dataclasses
import functools
from collections import Counter

import jax

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.moe import MoE
from jaxgpt.layers import Layer, LayerEdit
from jaxgpt.model import ModelConfig, param_shapes

ORDER = (
    "embed",
    "position",
    "attention_norm",
    "attention",
    "attention_out_norm",
    "ffn_norm",
    "ffn",
    "ffn_out_norm",
)


def count_params(cfg: ModelConfig) -> dict[str, int]:
    """Parameters by box (`embed`, `attention`, `ffn`, ...), summed over layers; padding left out.

    The sum of the values is the model's exact size. Works for models of any size; equal layers are
    looked at once.

    Raises:
      ConfigError: `vocab_size` is None.
    """
    counts: Counter[str] = Counter()
    for _, path, n in _leaves(cfg):
        counts[path[0]] += n
    return dict(sorted(counts.items(), key=lambda item: (*ORDER, item[0]).index(item[0])))


def count_active_params(cfg: ModelConfig) -> int:
    """Parameters that take part in one token: of each layer's experts, the `top_k` chosen ones.

    All else counts in full, the embedding table and the router too. The size of a dense model.
    """
    return sum(_active(layer, path, n) for layer, path, n in _leaves(cfg))


def _active(layer: Layer, path: tuple[str, ...], n: int) -> int:
    """Of a leaf's n parameters those that take part in one token."""
    if isinstance(layer.ffn, MoE) and path[:2] == ("ffn", "experts"):
        return n // layer.ffn.n_experts * layer.ffn.top_k
    return n


def train_flops_per_token(cfg: ModelConfig, *, causal: bool) -> float:
    """Model FLOPs of one trained token, forward and backward, at the full context length T.

        6 * (active parameters that tokens are multiplied with)
        + sum over layers of 6 * n_heads * (width of keys + width of values) * keys

    The first are the kernels, of the chosen experts alone, and the table of a tied head; not what
    is looked up, added or scaled by. `keys` is how many of them a query is multiplied with. By the
    full convention that is T, or the window where it is smaller: 12 L N H T with plain heads. By
    the causal one it is how many a query sees, on average: (T + 1) / 2, or w (T - (w - 1) / 2) / T
    in a window w. No recomputation counts, and nothing of norms, softmax and optimizer; attention
    of other classes than ours counts with its kernels alone.

    Args:
      cfg: The model.
      causal: Which of the two conventions.

    Source: full: Chowdhery et al. 2022 (PaLM), appendix B, https://arxiv.org/abs/2204.02311; the
      causal half: Dao 2023 (FlashAttention-2), section 4.1, https://arxiv.org/abs/2307.08691
    """
    leaves, (T, flops) = _leaves(cfg), (cfg.context_length, 0.0)
    own_head = any(path[0] == "head" and path[-1] == "kernel" for _, path, _ in leaves)
    for layer, path, n in leaves:
        tied = path == ("embed", "embedding") and not own_head
        if path[-1] == "kernel" or tied:
            flops += 6 * _active(layer, path, n)
    for layer in cfg.layers:
        heads = 0
        if isinstance(layer.attention, GQA):
            heads = layer.attention.n_heads * 2 * layer.attention.width(cfg.dims(layer))
        elif isinstance(layer.attention, MLA):
            box = layer.attention
            heads = box.n_heads * (box.nope_dim + box.rope_dim + box.v_dim)
        w = min(getattr(layer.attention, "window", None) or T, T)
        flops += 6 * heads * (w * (T - (w - 1) / 2) / T if causal else w)
    return flops


def unpadded(cfg: ModelConfig) -> ModelConfig:
    """The same model without padding of the vocabulary."""
    return dataclasses.replace(cfg, vocab_multiple=1)


@functools.lru_cache(maxsize=8)  # both counts of a model look at it once
def _leaves(cfg: ModelConfig) -> tuple[tuple[Layer, tuple[str, ...], int], ...]:
    """(layer, path, size) of each parameter: in a layer, of all layers equal to it together."""
    found = []
    for kind, (layer, times) in enumerate(Counter(cfg.layers).items()):
        boxes = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
        one = dataclasses.replace(unpadded(cfg), n_layers=1, edits=(LayerEdit(**boxes),))
        for key, leaf in jax.tree.leaves_with_path(param_shapes(one)):
            name, *rest = (part.key for part in key)
            if name == "block_0":
                found.append((layer, tuple(rest), leaf.size * times))
            elif kind == 0:  # what stands around the layers
                found.append((layer, (name, *rest), leaf.size))
    return tuple(found)
