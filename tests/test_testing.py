# SPDX-License-Identifier: Apache-2.0
import dataclasses

import flax.linen as nn
import jax.numpy as jnp
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import AttentionBox, Box, FFNBox, NormBox
from jaxgpt.boxes.block import PostNorm, PreNorm
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Tied, Untied
from jaxgpt.boxes.init import Normal, TorchDefault
from jaxgpt.boxes.norm import LayerNorm, NoNorm, RMSNorm
from jaxgpt.boxes.position import Learned, NoPosition, RoPE, Sinusoidal
from jaxgpt.cache import KVCache
from jaxgpt.masks import Visibility
from jaxgpt.model import LayerEdit
from jaxgpt.testing import check_box, check_model, check_value, tiny

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
    NoNorm(),
    Learned(),
    Sinusoidal(),
    RoPE(),
    RoPE(fraction=0.5),
    NoPosition(),
]


@pytest.mark.parametrize("box", BOXES, ids=repr)
def test_our_boxes_keep_the_contracts(box):
    around = (
        {"norm": LayerNorm()} if isinstance(box, NoNorm) else {}
    )  # no residual stream is endless
    check_box(box, **around)


def test_boxes_keep_the_contracts_together():
    edits = (LayerEdit(start=1, ffn=GatedMLP(), set={"attention.window": 4}),)
    gqa = GQA(n_heads=4, n_kv_heads=2, qk_norm=RMSNorm(), use_bias=False)
    check_model(tiny(attention=gqa, position=RoPE(), norm=RMSNorm(), head=Untied(), edits=edits))


# --- boxes that break a promise -------------------------------------------------------------------


class Broken(GQA):
    """Grouped-query attention with a fault in what it is given or gives back."""

    def build(self, dims, name=None):
        return _Broken(self, dims, name=name)

    def given(self, x, visibility, cache):
        return x, visibility, cache

    def gives(self, y, x, visibility, cache):
        return y, cache


class _Broken(nn.Module):
    box: Broken
    dims: object

    @nn.compact
    def __call__(self, x, visibility, cache=None, dropout_key=None):
        inner = GQA.build(self.box, self.dims, name="inner")
        y, cache = inner(*self.box.given(x, visibility, cache), dropout_key)
        return self.box.gives(y, x, visibility, cache)


@dataclasses.dataclass(frozen=True)
class Peeks(Broken):
    """Sees one token of the future."""

    def given(self, x, visibility, cache):
        ahead = visibility.replace(q_pos_BT=visibility.q_pos_BT + 1, plain=False)
        return x, (ahead if cache is None else visibility), cache


@dataclasses.dataclass(frozen=True)
class OffByOne(Broken):
    """Leaves the slot before the newest out of what it hands on."""

    def gives(self, y, x, visibility, cache):
        if cache is not None:
            cache = cache.replace(pos_BS=jnp.roll(cache.pos_BS, 1, axis=1))
        return y, cache


@dataclasses.dataclass(frozen=True)
class SeesKeyZero(Broken):
    """Counts positions from the start of the call, as a triangle of the query length does."""

    def given(self, x, visibility, cache):
        if cache is not None:
            visibility = visibility.replace(q_pos_BT=jnp.maximum(visibility.q_pos_BT - 1, 0))
        return x, visibility, cache


@dataclasses.dataclass(frozen=True)
class IgnoresPadding(Broken):
    """Attends to padding as if it were a token."""

    def given(self, x, visibility, cache):
        real = visibility.replace(k_pos_BS=jnp.maximum(visibility.k_pos_BS, 0))
        return x, real, cache


@dataclasses.dataclass(frozen=True)
class IgnoresSegments(Broken):
    """Lets the documents of a packed row see each other."""

    def given(self, x, visibility, cache):
        return x, visibility.replace(q_segment_BT=None, k_segment_BS=None), cache


@dataclasses.dataclass(frozen=True)
class MixesRows(Broken):
    """Subtracts the mean of the batch."""

    def gives(self, y, x, visibility, cache):
        return y - y.mean(0, keepdims=True), cache


@dataclasses.dataclass(frozen=True)
class Widens(Broken):
    """Answers in float32 whatever it is asked in."""

    def gives(self, y, x, visibility, cache):
        return y.astype(jnp.float32), cache


@dataclasses.dataclass(frozen=True)
class ReadsEmptySlots(Broken):
    """Adds a little of the slots of the cache that nothing was written to."""

    def gives(self, y, x, visibility, cache):
        if cache is not None:
            y = y + 1e-9 * cache.v_BSKH[:, -1:, 0, :1]
        return y, cache


@dataclasses.dataclass(frozen=True)
class InfiniteSlope(Broken):
    """Its value is fine everywhere, its gradient is not where padding stands."""

    def gives(self, y, x, visibility, cache):
        root = jnp.sqrt(visibility.valid_BT.astype(y.dtype)[..., None] * y[..., :1] ** 2)
        return y + root, cache


ATTENTIONS = {
    Peeks: "its future",
    OffByOne: "decoding with caches",
    SeesKeyZero: "decoding with caches",
    IgnoresPadding: "padded on the left|stands in padding",
    IgnoresSegments: "document",
    MixesRows: "sees row 1",
    Widens: "attention returns float32 for an input in bfloat16",
    ReadsEmptySlots: "in slots not yet written",
    InfiniteSlope: "is not finite",
}


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_a_broken_attention_is_caught(kind):
    with pytest.raises(AssertionError, match=ATTENTIONS[kind]):
        check_box(kind(n_heads=4), position=NoPosition())


def test_the_box_that_is_broken_is_whole_without_its_fault():
    @dataclasses.dataclass(frozen=True)
    class Whole(Broken):
        pass

    check_box(Whole(n_heads=4), position=NoPosition())


@dataclasses.dataclass(frozen=True)
class Faulty(FFNBox):
    """A feed-forward box whose module is a function."""

    fault: str

    def build(self, dims, name=None):
        return _Faulty(self.fault, dims.dropout, name=name)


class _Faulty(nn.Module):
    fault: str
    rate: float

    @nn.compact
    def __call__(self, x_BTD, valid_BT, dropout_key=None):
        w = self.param("w", nn.initializers.normal(1.0), (x_BTD.shape[-1],)).astype(x_BTD.dtype)
        y_BTD, aux = jnp.tanh(x_BTD * w[None, None]), {}
        if self.fault == "counts padding":
            aux = {"mean": y_BTD.mean()}
        if self.fault == "drops without a key":
            y_BTD = y_BTD * (1 - self.rate)
        if self.fault == "wrong shape":
            y_BTD = y_BTD[:, :, :1]
        return y_BTD, aux


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("counts padding", r"padding counts in aux\['block_0'\]\['mean'\]"),
        ("drops without a key", "dropout without a dropout_key"),
        ("wrong shape", r"ffn returns \(2, 3, 1\), not \(2, 3, 16\)"),
    ],
)
def test_a_broken_ffn_is_caught(fault, message):
    with pytest.raises(AssertionError, match=message):
        check_box(Faulty(fault))


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
