# SPDX-License-Identifier: Apache-2.0
"""Counting a model: parameters by box and FLOPs of training, without computing any.

Of the true vocabulary: its padding is left out. What a pass moves and multiplies, box by box, is in
`costs.py`. A `Rule` puts what is said of such figures in general beside what is counted.
"""

import dataclasses
import functools
import math
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
    for leaf in leaves(cfg):
        counts[leaf.path[0]] += leaf.size
    return dict(sorted(counts.items(), key=lambda item: (*ORDER, item[0]).index(item[0])))


def count_active_params(cfg: ModelConfig) -> int:
    """Parameters that take part in one token: of each layer's experts, the `top_k` chosen ones.

    All else counts in full, the embedding table and the router too. The size of a dense model.
    """
    return sum(leaf.active for leaf in leaves(cfg))


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Layers whose boxes are equal.

    Attributes:
      layer: Their boxes.
      n_layers: How many there are.
      n_params: Parameters of one of them.
      n_active: Of these those that take part in one token.
    """

    layer: Layer
    n_layers: int
    n_params: int
    n_active: int


def count_layers(cfg: ModelConfig) -> tuple[LayerKind, ...]:
    """The kinds of layers of a model, in the order of their first one, and what one of each has.

    Raises:
      ConfigError: `vocab_size` is None.
    """
    found = []
    for layer, times in Counter(cfg.layers).items():
        mine = [leaf for leaf in leaves(cfg) if leaf.in_block and leaf.layer == layer]
        sizes = (sum(getattr(leaf, name) for leaf in mine) // times for name in ("size", "active"))
        found.append(LayerKind(layer, times, *sizes))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a rule of thumb says of a model, beside what is counted.

    Attributes:
      formula: As people write it: `12 L d^2`.
      of: What it is a rule for.
      value: What it says.
      exact: What is counted.
    """

    formula: str
    of: str
    value: float | int
    exact: float | int

    @property
    def percent(self) -> float:
        """How far the rule is off, in percent of what is counted; below 0 it says too little."""
        return 100 * (self.value / self.exact - 1)


def param_rules(cfg: ModelConfig) -> tuple[Rule, ...]:
    """The usual formulas for parameters: of the layers, of the vocabulary, of all.

        12 L d^2                 four matrices of attention, two of an FFN of 4 d
        L (12 d^2 + 2 d)         and two norms without bias
        V d                      an embedding that is the head, too
        V d + L (12 d^2 + 2 d) + d

    Source: Kaplan et al. 2020, table 1 (without the last one), https://arxiv.org/abs/2001.08361

    Raises:
      ConfigError: `vocab_size` is None.
    """
    counts = count_params(cfg)
    L, d, V = cfg.n_layers, cfg.d_model, cfg.vocab_size or 0
    layers = sum(kind.n_layers * kind.n_params for kind in count_layers(cfg))
    table = counts["embed"] + counts.get("head", 0)
    return (
        Rule("12 L d^2", "the layers", 12 * L * d * d, layers),
        Rule("L (12 d^2 + 2 d)", "the layers", L * (12 * d * d + 2 * d), layers),
        Rule("V d", "embedding and head", V * d, table),
        Rule(
            "V d + L (12 d^2 + 2 d) + d",
            "all parameters",
            V * d + L * (12 * d * d + 2 * d) + d,
            sum(counts.values()),
        ),
    )


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
    T, own_head = cfg.context_length, has_own_head(cfg)
    flops = 0.0
    for leaf in leaves(cfg):
        if leaf.path[-1] == "kernel" or (leaf.is_table and not own_head):
            flops += 6 * leaf.active
    for layer in cfg.layers:
        flops += 6 * pair_width(cfg, layer) * keys_per_query(layer, T, causal=causal)
    return flops


def pair_width(cfg: ModelConfig, layer: Layer) -> int:
    """Products of one query with one key and its value: n_heads * (width of both)."""
    box = layer.attention
    if isinstance(box, GQA):
        return box.n_heads * 2 * box.width(cfg.dims(layer))
    if isinstance(box, MLA):
        return box.n_heads * (box.nope_dim + box.rope_dim + box.v_dim)
    return 0


def keys_per_query(layer: Layer, tokens: int, *, causal: bool) -> float:
    """Keys that a query of `tokens` is multiplied with: all, or on average those that it sees."""
    w = min(getattr(layer.attention, "window", None) or tokens, tokens)
    return w * (tokens - (w - 1) / 2) / tokens if causal else float(w)


def has_own_head(cfg: ModelConfig) -> bool:
    """Whether the head has a kernel of its own, and the embedding is only looked up."""
    return any(leaf.path[0] == "head" and leaf.path[-1] == "kernel" for leaf in leaves(cfg))


def unpadded(cfg: ModelConfig) -> ModelConfig:
    """The same model without padding of the vocabulary."""
    return dataclasses.replace(cfg, vocab_multiple=1)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter of a model, or the same one of several equal layers.

    Attributes:
      layer: The boxes of the layer that it is in; of the first layer where it is in none.
      path: `attention`, `q`, `kernel`; without the block.
      shape: Of one layer's.
      times: How many layers have it.
      in_block: Whether it is in a layer at all.
    """

    layer: Layer
    path: tuple[str, ...]
    shape: tuple[int, ...]
    times: int
    in_block: bool

    @property
    def size(self) -> int:
        """Numbers in all layers together."""
        return math.prod(self.shape) * self.times

    @property
    def chosen(self) -> tuple[int, int]:
        """How many of how many parts take part in one token: an expert's top_k, or 1 of 1."""
        if isinstance(self.layer.ffn, MoE) and self.path[:2] == ("ffn", "experts"):
            return self.layer.ffn.top_k, self.layer.ffn.n_experts
        return 1, 1

    @property
    def active(self) -> int:
        """Of the numbers those that take part in one token."""
        some, parts = self.chosen
        return self.size // parts * some

    @property
    def is_table(self) -> bool:
        """Whether it is the embedding table, which a tied head multiplies with."""
        return self.path == ("embed", "embedding")


@functools.lru_cache(maxsize=8)  # all counts of a model look at it once
def leaves(cfg: ModelConfig) -> tuple[Leaf, ...]:
    """The parameters of a model; those of equal layers together. Works for models of any size.

    Raises:
      ConfigError: `vocab_size` is None.
    """
    found = []
    for kind, (layer, times) in enumerate(Counter(cfg.layers).items()):
        boxes = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
        one = dataclasses.replace(unpadded(cfg), n_layers=1, edits=(LayerEdit(**boxes),))
        for key, leaf in jax.tree.leaves_with_path(param_shapes(one)):
            name, *rest = (part.key for part in key)
            if name == "block_0":
                found.append(Leaf(layer, tuple(rest), leaf.shape, times, True))
            elif kind == 0:  # what stands around the layers
                found.append(Leaf(layer, (name, *rest), leaf.shape, 1, False))
    return tuple(found)
