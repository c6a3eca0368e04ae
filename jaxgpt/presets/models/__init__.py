# SPDX-License-Identifier: Apache-2.0
"""Architectures by name: functions that return a ModelConfig, without weights.

Sizes, vocabulary (with the unused rows of a checkpoint's table), context, ropes and epsilons are
those of the source: a paper, or the config.json of the checkpoint named `as owner/name` on
https://huggingface.co. Where a source does not state the initialisation, it is GPT-2's.

Left out: how to train them (`runs.py`).
"""

from collections.abc import Callable

from jaxgpt.model import ModelConfig
from jaxgpt.presets.models import deepseek, gemma, gpt, llama, others, own, qwen
from jaxgpt.presets.models.gpt import gpt2
from jaxgpt.presets.models.own import modern, transformer_2017, wikitext2_char

__all__ = ["MODELS", "gpt2", "modern", "transformer_2017", "wikitext2_char"]

MODELS: dict[str, Callable[[], ModelConfig]] = {
    **own.MODELS,
    **gpt.MODELS,
    **llama.MODELS,
    **qwen.MODELS,
    **deepseek.MODELS,
    **gemma.MODELS,
    **others.MODELS,
}
"""Every architecture by name."""
