# SPDX-License-Identifier: Apache-2.0
"""Counting a model: parameters by box, of the true vocabulary, without computing any."""

import dataclasses
import math
from collections import Counter

import jax

from jaxgpt.model import ModelConfig, param_shapes


def count_params(cfg: ModelConfig) -> dict[str, int]:
    """Parameters by box (`embed`, `attention`, `ffn`, ...), summed over layers; padding left out.

    The sum of the values is the model's exact size. Works for models of any size.
    """
    counts: Counter[str] = Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(param_shapes(unpadded(cfg))):
        names = [key.key for key in path]
        counts[names[1] if names[0].startswith("block_") else names[0]] += math.prod(leaf.shape)
    order = ("embed", "position", "attention_norm", "attention", "ffn_norm", "ffn")
    return dict(sorted(counts.items(), key=lambda item: (*order, item[0]).index(item[0])))


def unpadded(cfg: ModelConfig) -> ModelConfig:
    """The same model without padding of the vocabulary."""
    return dataclasses.replace(cfg, vocab_multiple=1)
