# SPDX-License-Identifier: Apache-2.0
"""GPT, GPT-2 and GPT-3: learned positions, biases everywhere, GELU, a tied head.

Source: Radford et al. 2018, "Improving language understanding by generative pre-training"; Radford
  et al. 2019, "Language models are unsupervised multitask learners"; Brown et al. 2020,
  https://arxiv.org/abs/2005.14165
"""

import dataclasses
from collections.abc import Callable

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import PostNorm
from jaxgpt.boxes.init import Normal
from jaxgpt.boxes.norm import NoNorm
from jaxgpt.model import LayerEdit, ModelConfig


def gpt() -> ModelConfig:
    """GPT: 116,534,784 parameters, as openai-community/openai-gpt.

    Source: Radford et al. 2018, section 4.1 (sizes, dropout, initialisation).
    """
    return ModelConfig(
        vocab_size=40_478,
        context_length=512,
        dropout=0.1,
        block=PostNorm(),
        final_norm=NoNorm(),
        init=Normal(residual="same"),
    )


def gpt2() -> ModelConfig:
    """GPT-2 small: 124,439,808 parameters, as openai-community/gpt2; dropout is left at 0.

    Source: Radford et al. 2019, section 2.3; table 2, whose 117M is this shape with the 40,478
      tokens of GPT.
    """
    return ModelConfig()


def gpt2_medium() -> ModelConfig:
    """GPT-2 medium: 354,823,168 parameters, as openai-community/gpt2-medium."""
    return _gpt2(24, 1024, 16)


def gpt2_large() -> ModelConfig:
    """GPT-2 large: 774,030,080 parameters, as openai-community/gpt2-large."""
    return _gpt2(36, 1280, 20)


def gpt2_xl() -> ModelConfig:
    """GPT-2 XL: 1,557,611,200 parameters, as openai-community/gpt2-xl."""
    return _gpt2(48, 1600, 25)


def gpt3_125m() -> ModelConfig:
    """GPT-3 Small: 125,226,240 parameters, as table 2.1 of Brown et al. 2020."""
    return _gpt3(12, 768, 12)


def gpt3_350m() -> ModelConfig:
    """GPT-3 Medium: 355,871,744 parameters, as table 2.1 of Brown et al. 2020."""
    return _gpt3(24, 1024, 16)


def gpt3_760m() -> ModelConfig:
    """GPT-3 Large: 760,300,032 parameters, as table 2.1 of Brown et al. 2020."""
    return _gpt3(24, 1536, 16)


def gpt3_1_3b() -> ModelConfig:
    """GPT-3 XL: 1,315,723,264 parameters, as table 2.1 of Brown et al. 2020.

    Differs from the paper: its 24 heads of 128 are no d_model of 2048; 16 are.
    """
    return _gpt3(24, 2048, 16)


def gpt3_2_7b() -> ModelConfig:
    """GPT-3 2.7B: 2,651,553,280 parameters, as table 2.1 of Brown et al. 2020."""
    return _gpt3(32, 2560, 32)


def gpt3_6_7b() -> ModelConfig:
    """GPT-3 6.7B: 6,658,404,352 parameters, as table 2.1 of Brown et al. 2020."""
    return _gpt3(32, 4096, 32)


def gpt3_13b() -> ModelConfig:
    """GPT-3 13B: 12,853,386,240 parameters, as table 2.1 of Brown et al. 2020.

    Differs from the paper: its d_model of 5140 is no 40 heads of 128; 5120 is.
    """
    return _gpt3(40, 5120, 40)


def gpt3_175b() -> ModelConfig:
    """GPT-3 175B: 174,604,259,328 parameters, as table 2.1 of Brown et al. 2020."""
    return _gpt3(96, 12_288, 96)


def _gpt2(n_layers: int, d_model: int, n_heads: int) -> ModelConfig:
    return ModelConfig(n_layers=n_layers, d_model=d_model, attention=GQA(n_heads))


def _gpt3(n_layers: int, d_model: int, n_heads: int) -> ModelConfig:
    """GPT-2 with 2048 positions, and every other layer sees a band only.

    Source: Brown et al. 2020, section 2.1 and table 2.1, https://arxiv.org/abs/2005.14165
    Differs from the paper: it does not state the width of the band, nor which layers have it; here
      it is 256 keys, in the odd layers.
    """
    banded = LayerEdit(every=2, start=1, set={"attention.window": 256})
    return dataclasses.replace(
        _gpt2(n_layers, d_model, n_heads), context_length=2048, edits=(banded,)
    )


MODELS: dict[str, Callable[[], ModelConfig]] = {
    "gpt": gpt,
    "gpt2": gpt2,
    "gpt2-medium": gpt2_medium,
    "gpt2-large": gpt2_large,
    "gpt2-xl": gpt2_xl,
    "gpt3-125m": gpt3_125m,
    "gpt3-350m": gpt3_350m,
    "gpt3-760m": gpt3_760m,
    "gpt3-1.3b": gpt3_1_3b,
    "gpt3-2.7b": gpt3_2_7b,
    "gpt3-6.7b": gpt3_6_7b,
    "gpt3-13b": gpt3_13b,
    "gpt3-175b": gpt3_175b,
}
"""These architectures by name."""
