# SPDX-License-Identifier: Apache-2.0
"""What the boxes of one layer promise: windows, groups of heads, tokenwise FFNs, positions.

Boxes are run alone here, with parameters of their own, where the model around them would blur what
is looked for.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jaxgpt.boxes.base import PositionBox
from jaxgpt.layers import Layer
from jaxgpt.masks import Visibility
from jaxgpt.model import ModelConfig
from jaxgpt.shapes import Params
from jaxgpt.testing.tools import LENGTH, assert_close, logits, quick_jit, tokens

GAP = 2  # positions left out in the middle of a row


def check_window(cfg: ModelConfig) -> None:
    """An attention with a `window` of W sees the W - 1 tokens before its own, and no more."""
    for layer, module in _attentions(cfg):
        window = getattr(layer.attention, "window", None)
        if window is None:
            continue
        x_TD, other_TD = _random(2, LENGTH, cfg.d_model)
        each_TT1 = np.eye(LENGTH, dtype=bool)[..., None]
        x_BTD = np.concatenate([x_TD[None], np.where(each_TT1, other_TD, x_TD)])
        args = x_BTD, Visibility.full(*x_BTD.shape[:2]), None, None
        y_BTD = _run(module, _draw(module, *args), *args)
        seen_ST = (y_BTD[1:] != y_BTD[0]).any(-1)
        distance_ST = np.arange(LENGTH) - np.arange(LENGTH)[:, None]
        for s, t in np.argwhere(seen_ST != ((distance_ST >= 0) & (distance_ST < window))):
            sees = "sees" if seen_ST[s, t] else "does not see"
            raise AssertionError(f"with window={window} position {t} {sees} token {s}")


def check_groups(cfg: ModelConfig) -> None:
    """Query head n reads key/value head n // (n_heads / n_kv_heads).

    Attention of a box with both knobs equals that of as many key/value heads as query heads, whose
    parameters are the given ones, those of each head repeated in place.
    """
    for layer, module in _attentions(cfg):
        box: Any = layer.attention
        n_heads, n_kv_heads = (getattr(box, name, None) for name in ("n_heads", "n_kv_heads"))
        if n_heads is None or n_kv_heads in (None, n_heads):
            continue
        whole = dataclasses.replace(box, n_kv_heads=n_heads).build(cfg.dims(layer))
        args = _random(2, LENGTH, cfg.d_model), Visibility.full(2, LENGTH), None, None
        params = _draw(module, *args)
        repeat = functools.partial(_repeat, n_kv_heads)
        repeated = jax.tree.map(repeat, params, _draw(whole, *args))
        got, want = _run(module, params, *args), _run(whole, repeated, *args)
        what = f"{n_kv_heads} key/value heads for {n_heads} query heads"
        assert_close(got, want, 1e-5, f"{what}, against each of them repeated")


def check_tokenwise(cfg: ModelConfig) -> None:
    """An FFN works on each token for itself: a changed token changes no other."""
    for ffn in dict.fromkeys(layer.ffn for layer in cfg.layers):
        module, t = ffn.build(cfg.dims()), LENGTH // 2
        x_BTD, other_BTD = _random(2, 2, LENGTH, cfg.d_model)
        other_BTD = np.where(np.arange(LENGTH)[:, None] == t, other_BTD, x_BTD)
        valid_BT = np.ones((2, LENGTH), bool)
        params = _draw(module, x_BTD, valid_BT, None)
        got, want = (_run(module, params, x, valid_BT, None) for x in (x_BTD, other_BTD))
        mixes = f"{type(ffn).__name__} mixes tokens: with token {t} changed, the others"
        assert_close(np.delete(got, t, 1), np.delete(want, t, 1), 1e-5, mixes)


def check_position(cfg: ModelConfig, params: Params) -> None:
    """A gap in the positions reaches the logits, if any position box does anything."""
    relative = (
        is_rotary(layer.position) or type(layer.position).bias is not PositionBox.bias
        for layer in cfg.layers
        if getattr(layer.attention, "window", None) != 1  # of one key, whatever its score
    )
    if type(cfg.position).build is PositionBox.build and not any(relative):
        return
    tokens_BT, pos_BT = tokens()
    gap_BT = pos_BT + GAP * (pos_BT >= LENGTH // 2)
    same = [logits(cfg, params, tokens_BT, pos_BT=pos) for pos in (pos_BT, gap_BT)]
    name = type(cfg.position).__name__
    assert (same[0] != same[1]).any(), f"positions of {name} have no influence on the logits"


def is_rotary(box: PositionBox) -> bool:
    """Whether a position box changes queries and keys."""
    return type(box).rotate is not PositionBox.rotate


def _attentions(cfg: ModelConfig) -> Iterator[tuple[Layer, nn.Module]]:
    """Each attention of the model once, as a module."""
    found = {(layer.attention, layer.position): layer for layer in cfg.layers}
    for layer in found.values():
        yield layer, layer.attention.build(cfg.dims(layer))


def _draw(module: nn.Module, *args: Any) -> Params:
    """Kernels that keep the size of what they are multiplied with, and vectors around one."""
    shapes = jax.eval_shape(functools.partial(module.init, jax.random.key(0)), *args)
    rng = np.random.default_rng(1)

    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        mean, std = (1, 0.2) if leaf.ndim < 2 else (0, leaf.shape[-2] ** -0.5)
        return rng.normal(mean, std, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(draw, shapes.get("params", {}))


def _run(module: nn.Module, params: Params, *args: Any) -> np.ndarray:
    """The first of what an attention or an FFN returns."""
    return np.asarray(quick_jit(lambda p, *a: module.apply({"params": p}, *a)[0])(params, *args))


def _repeat(n_kv_heads: int, a: np.ndarray, like: np.ndarray) -> np.ndarray:
    """`a`, with the part of each head repeated along the axis where `like` is longer."""
    for axis in np.flatnonzero(np.not_equal(a.shape, like.shape)):
        heads = a.reshape(*a.shape[:axis], n_kv_heads, -1, *a.shape[axis + 1 :])
        a = heads.repeat(like.shape[axis] // a.shape[axis], axis).reshape(like.shape)
    return a


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)
