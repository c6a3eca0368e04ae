# SPDX-License-Identifier: Apache-2.0
"""Architectures by name: functions that return a ModelConfig, with the vocabulary of the source.

Left out: how to train them (`runs.py`), and the models of the public checkpoints, whose configs are
read from the files they come with.
"""

import dataclasses
from collections.abc import Callable

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import PostNorm
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.init import Normal, TorchDefault
from jaxgpt.boxes.norm import NoNorm, RMSNorm
from jaxgpt.boxes.position import RoPE, Sinusoidal
from jaxgpt.model import ModelConfig


def gpt2() -> ModelConfig:
    """GPT-2 small: 124,439,808 parameters; dropout is left at 0.

    Source: Radford et al. 2019, table 2 (counted without biases and norms there), section 2.3.
    """
    return ModelConfig()


def gpt2_medium() -> ModelConfig:
    """GPT-2 medium: 354,823,168 parameters, see `gpt2`."""
    return dataclasses.replace(gpt2(), d_model=1024, n_layers=24, attention=GQA(n_heads=16))


def gpt2_large() -> ModelConfig:
    """GPT-2 large: 774,030,080 parameters, see `gpt2`."""
    return dataclasses.replace(gpt2(), d_model=1280, n_layers=36, attention=GQA(n_heads=20))


def gpt2_xl() -> ModelConfig:
    """GPT-2 XL: 1,557,611,200 parameters, see `gpt2`."""
    return dataclasses.replace(gpt2(), d_model=1600, n_layers=48, attention=GQA(n_heads=25))


def transformer_2017() -> ModelConfig:
    """The decoder of Attention Is All You Need, base size, as a language model.

    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762: table 3 (sizes, dropout), section
      3.1 (post-norm), 3.4 (tied, scaled embedding), 3.5 (sinusoids), equations 1 and 2 (biases in
      the FFN alone), 5.1 (vocabulary of 37,000).
    Differs from the paper: no attention to an encoder, and initialisation, which it does not state:
      N(0, 1/inputs) for kernels, N(0, 1/d_model) for the table, so that the scaled embedding is of
      unit size.
    """
    return ModelConfig(
        vocab_size=37_000,
        context_length=512,
        d_model=512,
        n_layers=6,
        dropout=0.1,
        embed=Embed(scale=True),
        position=Sinusoidal(),
        block=PostNorm(),
        attention=GQA(n_heads=8, use_bias=False),
        ffn=MLP(d_ff=2048, activation="relu"),
        final_norm=NoNorm(),
        init=Normal(std=None, embedding_std=512**-0.5, residual="same"),
    )


def modern() -> ModelConfig:
    """The block of the 2020s, as in Llama, at the size of GPT-2 small.

    Source: Touvron et al. 2023, section 2.2, https://arxiv.org/abs/2302.13971 (pre-RMSNorm, SwiGLU,
      RoPE, no biases), vocabulary of 32,000; grouped queries: Touvron et al. 2023, section 2.2,
      https://arxiv.org/abs/2307.09288
    """
    return ModelConfig(
        vocab_size=32_000,
        context_length=2048,
        position=RoPE(),
        norm=RMSNorm(),
        attention=GQA(n_heads=12, n_kv_heads=4, use_bias=False),
        ffn=GatedMLP(),
        final_norm=RMSNorm(),
        head=Untied(),
    )


def wikitext2_char() -> ModelConfig:
    """A small character model as PyTorch makes it by default: 646,938 parameters.

    Exact GELU, biases everywhere, an untied head with a bias, learned positions; 154 characters
    occur in the beginning of WikiText-2 that `RUNS["wikitext2-char"]` takes.
    """
    return ModelConfig(
        vocab_size=154,
        context_length=96,
        d_model=128,
        n_layers=3,
        attention=GQA(n_heads=4),
        ffn=MLP(activation="gelu"),
        head=Untied(use_bias=True),
        init=TorchDefault(),
    )


MODELS: dict[str, Callable[[], ModelConfig]] = {
    "gpt2": gpt2,
    "gpt2-medium": gpt2_medium,
    "gpt2-large": gpt2_large,
    "gpt2-xl": gpt2_xl,
    "transformer-2017": transformer_2017,
    "modern": modern,
    "wikitext2-char": wikitext2_char,
}
"""Every architecture by name."""
