# SPDX-License-Identifier: Apache-2.0
"""jaxgpt: the decoder-only transformer in JAX and Flax, one skeleton, every refinement a box."""

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import PostNorm, PreNorm
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Tied, Untied
from jaxgpt.boxes.init import Normal, TorchDefault
from jaxgpt.boxes.norm import LayerNorm, NoNorm, RMSNorm
from jaxgpt.boxes.position import Learned, NoPosition, RoPE, Sinusoidal
from jaxgpt.losses import next_token_loss, token_nats
from jaxgpt.masks import Visibility
from jaxgpt.model import (
    GPT,
    LayerEdit,
    ModelConfig,
    Output,
    forward,
    init_params,
    param_shapes,
)
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.generate import generate, stream

__version__ = "0.1.0"

__all__ = [
    "GPT",
    "GQA",
    "MLP",
    "Embed",
    "GatedMLP",
    "LayerEdit",
    "LayerNorm",
    "Learned",
    "ModelConfig",
    "NoNorm",
    "NoPosition",
    "Normal",
    "Output",
    "PostNorm",
    "PreNorm",
    "RMSNorm",
    "RoPE",
    "Sampling",
    "Sinusoidal",
    "Tied",
    "TorchDefault",
    "Untied",
    "Visibility",
    "forward",
    "generate",
    "init_params",
    "next_token_loss",
    "param_shapes",
    "stream",
    "token_nats",
]
