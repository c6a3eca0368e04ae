# SPDX-License-Identifier: Apache-2.0
"""jaxgpt: the decoder-only transformer in JAX and Flax, one skeleton, every refinement a box."""

from jaxgpt.boxes.alibi import ALiBi
from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import OutputNorm, Parallel, PostNorm, PreNorm, Sandwich
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Tied, Untied
from jaxgpt.boxes.init import Normal, TorchDefault
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.norm import LayerNorm, NoNorm, RMSNorm
from jaxgpt.boxes.position import Learned, NoPosition, Sinusoidal
from jaxgpt.boxes.rope import RoPE
from jaxgpt.boxes.scaling import DynamicNTK, LinearScaling, Llama3Scaling, NTKScaling, YaRN
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
from jaxgpt.sample.speculative import Draft
from jaxgpt.sample.weights import for_decoding

__version__ = "0.1.0"

__all__ = [
    "GPT",
    "GQA",
    "MLA",
    "MLP",
    "ALiBi",
    "Draft",
    "DynamicNTK",
    "Embed",
    "GatedMLP",
    "LayerEdit",
    "LayerNorm",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "MoE",
    "ModelConfig",
    "NTKScaling",
    "NoNorm",
    "NoPosition",
    "Normal",
    "Output",
    "OutputNorm",
    "Parallel",
    "PostNorm",
    "PreNorm",
    "RMSNorm",
    "RoPE",
    "Sampling",
    "Sandwich",
    "Sinusoidal",
    "Tied",
    "TorchDefault",
    "Untied",
    "Visibility",
    "YaRN",
    "for_decoding",
    "forward",
    "generate",
    "init_params",
    "next_token_loss",
    "param_shapes",
    "stream",
    "token_nats",
]
