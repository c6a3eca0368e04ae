# SPDX-License-Identifier: Apache-2.0
"""What `boxes/base.py` promises of any model: who sees whom, caches, dtypes, values."""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxgpt.masks import Visibility
from jaxgpt.model import ModelConfig, forward, init_params
from jaxgpt.shapes import Params
from jaxgpt.testing.sites import known_sites
from jaxgpt.testing.tools import (
    LENGTH,
    TOLERANCE,
    assert_close,
    assert_padded,
    jit_forward,
    logits,
    pairs,
    tokens,
)

CHUNKS = (LENGTH,), (3,) * (LENGTH // 3), (1,) * LENGTH  # how a cache is fed


def check_value(box: Any) -> None:
    """A config is a value: frozen, hashable, equal to its copies."""
    name, twin = type(box).__name__, copy.deepcopy(box)
    assert dataclasses.is_dataclass(box), f"{name} is not a dataclass"
    assert twin == box, f"{name} differs from its own copy"
    try:
        assert hash(twin) == hash(box), f"{name} hashes differently from an equal copy"
    except TypeError as error:
        raise AssertionError(f"{name} is not hashable: {error}") from None
    try:
        twin.changed = 1
    except dataclasses.FrozenInstanceError:
        return
    raise AssertionError(f"{name} is not frozen: write @dataclasses.dataclass(frozen=True)")


def check_types(cfg: ModelConfig) -> None:
    """Shape and dtype follow the input, parameters are float32; nothing is computed."""
    layer, (B, T, D) = cfg.layers[0], (2, 3, cfg.d_model)
    dims, visibility, key = cfg.dims(layer), Visibility.full(B, T), jax.random.key(0)
    params = jax.eval_shape(functools.partial(init_params, cfg), key)

    def check(name: str, y: Any, shape: tuple[int, ...], dtype: Any) -> None:
        assert y.shape == shape, f"{name} returns {y.shape}, not {shape}"
        assert y.dtype == dtype, f"{name} returns {y.dtype} for an input in {jnp.dtype(dtype)}"

    for dtype in (jnp.float32, jnp.bfloat16):
        x_BTD, q_BTNH = jnp.zeros((B, T, D), dtype), jnp.zeros((B, T, 4, D // 4), dtype)
        for name, module, *args in (
            ("norm", layer.norm.build()),
            ("final_norm", cfg.final_norm.build()),
            ("position", cfg.position.build(dims), visibility.q_pos_BT),
            ("attention", layer.attention.build(dims), visibility, None, None),
            ("ffn", layer.ffn.build(dims), visibility.valid_BT, None),
            ("block", layer.block.build(dims, layer), visibility, None, None),
        ):
            y, variables = jax.eval_shape(module.init_with_output, key, x_BTD, *args)
            check(name, y[0] if isinstance(y, tuple) else y, x_BTD.shape, dtype)
            for leaf in jax.tree.leaves(variables):
                assert leaf.dtype == jnp.float32, f"{name} has a parameter in {leaf.dtype}"
        rotated = jax.eval_shape(layer.position.rotate, q_BTNH, visibility.q_pos_BT)
        check("position.rotate", rotated, q_BTNH.shape, dtype)
        run = functools.partial(forward, cfg, dtype=dtype)
        out = jax.eval_shape(run, params, jnp.zeros((B, T), jnp.int32))
        check("logits", out.logits_BTV, (B, T, dims.padded_vocab_size), dtype)


def check_causality(cfg: ModelConfig, params: Params) -> None:
    """Logits before a changed token stay the same bit for bit; from it on they change."""
    tokens_BT, _ = tokens()
    before = logits(cfg, params, tokens_BT)
    for t in range(1, LENGTH):
        changed_BT = np.where(np.arange(LENGTH) == t, tokens_BT ^ 1, tokens_BT)
        same_T = (before == logits(cfg, params, changed_BT)).all((0, 2))
        assert same_T[:t].all(), f"position {np.argmin(same_T)} sees token {t}, its future"
        assert not same_T[t], f"token {t} has no influence on its own logits"


def check_rows(cfg: ModelConfig, params: Params) -> None:
    """A row of the batch does not see the others; ids past the vocabulary get -inf."""
    tokens_BT, _ = tokens()
    before = logits(cfg, params, tokens_BT)
    tokens_BT[1] = tokens_BT[1] ^ 1
    assert (logits(cfg, params, tokens_BT)[0] == before[0]).all(), "row 0 of a batch sees row 1"
    filler = jit_forward(cfg, params, tokens_BT).logits_BTV[..., cfg.vocab_size :]
    assert (np.asarray(filler) == -np.inf).all(), "logits of ids past the vocabulary are not -inf"


def check_padding(cfg: ModelConfig, params: Params) -> None:
    """Padding on the left (position -1) changes nothing, and what stands there has no influence."""
    want = logits(cfg, params, tokens()[0])
    tokens_BT, pos_BT = tokens(padded=True)
    got = logits(cfg, params, tokens_BT, pos_BT=pos_BT)
    assert_padded(got, want, "the full forward")
    changed_BT = np.where(pos_BT < 0, tokens_BT ^ 1, tokens_BT)
    again = logits(cfg, params, changed_BT, pos_BT=pos_BT)
    assert (again == got)[pos_BT >= 0].all(), "tokens see what stands in padding"
    aux = [jit_forward(cfg, params, t, pos_BT=pos_BT).aux for t in (tokens_BT, changed_BT)]
    for path, one, other in pairs(*aux):
        assert (one == other).all(), f"padding counts in aux/{path}"


def check_packing(cfg: ModelConfig, params: Params) -> None:
    """Documents packed into one row give what each gives alone."""
    (tokens_BT, _), cut = tokens(), LENGTH - 7
    alone = logits(cfg, params, tokens_BT)
    packed_BT = np.concatenate([tokens_BT[:, :cut], tokens_BT[::-1, : LENGTH - cut]], 1)
    segment_BT = np.tile(np.arange(LENGTH) // cut, (2, 1)).clip(0, 1)
    pos_BT = np.arange(LENGTH)[None] - cut * segment_BT
    got = logits(cfg, params, packed_BT, pos_BT=pos_BT, segment_BT=segment_BT)
    assert_close(got[:, :cut], alone[:, :cut], TOLERANCE, "the first document of a packed row")
    second = alone[::-1, : LENGTH - cut]
    assert_close(got[:, cut:], second, TOLERANCE, "the second document of a row")


def check_cache(cfg: ModelConfig, params: Params) -> None:
    """Decoding with caches equals the full forward; slots not yet written have no influence.

    A model whose attention has no cache passes. Slots are the arrays with an axis of length.
    """
    length = LENGTH + 3
    try:
        empty = cfg.init_caches(2, length)
    except NotImplementedError:
        return
    want = logits(cfg, params, tokens()[0])
    for chunks in CHUNKS:
        fed = f"decoding with caches, fed by {chunks[0]} tokens"
        assert_close(_decode(cfg, params, *tokens(), chunks, empty), want, TOLERANCE, fed)
        assert_padded(_decode(cfg, params, *tokens(padded=True), chunks, empty), want, fed)

    def fill(a: Array, rubbish: float) -> Array:
        slots = length in a.shape and jnp.issubdtype(a.dtype, jnp.floating)
        return jnp.full_like(a, rubbish) if slots else a

    got = _decode(cfg, params, *tokens(), CHUNKS[1], empty)
    for rubbish in (np.nan, 1e4):
        filled = jax.tree.map(functools.partial(fill, rubbish=rubbish), empty)
        again = _decode(cfg, params, *tokens(), CHUNKS[1], filled)
        assert (again == got).all(), f"{rubbish} in slots not yet written changes the logits"


def _decode(
    cfg: ModelConfig,
    params: Params,
    tokens_BT: np.ndarray,
    pos_BT: np.ndarray,
    chunks: Sequence[int],
    caches: Any,
) -> np.ndarray:
    """Logits of rows fed in chunks."""
    start, found = 0, []
    for end in np.cumsum(chunks):
        fed = slice(start, end)
        out = jit_forward(cfg, params, tokens_BT[:, fed], pos_BT=pos_BT[:, fed], caches=caches)
        caches, start = out.caches, end
        found.append(np.asarray(out.logits_BTV)[..., : cfg.vocab_size])
    return np.concatenate(found, 1)


def check_precision(cfg: ModelConfig, params: Params) -> None:
    """Logits in bfloat16 are close to those in float32, with the same experts chosen."""
    tokens_BT, _ = tokens()
    sites = [site for site in known_sites(cfg) if site.endswith("/router_logits")]
    exact = jit_forward(cfg, params, tokens_BT, capture=tuple(sites))
    patch = exact.captured or None
    got = logits(cfg, params, tokens_BT, dtype=jnp.bfloat16, patch=patch).astype(np.float32)
    want = np.asarray(exact.logits_BTV)[..., : cfg.vocab_size]
    error = np.sqrt(np.square(got - want).mean() / np.square(want).mean())
    assert error < 0.05, f"logits in bfloat16 are off by {error:.2g} of those in float32"
