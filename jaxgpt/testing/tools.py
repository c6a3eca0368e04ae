# SPDX-License-Identifier: Apache-2.0
"""What the checks share: a tiny model, its tokens, quick compilation, and comparisons."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.init import Normal
from jaxgpt.boxes.norm import NoNorm
from jaxgpt.model import ModelConfig, forward, init_params
from jaxgpt.shapes import Params

LENGTH = 12  # tokens of a row, in the checks
PADDING = 2  # of them, in front of a padded row
TOLERANCE = 2e-5  # of the largest logit, or of 1, where sums are added up in another order

# What is compiled here is too small for optimisation to matter, and compiles several times as fast
# without. XLA dropped the second option with its older emitters, which jax 0.10 still has.
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    QUICK |= {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)

jit_init = quick_jit(init_params, static_argnames="cfg")
STATIC = ("cfg", "capture", "dtype", "remat", "scan", "last_only")
jit_forward = quick_jit(forward, static_argnames=STATIC)


def tiny(**boxes: Any) -> ModelConfig:
    """A model small enough to compile in a moment, drawn so widely that attention is not uniform.

    Args:
      **boxes: Fields of ModelConfig to replace.
    """
    small: dict[str, Any] = dict(
        vocab_size=31,
        context_length=16,
        d_model=16,
        n_layers=2,
        dropout=0.25,
        attention=GQA(n_heads=4),
        init=Normal(std=0.5, embedding_std=0.5),
    )
    return ModelConfig(**(small | boxes))


def worn(cfg: ModelConfig, seed: int = 0) -> Params:
    """Parameters as if trained: drawn, then noise on each, so that no bias is zero, no scale one.

    Where blocks do not normalise, matrices are made smaller until what they hand on is moderate,
    final norm or not: saturated softmaxes and soft caps have no gradient, and magnify rounding.
    """
    rng = np.random.default_rng(seed)
    drawn = jit_init(cfg, jax.random.key(seed))
    params = jax.tree.map(
        lambda a: np.asarray(a) + rng.normal(0, 0.2, a.shape).astype(a.dtype), drawn
    )
    bare = any(isinstance(layer.norm, NoNorm) for layer in cfg.layers)
    seen = dataclasses.replace(cfg, final_norm=NoNorm()) if bare else cfg
    while np.abs(logits(seen, params, tokens()[0])).mean() > (1 if bare else 3):
        params = jax.tree.map(lambda a: a * np.float32(0.8) if a.ndim > 1 else a, params)
    return params


def tokens(padded: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Two rows of tokens below 30 and their positions, the first perhaps moved behind padding."""
    tokens_BT = np.random.default_rng(0).integers(0, 30, (2, LENGTH), np.int32)
    pos_BT = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
    if padded:
        tokens_BT[0], pos_BT[0] = np.roll(tokens_BT[0], PADDING), pos_BT[0] - PADDING
    return tokens_BT, pos_BT.clip(-1)


def logits(cfg: ModelConfig, params: Params, tokens_BT: np.ndarray, **call: Any) -> np.ndarray:
    """Those of the true vocabulary, by the compiled model."""
    return np.asarray(jit_forward(cfg, params, tokens_BT, **call).logits_BTV)[..., : cfg.vocab_size]


def pairs(a: Any, b: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(path, leaf, leaf) of two trees of one structure."""
    leaves = zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True)
    key = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return [(key(p), np.asarray(x), np.asarray(y)) for (p, x), y in leaves]


def assert_close(got: Any, want: Any, tolerance: float, what: str) -> None:
    """Agreement within `tolerance` times the largest value, or 1."""
    error = np.abs(np.asarray(got) - np.asarray(want)).max()
    limit = tolerance * max(1.0, np.abs(np.asarray(want)).max())
    assert error <= limit, f"{what}: off by {error:.3g}, more than {limit:.3g}"


def assert_padded(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Logits of `tokens(padded=True)` against those of `tokens()`."""
    row = f"{what} of a row padded on the left"
    assert_close(got[0, PADDING:], want[0, :-PADDING], TOLERANCE, row)
    assert_close(got[1], want[1], TOLERANCE, f"{what} of the row beside a padded one")
