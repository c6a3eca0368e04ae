# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen3: the shape of Llama; biases on q, k and v, then norms on q and k instead.

Source: Qwen team 2024, section 2.2, https://arxiv.org/abs/2407.10671; Qwen team 2025, section 2,
  https://arxiv.org/abs/2505.09388
"""

import dataclasses
from collections.abc import Callable

from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.model import ModelConfig
from jaxgpt.presets.models.llama import llama


def qwen2_0_5b() -> ModelConfig:
    """Qwen2 0.5B: 494,032,768 parameters, as Qwen/Qwen2-0.5B."""
    return _qwen2(24, 896, 14, 4864, n_kv_heads=2, vocab_size=151_936, tied=True)


def qwen2_7b() -> ModelConfig:
    """Qwen2 7B: 7,615,616,512 parameters, as Qwen/Qwen2-7B."""
    return _qwen2(28, 3584, 28, 18_944, n_kv_heads=4, vocab_size=152_064, tied=False)


def _qwen2(*sizes: int, n_kv_heads: int, vocab_size: int, tied: bool) -> ModelConfig:
    return llama(
        *sizes,
        n_kv_heads=n_kv_heads,
        vocab_size=vocab_size,
        context_length=131_072,
        theta=1e6,
        eps=1e-6,
        tied=tied,
        use_bias=True,
        use_out_bias=False,
    )


def qwen3_0_6b() -> ModelConfig:
    """Qwen3 0.6B: 596,049,920 parameters, as Qwen/Qwen3-0.6B."""
    return _qwen3(28, 1024, 16, 3072, n_kv_heads=8, tied=True)


def qwen3_8b() -> ModelConfig:
    """Qwen3 8B: 8,190,735,360 parameters, as Qwen/Qwen3-8B."""
    return _qwen3(36, 4096, 32, 12_288, n_kv_heads=8)


def qwen3_30b_a3b() -> ModelConfig:
    """Qwen3 30B-A3B: 30,532,122,624 parameters, as Qwen/Qwen3-30B-A3B."""
    cfg = _qwen3(48, 2048, 32, 768, n_kv_heads=4)
    return dataclasses.replace(cfg, ffn=MoE(n_experts=128, top_k=8, expert=cfg.ffn))


def _qwen3(*sizes: int, n_kv_heads: int, tied: bool = False) -> ModelConfig:
    return llama(
        *sizes,
        n_kv_heads=n_kv_heads,
        vocab_size=151_936,
        context_length=40_960,
        theta=1e6,
        eps=1e-6,
        tied=tied,
        head_dim=128,
        qk_norm=RMSNorm(1e-6),
    )


MODELS: dict[str, Callable[[], ModelConfig]] = {
    "qwen2-0.5b": qwen2_0_5b,
    "qwen2-7b": qwen2_7b,
    "qwen3-0.6b": qwen3_0_6b,
    "qwen3-8b": qwen3_8b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
}
"""These architectures by name."""
