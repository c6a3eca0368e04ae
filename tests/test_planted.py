# SPDX-License-Identifier: Apache-2.0
"""Boxes that break a promise, one fault each: the contract suite must name what is wrong."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxgpt.boxes.attention
from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import FFNBox
from jaxgpt.boxes.norm import NoNorm
from jaxgpt.boxes.position import Learned, NoPosition
from jaxgpt.boxes.rope import RoPE
from jaxgpt.kernels import attend
from jaxgpt.taps import tap
from jaxgpt.testing import check_box, tiny, zero_gradients

# --- attention ------------------------------------------------------------------------------------


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


@dataclasses.dataclass(frozen=True)
class Forgets(Broken):
    """A stale cache: new keys are marked as written, and are not."""

    def gives(self, y, x, visibility, cache):
        if cache is not None:
            cache = cache.replace(k_JSH=jnp.zeros_like(cache.k_JSH))
        return y, cache


@dataclasses.dataclass(frozen=True)
class NeverWrites(Broken):
    """A stale cache: its index stays where it was."""

    def gives(self, y, x, visibility, cache):
        if cache is not None:
            cache = cache.replace(index=cache.index - x.shape[1])
        return y, cache


@dataclasses.dataclass(frozen=True)
class Wider(GQA):
    """Sees one token more than its window."""

    by: int = 1

    def build(self, dims, name=None):
        return GQA.build(dataclasses.replace(self, window=self.window + self.by), dims, name)


@dataclasses.dataclass(frozen=True)
class Tiled(GQA):
    """With `tiled` in the place of `attend`: query head n reads key/value head n % n_kv_heads."""


def tiled(q_BTNH, k_BSKH, *args, **kwargs):
    order = jnp.arange(q_BTNH.shape[2]).reshape(-1, k_BSKH.shape[2]).T.reshape(-1)
    y_BTNH = attend(q_BTNH[:, :, order], k_BSKH, *args, **kwargs)
    return y_BTNH[:, :, jnp.argsort(order)]


ATTENTIONS = {
    Peeks(4): "its future",
    OffByOne(4): "decoding with caches",
    SeesKeyZero(4): "decoding with caches",
    Forgets(4): "decoding with caches",
    NeverWrites(4): "decoding with caches",
    IgnoresPadding(4): "padded on the left|stands in padding",
    IgnoresSegments(4): "document",
    MixesRows(4): "sees row 1",
    Widens(4): "attention returns float32 for an input in bfloat16",
    ReadsEmptySlots(4): "in slots not yet written",
    InfiniteSlope(4): "is not finite",
    Wider(4, window=4): "with window=4 position 4 sees token 0",
    Wider(4, window=4, by=-1): "with window=4 position 3 does not see token 0",
    Tiled(4, n_kv_heads=2): "2 key/value heads for 4 query heads",
}


@pytest.mark.parametrize("box", ATTENTIONS, ids=repr)
def test_a_broken_attention_is_caught(box, monkeypatch):
    if isinstance(box, Tiled):
        monkeypatch.setattr(jaxgpt.boxes.attention, "attend", tiled)
    with pytest.raises(AssertionError, match=ATTENTIONS[box]):
        check_box(box, position=NoPosition(), n_layers=1)


@pytest.mark.slow
def test_the_boxes_that_are_broken_are_whole_without_their_fault():
    @dataclasses.dataclass(frozen=True)
    class Whole(Broken):
        pass

    check_box(Whole(n_heads=4), position=NoPosition(), n_layers=1)
    check_box(Wider(n_heads=4, window=4, by=0), position=NoPosition(), n_layers=1)
    check_box(Faulty("none"), n_layers=1)


# --- positions ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Still(RoPE):
    """Rotates nothing."""

    def rotate(self, x_BTNH, pos_BT):
        return x_BTNH


@dataclasses.dataclass(frozen=True)
class Restarts(RoPE):
    """Forgets the position where one token is decoded."""

    def rotate(self, x_BTNH, pos_BT):
        return RoPE.rotate(self, x_BTNH, pos_BT if pos_BT.shape[1] > 1 else 0 * pos_BT)


@dataclasses.dataclass(frozen=True)
class Counts(Learned):
    """Counts the tokens of the call instead of reading their positions."""

    def build(self, dims, name=None):
        return _Counts(self, dims, name=name)


class _Counts(nn.Module):
    box: Counts
    dims: object

    @nn.compact
    def __call__(self, x_BTD, pos_BT):
        count_BT = jnp.broadcast_to(jnp.arange(pos_BT.shape[1]), pos_BT.shape)
        return Learned.build(self.box, self.dims, name="inner")(x_BTD, count_BT)


POSITIONS = {
    Still(): "positions of Still have no influence",
    Restarts(): "decoding with caches",
    Counts(): "padded on the left",
}


@pytest.mark.parametrize("box", POSITIONS, ids=repr)
def test_a_broken_position_is_caught(box):
    with pytest.raises(AssertionError, match=POSITIONS[box]):
        check_box(box, n_layers=1)


# --- feed-forward ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Faulty(FFNBox):
    """A feed-forward box whose module is a function, with a fault."""

    fault: str

    def build(self, dims, name=None):
        return _Faulty(self.fault, dims.dropout, name=name)


class _Faulty(nn.Module):
    fault: str
    rate: float

    @nn.compact
    def __call__(self, x_BTD, valid_BT, dropout_key=None):
        w = self.param("w", nn.initializers.normal(1.0), (x_BTD.shape[-1],)).astype(x_BTD.dtype)
        if self.fault == "stops the gradient":
            w = jax.lax.stop_gradient(w)
        y_BTD, aux = jnp.tanh(x_BTD * w[None, None]), {}
        match self.fault:
            case "counts padding":
                aux = {"mean": y_BTD.mean()}
            case "drops without a key":
                y_BTD *= 1 - self.rate
            case "wrong shape":
                y_BTD = y_BTD[:, :, :1]
            case "mixes tokens":
                y_BTD += 0.1 * jnp.cumsum(y_BTD, 1)
            case "another in bfloat16" if x_BTD.dtype == jnp.bfloat16:
                y_BTD = -y_BTD
            case "knows its layer" if "block_1" in self.path:
                y_BTD *= 2
            case "goes on without its site":
                tap(self, "hidden", y_BTD)
        return y_BTD, aux


FAULTS = {
    "counts padding": "padding counts in aux/block_0/mean",
    "drops without a key": "dropout without a dropout_key",
    "wrong shape": r"ffn returns \(2, 3, 1\), not \(2, 3, 16\)",
    "mixes tokens": "Faulty mixes tokens: with token 6 changed, the others",
    "stops the gradient": "the gradient of block_0/ffn/w is zero",
    "another in bfloat16": "logits in bfloat16 are off",
    "knows its layer": "with remat and scan",
    "goes on without its site": "what is put at block_0/ffn/hidden is not used",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_ffn_is_caught(fault):
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        check_box(Faulty(fault))


def test_parameters_without_a_gradient_must_be_named_and_be_so():
    zero = {"block_*/ffn/w": "it is stopped"}
    check_box(Faulty("stops the gradient"), zero=zero)
    with pytest.raises(AssertionError, match=r"ffn/w should be zero \(it is stopped\)"):
        check_box(Faulty("none"), zero=zero)
    shifted = GQA(4, qk_norm=NoNorm(), sinks=True)  # sinks: a shift of all scores is seen
    assert zero_gradients(tiny(attention=shifted)) == {}
