# SPDX-License-Identifier: Apache-2.0
"""Pythia, OLMo 2 and gpt-oss."""

import dataclasses
from collections.abc import Callable

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import OutputNorm, Parallel
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.rope import RoPE
from jaxgpt.boxes.scaling import YaRN
from jaxgpt.model import LayerEdit, ModelConfig
from jaxgpt.presets.models.llama import llama


def pythia_70m() -> ModelConfig:
    """Pythia 70M: 70,426,624 parameters, as EleutherAI/pythia-70m."""
    return _pythia(6, 512, 8)


def pythia_160m() -> ModelConfig:
    """Pythia 160M: 162,322,944 parameters, as EleutherAI/pythia-160m."""
    return _pythia(12, 768, 12)


def pythia_410m() -> ModelConfig:
    """Pythia 410M: 405,334,016 parameters, as EleutherAI/pythia-410m."""
    return _pythia(24, 1024, 16)


def pythia_1b() -> ModelConfig:
    """Pythia 1B: 1,011,781,632 parameters, as EleutherAI/pythia-1b."""
    return _pythia(16, 2048, 8)


def pythia_1_4b() -> ModelConfig:
    """Pythia 1.4B: 1,414,647,808 parameters, as EleutherAI/pythia-1.4b."""
    return _pythia(24, 2048, 16)


def pythia_2_8b() -> ModelConfig:
    """Pythia 2.8B: 2,775,208,960 parameters, as EleutherAI/pythia-2.8b."""
    return _pythia(32, 2560, 32)


def pythia_6_9b() -> ModelConfig:
    """Pythia 6.9B: 6,857,302,016 parameters, as EleutherAI/pythia-6.9b."""
    return _pythia(32, 4096, 32, vocab_size=50_432)


def pythia_12b() -> ModelConfig:
    """Pythia 12B: 11,846,072,320 parameters, as EleutherAI/pythia-12b."""
    return _pythia(36, 5120, 40, vocab_size=50_688)


def _pythia(n_layers: int, d_model: int, n_heads: int, *, vocab_size: int = 50_304) -> ModelConfig:
    """GPT-NeoX; the tables of the checkpoints are padded to 128 rows for each parallel part.

    Source: Biderman et al. 2023, section 2.2 and table 1, https://arxiv.org/abs/2304.01373
    """
    return ModelConfig(
        vocab_size=vocab_size,
        context_length=2048,
        d_model=d_model,
        n_layers=n_layers,
        position=RoPE(fraction=0.25),
        block=Parallel(),
        attention=GQA(n_heads),
        ffn=MLP(activation="gelu"),
        head=Untied(),
    )


def olmo2_7b() -> ModelConfig:
    """OLMo 2 7B: 7,298,617,344 parameters, as allenai/OLMo-2-1124-7B.

    Source: Team OLMo 2024, section 2.1, https://arxiv.org/abs/2501.00656
    """
    norm = RMSNorm(1e-6)
    cfg = llama(
        32,
        4096,
        32,
        11_008,
        vocab_size=100_352,
        context_length=4096,
        theta=500_000.0,
        eps=1e-6,
        qk_norm=norm,
        qk_norm_of="all",
    )
    return dataclasses.replace(cfg, block=OutputNorm())


def gpt_oss_20b() -> ModelConfig:
    """gpt-oss 20B: 20,914,757,184 parameters, as openai/gpt-oss-20b.

    Source: OpenAI 2025, section 2, https://arxiv.org/abs/2508.10925
    """
    expert = GatedMLP(2880, "gelu_sigmoid", use_bias=True, limit=7.0, up_offset=1.0)
    return ModelConfig(
        vocab_size=201_088,
        context_length=131_072,
        d_model=2880,
        n_layers=24,
        position=RoPE(150_000.0, scaling=YaRN(32.0, 4096, truncate=False)),
        norm=RMSNorm(),
        attention=GQA(64, 8, 64, window=128, sinks=True),
        ffn=MoE(n_experts=32, top_k=4, expert=expert, router_bias=True),
        final_norm=RMSNorm(),
        head=Untied(),
        edits=(LayerEdit(every=2, start=1, set={"attention.window": None}),),
    )


MODELS: dict[str, Callable[[], ModelConfig]] = {
    "pythia-70m": pythia_70m,
    "pythia-160m": pythia_160m,
    "pythia-410m": pythia_410m,
    "pythia-1b": pythia_1b,
    "pythia-1.4b": pythia_1_4b,
    "pythia-2.8b": pythia_2_8b,
    "pythia-6.9b": pythia_6_9b,
    "pythia-12b": pythia_12b,
    "olmo2-7b": olmo2_7b,
    "gpt-oss-20b": gpt_oss_20b,
}
"""These architectures by name."""
