# SPDX-License-Identifier: Apache-2.0
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import PostNorm, PreNorm
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Tied, Untied
from jaxgpt.boxes.init import Normal, TorchDefault
from jaxgpt.boxes.norm import LayerNorm, NoNorm, RMSNorm
from jaxgpt.boxes.position import Learned, NoPosition, RoPE, Sinusoidal
from jaxgpt.testing import check_box, tiny, check_model

BOXES = [
    GQA(n_heads=4),
    GQA(n_heads=4, n_kv_heads=2, use_bias=False, head_dim=6),
    GQA(n_heads=4, n_kv_heads=1, window=4),
    GQA(n_heads=4, qk_norm=RMSNorm(), use_out_bias=False),
    PreNorm(),
    PostNorm(),
    Embed(scale=True),
    MLP(activation="gelu"),
    MLP(activation="relu_squared", use_bias=False, d_ff=24),
    GatedMLP(),
    Tied(),
    Untied(use_bias=True),
    Normal(std=None, residual="same"),
    TorchDefault(),
    LayerNorm(use_bias=False),
    RMSNorm(),
    Learned(),
    Sinusoidal(),
    RoPE(),
    RoPE(fraction=0.5),
    NoPosition(),
]


@pytest.mark.parametrize("box", BOXES, ids=repr)
def test_our_boxes_keep_the_contracts(box):
    check_box(box)
