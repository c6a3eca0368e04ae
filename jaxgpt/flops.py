# SPDX-License-Identifier: Apache-2.0
"""Counting a model: parameters by box, of the true vocabulary, without computing any."""

import dataclasses
import functools
from collections import Counter

import jax

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
    active = 0
    for layer, path, n in _leaves(cfg):
        if isinstance(layer.ffn, MoE) and path[:2] == ("ffn", "experts"):
            n = n // layer.ffn.n_experts * layer.ffn.top_k
        active += n
    return active


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
