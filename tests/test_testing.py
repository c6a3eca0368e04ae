# SPDX-License-Identifier: Apache-2.0
import dataclasses

import flax.linen as nn
import jax.numpy as jnp
import pytest

from jaxgpt.boxes.alibi import ALiBi
from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import AttentionBox, Box, NormBox
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
from jaxgpt.cache import KVCache
from jaxgpt.masks import Visibility
from jaxgpt.model import LayerEdit
from jaxgpt.testing import check_box, check_model, check_value, tiny

BOXES = [
    GQA(n_heads=4),
    GQA(n_heads=4, n_kv_heads=1, window=4),
    GQA(n_heads=4, qk_norm=RMSNorm(), use_out_bias=False),
    GQA(n_heads=4, scale=0.7, softcap=1.5, sinks=True),
    GQA(n_heads=4, n_kv_heads=2, qk_norm=RMSNorm(), qk_norm_of="all"),
    MLA(n_heads=4, kv_rank=6, nope_dim=5, rope_dim=4, v_dim=3),
    MLA(n_heads=4, kv_rank=16, q_rank=7, nope_dim=2, rope_dim=2, v_dim=2),  # naive for chunks of 3
    PreNorm(),
    PostNorm(),
    Sandwich(),
    OutputNorm(),
    Parallel(),
    Embed(scale=True),
    Embed(width=8),
    MLP(activation="relu_squared", use_bias=False, d_ff=24),
    GatedMLP(),
    GatedMLP(activation="gelu_sigmoid", use_bias=True, limit=1.0, up_offset=1.0),
    MoE(
        n_experts=8,
        shared=MLP(d_ff=8),
        score="sigmoid",
        routed_scaling=2.5,
        n_groups=4,
        top_groups=2,
        group_score="top2",
        balance_rate=0.1,
        capacity_factor=1.0,
    ),
    Tied(),
    Tied(softcap=5.0),
    Untied(use_bias=True),
    Normal(std=None, residual="same"),
    TorchDefault(),
    LayerNorm(use_bias=False),
    RMSNorm(),
    RMSNorm(one_plus=True),
    NoNorm(),
    Learned(),
    Sinusoidal(),
    RoPE(),
    RoPE(layout="neighbours"),
    RoPE(scaling=NTKScaling(), layout="neighbours"),
    RoPE(theta=100.0, scaling=DynamicNTK(original_length=8)),  # context_length is 16
    RoPE(theta=100.0, scaling=Llama3Scaling(original_length=8)),
    RoPE(theta=100.0, scaling=YaRN(original_length=8), fraction=0.5),
    ALiBi(),
    NoPosition(),
]
MORE = [  # of the same classes, when there is time
    MoE(n_experts=5, top_k=3, expert=MLP(d_ff=24), normalize=False, balance_coef=0.1),
    GQA(n_heads=4, n_kv_heads=2, qk_norm=LayerNorm(), qk_norm_of="each_head"),
    GQA(n_heads=4, n_kv_heads=2, use_bias=False, head_dim=6),
    Parallel(one_norm=True),
    MLP(activation="gelu"),
    MoE(n_experts=4, expert=GatedMLP(use_bias=True, limit=1.0), router_bias=True, z_coef=0.1),
    Learned(offset=2),
    RoPE(fraction=0.5),
    RoPE(scaling=LinearScaling()),
    RoPE(theta=100.0, scaling=YaRN(original_length=8, mscale=1.0, mscale_all_dim=0.7)),
]


SLOW = [pytest.param(box, marks=pytest.mark.slow) for box in MORE]


@pytest.mark.parametrize("box", BOXES + SLOW, ids=repr)
def test_our_boxes_keep_the_contracts(box):
    around = (
        {"norm": LayerNorm()} if isinstance(box, NoNorm) else {}
    )  # no residual stream is endless
    check_box(box, **around)


def test_boxes_keep_the_contracts_together():
    edits = (LayerEdit(start=1, ffn=GatedMLP(), set={"attention.window": 4}),)
    gqa = GQA(n_heads=4, n_kv_heads=2, qk_norm=RMSNorm(), use_bias=False)
    check_model(tiny(attention=gqa, position=RoPE(), norm=RMSNorm(), head=Untied(), edits=edits))


# --- values ---------------------------------------------------------------------------------------


def test_a_box_must_be_a_frozen_value():
    @dataclasses.dataclass(unsafe_hash=True)
    class Loose(NormBox):
        eps: float = 1e-5

    @dataclasses.dataclass(frozen=True)
    class Listed(NormBox):
        axes: list

    @dataclasses.dataclass(frozen=True, eq=False)
    class Alone(NormBox):
        eps: float = 1e-5

    class Bare(NormBox):
        pass

    faults = {"frozen": Loose(), "hashable": Listed([1]), "own copy": Alone(), "dataclass": Bare()}
    for message, box in faults.items():
        with pytest.raises(AssertionError, match=message):
            check_value(box)


def test_a_box_of_no_kind_is_refused():
    class Nothing(Box):
        pass

    with pytest.raises(TypeError, match="Nothing subclasses no kind"):
        check_box(Nothing())


# --- a researcher's own box -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MeanPool(AttentionBox):
    """The causal mean of the past: about the smallest box that mixes tokens. It has no cache."""

    scale: float = 1.0

    def build(self, dims, name=None):
        return _MeanPool(self.scale, name=name)


class _MeanPool(nn.Module):
    scale: float

    @nn.compact
    def __call__(self, x_BTD, visibility: Visibility, cache: KVCache | None, dropout_key=None):
        if cache is not None:
            raise NotImplementedError("MeanPool has no cache")
        seen_BTS = visibility.mask().astype(x_BTD.dtype)
        weights_BTS = seen_BTS / jnp.maximum(seen_BTS.sum(-1, keepdims=True), 1)
        return self.scale * (weights_BTS @ x_BTD), cache


def test_a_box_from_elsewhere_keeps_the_contracts():
    check_box(MeanPool(scale=0.5))
