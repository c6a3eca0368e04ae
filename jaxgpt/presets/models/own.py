# SPDX-License-Identifier: Apache-2.0
"""Models that follow no checkpoint: of the first paper, of today, and of PyTorch's defaults."""

from collections.abc import Callable

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import PostNorm
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.init import Normal, TorchDefault
from jaxgpt.boxes.norm import NoNorm, RMSNorm
from jaxgpt.boxes.position import Sinusoidal
from jaxgpt.boxes.rope import RoPE
from jaxgpt.model import ModelConfig


def transformer_2017() -> ModelConfig:
    """The decoder of Attention Is All You Need, base size: 37,846,016 parameters.

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
    """The block of the 2020s at the size of GPT-2 small: 124,668,672 parameters.

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
    "transformer-2017": transformer_2017,
    "modern": modern,
    "wikitext2-char": wikitext2_char,
}
"""These architectures by name."""
