# SPDX-License-Identifier: Apache-2.0
"""The family of Llama: pre-RMSNorm, rotary positions, SwiGLU, no biases; also Mistral and SmolLM.

Source: Touvron et al. 2023, https://arxiv.org/abs/2302.13971 and
  https://arxiv.org/abs/2307.09288 (Llama 2); Llama team 2024, https://arxiv.org/abs/2407.21783;
  Jiang et al. 2023, https://arxiv.org/abs/2310.06825, and 2024, https://arxiv.org/abs/2401.04088
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import RopeScaling
from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.boxes.head import Tied, Untied
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.position import NoPosition
from jaxgpt.boxes.rope import RoPE
from jaxgpt.boxes.scaling import Llama3Scaling
from jaxgpt.model import LayerEdit, ModelConfig


def llama(
    n_layers: int,
    d_model: int,
    n_heads: int,
    d_ff: int,
    *,
    n_kv_heads: int | None = None,
    vocab_size: int = 32_000,
    context_length: int = 2048,
    theta: float = 10_000.0,
    scaling: RopeScaling | None = None,
    eps: float = 1e-5,
    tied: bool = False,
    **attention: Any,
) -> ModelConfig:
    """A model of this shape by its sizes.

    Args:
      n_layers: Blocks.
      d_model: Width of the residual stream.
      n_heads: Query heads.
      d_ff: Hidden width of the FFN.
      n_kv_heads: Key/value heads; None: one for each query head.
      vocab_size: Tokens.
      context_length: Longest sequence, in tokens.
      theta: Base of the rope.
      scaling: Of the rope.
      eps: Of all norms.
      tied: Whether the head is the embedding.
      **attention: Further knobs of `GQA`.
    """
    return ModelConfig(
        vocab_size=vocab_size,
        context_length=context_length,
        d_model=d_model,
        n_layers=n_layers,
        position=RoPE(theta, scaling=scaling),
        norm=RMSNorm(eps),
        attention=GQA(n_heads, n_kv_heads, **{"use_bias": False, **attention}),
        ffn=GatedMLP(d_ff),
        final_norm=RMSNorm(eps),
        head=Tied() if tied else Untied(),
    )


def llama_7b() -> ModelConfig:
    """LLaMA 7B: 6,738,415,616 parameters, as huggyllama/llama-7b."""
    return llama(32, 4096, 32, 11_008, eps=1e-6)


def llama_13b() -> ModelConfig:
    """LLaMA 13B: 13,015,864,320 parameters, as huggyllama/llama-13b."""
    return llama(40, 5120, 40, 13_824, eps=1e-6)


def llama_30b() -> ModelConfig:
    """LLaMA 30B, 33B in the paper: 32,528,943,616 parameters, as huggyllama/llama-30b."""
    return llama(60, 6656, 52, 17_920, eps=1e-6)


def llama_65b() -> ModelConfig:
    """LLaMA 65B: 65,285,660,672 parameters, as huggyllama/llama-65b."""
    return llama(80, 8192, 64, 22_016)  # eps 1e-5, unlike the smaller ones


def llama2_7b() -> ModelConfig:
    """Llama 2 7B: 6,738,415,616 parameters, as meta-llama/Llama-2-7b-hf."""
    return llama(32, 4096, 32, 11_008, context_length=4096)


def llama2_13b() -> ModelConfig:
    """Llama 2 13B: 13,015,864,320 parameters, as meta-llama/Llama-2-13b-hf."""
    return llama(40, 5120, 40, 13_824, context_length=4096)


def llama2_70b() -> ModelConfig:
    """Llama 2 70B: 68,976,648,192 parameters, as meta-llama/Llama-2-70b-hf."""
    return llama(80, 8192, 64, 28_672, n_kv_heads=8, context_length=4096)


def llama3_8b() -> ModelConfig:
    """Llama 3 8B: 8,030,261,248 parameters, as meta-llama/Meta-Llama-3-8B."""
    return _llama3(32, 4096, 32, 14_336)


def llama3_70b() -> ModelConfig:
    """Llama 3 70B: 70,553,706,496 parameters, as meta-llama/Meta-Llama-3-70B."""
    return _llama3(80, 8192, 64, 28_672)


def llama3_405b() -> ModelConfig:
    """Llama 3.1 405B: 405,853,388,800 parameters, as meta-llama/Llama-3.1-405B."""
    return _llama3(126, 16_384, 128, 53_248, stretch=8.0)


def llama3_2_1b() -> ModelConfig:
    """Llama 3.2 1B: 1,235,814,400 parameters, as meta-llama/Llama-3.2-1B."""
    return _llama3(16, 2048, 32, 8192, stretch=32.0, tied=True)


def llama3_2_3b() -> ModelConfig:
    """Llama 3.2 3B: 3,212,749,824 parameters, as meta-llama/Llama-3.2-3B."""
    return _llama3(28, 3072, 24, 8192, stretch=32.0, tied=True)


def _llama3(
    n_layers: int,
    d_model: int,
    n_heads: int,
    d_ff: int,
    *,
    stretch: float | None = None,
    tied: bool = False,
) -> ModelConfig:
    """Eight key/value heads; a `stretch` of the rope serves 131,072 tokens instead of 8192."""
    scaling = None if stretch is None else Llama3Scaling(stretch, 1.0, 4.0, 8192)
    return llama(
        n_layers,
        d_model,
        n_heads,
        d_ff,
        n_kv_heads=8,
        vocab_size=128_256,
        context_length=8192 if stretch is None else 131_072,
        theta=500_000.0,
        scaling=scaling,
        tied=tied,
    )


def mistral_7b() -> ModelConfig:
    """Mistral 7B: 7,241,732,096 parameters, as mistralai/Mistral-7B-v0.1."""
    return llama(32, 4096, 32, 14_336, n_kv_heads=8, context_length=32_768, window=4096)


def mixtral_8x7b() -> ModelConfig:
    """Mixtral 8x7B: 46,702,792,704 parameters, as mistralai/Mixtral-8x7B-v0.1."""
    cfg = llama(32, 4096, 32, 14_336, n_kv_heads=8, context_length=32_768, theta=1e6)
    return dataclasses.replace(cfg, ffn=MoE(n_experts=8, top_k=2, expert=cfg.ffn))


def smollm2_135m() -> ModelConfig:
    """SmolLM2 135M: 134,515,008 parameters, as HuggingFaceTB/SmolLM2-135M."""
    return llama(
        30,
        576,
        9,
        1536,
        n_kv_heads=3,
        vocab_size=49_152,
        context_length=8192,
        theta=100_000.0,
        tied=True,
    )


def smollm3_3b() -> ModelConfig:
    """SmolLM3 3B: 3,075,098,624 parameters, as HuggingFaceTB/SmolLM3-3B.

    Every fourth layer has no positions.
    """
    cfg = llama(
        36,
        2048,
        16,
        11_008,
        n_kv_heads=4,
        vocab_size=128_256,
        context_length=65_536,
        theta=5e6,
        eps=1e-6,
        tied=True,
    )
    return dataclasses.replace(cfg, edits=(LayerEdit(every=4, start=3, position=NoPosition()),))


MODELS: dict[str, Callable[[], ModelConfig]] = {
    "llama-7b": llama_7b,
    "llama-13b": llama_13b,
    "llama-30b": llama_30b,
    "llama-65b": llama_65b,
    "llama2-7b": llama2_7b,
    "llama2-13b": llama2_13b,
    "llama2-70b": llama2_70b,
    "llama3-8b": llama3_8b,
    "llama3-70b": llama3_70b,
    "llama3-405b": llama3_405b,
    "llama3.2-1b": llama3_2_1b,
    "llama3.2-3b": llama3_2_3b,
    "mistral-7b": mistral_7b,
    "mixtral-8x7b": mixtral_8x7b,
    "smollm2-135m": smollm2_135m,
    "smollm3-3b": smollm3_3b,
}
"""These architectures by name."""
