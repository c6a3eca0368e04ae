# SPDX-License-Identifier: Apache-2.0
"""Gemma: wide heads, GeGLU, a scaled and tied embedding, and norms that multiply by 1 + scale.

Source: Gemma team 2024, https://arxiv.org/abs/2403.08295 and https://arxiv.org/abs/2408.00118
  (Gemma 2: section 2); Gemma team 2025, section 2, https://arxiv.org/abs/2503.19786 (Gemma 3)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import Sandwich
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.boxes.head import Tied
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.rope import RoPE
from jaxgpt.model import LayerEdit, ModelConfig

NORM = RMSNorm(1e-6, one_plus=True)


def gemma_2b() -> ModelConfig:
    """Gemma 2B: 2,506,172,416 parameters, as google/gemma-2b."""
    return _gemma(18, 2048, 8, 1, 16_384)


def gemma2_2b() -> ModelConfig:
    """Gemma 2 2B: 2,614,341,888 parameters, as google/gemma-2-2b."""
    cfg = _gemma(26, 2304, 8, 4, 9216, window=4096, softcap=50.0)
    wide = LayerEdit(every=2, start=1, set={"attention.window": None})
    return dataclasses.replace(cfg, block=Sandwich(), head=Tied(softcap=30.0), edits=(wide,))


def gemma3_270m() -> ModelConfig:
    """Gemma 3 270M: 268,098,176 parameters, as google/gemma-3-270m."""
    return _gemma3(18, 640, 2048)


def gemma3_1b() -> ModelConfig:
    """Gemma 3 1B: 999,885,952 parameters, as google/gemma-3-1b-pt."""
    return _gemma3(26, 1152, 6912)


def _gemma3(n_layers: int, d_model: int, d_ff: int) -> ModelConfig:
    """Every sixth layer sees all of the past, with a rope of its own; the others see 512 keys."""
    cfg = _gemma(n_layers, d_model, 4, 1, d_ff, window=512, qk_norm=NORM)
    wide = LayerEdit(every=6, start=5, position=RoPE(1e6), set={"attention.window": None})
    sizes = {"vocab_size": 262_144, "context_length": 32_768}
    return dataclasses.replace(cfg, **sizes, block=Sandwich(), edits=(wide,))


def _gemma(
    n_layers: int, d_model: int, n_heads: int, n_kv_heads: int, d_ff: int, **attention: Any
) -> ModelConfig:
    """The first one by its sizes; `attention` are further knobs of `GQA`."""
    return ModelConfig(
        vocab_size=256_000,
        context_length=8192,
        d_model=d_model,
        n_layers=n_layers,
        embed=Embed(scale=True),
        position=RoPE(),
        norm=NORM,
        attention=GQA(n_heads, n_kv_heads, 256, use_bias=False, **attention),
        ffn=GatedMLP(d_ff, "gelu_tanh"),
        final_norm=NORM,
    )


MODELS: dict[str, Callable[[], ModelConfig]] = {
    "gemma-2b": gemma_2b,
    "gemma2-2b": gemma2_2b,
    "gemma3-270m": gemma3_270m,
    "gemma3-1b": gemma3_1b,
}
"""These architectures by name."""
