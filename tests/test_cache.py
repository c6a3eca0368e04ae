# SPDX-License-Identifier: Apache-2.0
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.rope import RoPE
from jaxgpt.cache import KVCache, LatentCache
from jaxgpt.model import forward, param_shapes
from jaxgpt.testing.tools import jit_init, tiny


def keys(length, start=1.0):
    return jnp.full((2, length, 3, 4), start) + jnp.arange(length)[None, :, None, None]


def test_an_empty_cache_has_no_positions():
    cache = KVCache.empty(2, 5, 3, 4, jnp.bfloat16)
    assert cache.k_BSKH.shape == cache.v_BSKH.shape == (2, 5, 3, 4)
    assert cache.k_BSKH.dtype == jnp.bfloat16 and cache.index == 0
    assert (cache.pos_BS == -1).all()


def test_tokens_are_written_behind_those_that_are_there():
    cache = KVCache.empty(2, 5, 3, 4, jnp.float32)
    pos = jnp.array([[-1, 0], [0, 1]])
    first = cache.extend(keys(2), -keys(2), pos)
    second = jax.jit(KVCache.extend)(first, keys(1, 9.0), -keys(1, 9.0), pos[:, 1:] + 1)
    assert second.index == 3
    assert second.pos_BS.tolist() == [[-1, 0, 1, -1, -1], [0, 1, 2, -1, -1]]
    assert second.k_BSKH[1, :, 2, 3].tolist() == [1, 2, 9, 0, 0]
    assert np.array_equal(second.v_BSKH, -second.k_BSKH)
    assert cache.index == 0 and (cache.pos_BS == -1).all() and not first.k_BSKH[:, 2:].any()


def test_values_are_kept_in_the_dtype_of_the_cache():
    cache = KVCache.empty(2, 5, 3, 4, jnp.bfloat16).extend(keys(1), keys(1), jnp.zeros((2, 1), int))
    assert cache.k_BSKH.dtype == cache.v_BSKH.dtype == jnp.bfloat16


def test_more_tokens_than_slots_are_refused():
    with pytest.raises(ValueError, match="6 tokens do not fit into a cache of 5 slots"):
        KVCache.empty(2, 5, 3, 4, jnp.float32).extend(keys(6), keys(6), jnp.zeros((2, 6), int))


def test_latents_and_rotary_keys_are_written_behind_those_that_are_there():
    cache = LatentCache.empty(2, 5, 6, 4, jnp.bfloat16)
    assert cache.latent_BSR.shape == (2, 5, 6) and cache.key_BSP.shape == (2, 5, 4)
    pos = jnp.array([[-1, 0], [0, 1]])
    first = cache.extend(jnp.ones((2, 2, 6)), jnp.full((2, 2, 4), 2.0), pos)
    extend = jax.jit(LatentCache.extend)
    second = extend(first, jnp.full((2, 1, 6), 3.0), jnp.full((2, 1, 4), 4.0), pos[:, 1:] + 1)
    assert second.index == 3
    assert second.pos_BS.tolist() == [[-1, 0, 1, -1, -1], [0, 1, 2, -1, -1]]
    assert second.latent_BSR[1, :, 5].tolist() == [1, 1, 3, 0, 0]
    assert second.key_BSP[0, :, 3].tolist() == [2, 2, 4, 0, 0]
    assert second.latent_BSR.dtype == second.key_BSP.dtype == jnp.bfloat16
    assert cache.index == 0 and not first.latent_BSR[:, 2:].any()


def test_more_latents_than_slots_are_refused():
    cache = LatentCache.empty(2, 5, 6, 4, jnp.float32)
    with pytest.raises(ValueError, match="6 tokens do not fit into a cache of 5 slots"):
        cache.extend(jnp.ones((2, 6, 6)), jnp.ones((2, 6, 4)), jnp.zeros((2, 6), int))


EMPTY = [KVCache.empty(2, 5, 3, 4, jnp.float32), LatentCache.empty(2, 5, 3, 4, jnp.float32)]


def filled(cache, length, pos=None):
    """The cache with `length` more tokens, distinguishable by their slot."""
    start = float(np.max(cache.index))
    pos = start + jnp.arange(length, dtype=jnp.float32)[None] + jnp.zeros((2, 1))
    heads = (3,) if isinstance(cache, KVCache) else ()
    new = [
        jnp.broadcast_to(
            pos.reshape(2, length, *[1] * (len(heads) + 1)) + 1, (2, length, *heads, n)
        )
        for n in ((4, 4) if heads else (3, 4))
    ]
    return cache.extend(*new, pos.astype(jnp.int32))


def assert_same(cache, other):
    assert jax.tree.structure(cache) == jax.tree.structure(other)
    for one, two in zip(jax.tree.leaves(cache), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("empty", EMPTY, ids=["kv", "latent"])
def test_a_grown_cache_holds_what_a_longer_one_would(empty):
    assert_same(filled(filled(empty, 3).grown(9), 4), filled(filled(empty.grown(9), 3), 4))
    with pytest.raises(ValueError, match="5 slots cannot grow to 4"):
        empty.grown(4)


@pytest.mark.parametrize("empty", EMPTY, ids=["kv", "latent"])
def test_a_rewound_cache_goes_on_from_there(empty):
    cache = jax.jit(type(empty).rewound)(filled(empty, 4), 2)
    assert cache.index == 2 and cache.pos_BS.tolist() == [[0, 1, -1, -1, -1]] * 2
    assert_same(filled(cache, 2), filled(empty, 4))
    each = filled(empty, 4).rewound(jnp.array([1, 3]))
    assert each.pos_BS.tolist() == [[0, -1, -1, -1, -1], [0, 1, 2, -1, -1]]
    each = filled(each, 1)
    assert each.index.tolist() == [2, 4]
    assert (each.pos_BS >= 0).sum(1).tolist() == [2, 4]


CACHED = {
    "gqa": tiny(attention=GQA(n_heads=4, n_kv_heads=2), position=RoPE()),
    "window": tiny(attention=GQA(n_heads=4, window=3)),
    "mla": tiny(attention=MLA(n_heads=2, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=4)),
}


@pytest.mark.parametrize("cfg", CACHED.values(), ids=CACHED)
@pytest.mark.parametrize("padded", [False, True])
def test_caches_begun_by_a_call_are_those_it_would_extend(cfg, padded):
    params = jit_init(cfg, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, 31)
    pos = jnp.arange(7)[None] - (jnp.array([[2], [0]]) if padded else jnp.zeros((2, 1), int))
    pos = jnp.maximum(pos, -1)
    run = jax.jit(functools.partial(forward, cfg), static_argnames="caches")
    begun = run(params, tokens, pos_BT=pos if padded else None, caches=9)
    old = jax.jit(functools.partial(forward, cfg))(
        params, tokens, pos_BT=pos, caches=cfg.init_caches(2, 9)
    )
    real = np.asarray(pos) >= 0
    logits = (np.asarray(out.logits_BTV)[real][:, :31] for out in (begun, old))
    np.testing.assert_allclose(*logits, atol=1e-5)
    assert jax.tree.structure(begun.caches) == jax.tree.structure(old.caches)
    for one, other in zip(jax.tree.leaves(begun.caches), jax.tree.leaves(old.caches), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_begun_caches_have_the_compute_dtype_and_must_hold_the_tokens():
    cfg, ones = CACHED["gqa"], jnp.ones((2, 7), jnp.int32)

    def keys(params, **call):
        caches = forward(cfg, params, ones, **call).caches
        return [cache.k_BSKH for cache in caches]

    def shapes(**call):
        return jax.eval_shape(functools.partial(keys, **call), param_shapes(cfg))

    for key in shapes(caches=9, dtype=jnp.bfloat16):
        assert key.shape == (2, 9, 2, 4) and key.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="7 tokens do not fit into a cache of 6 slots"):
        shapes(caches=6)
    with pytest.raises(ValueError, match="segments cannot be used with a cache"):
        shapes(caches=9, pos_BT=ones, segment_BT=ones)


def whole(text, size):
    """Instructions of a compiled program that make an array of at least this size, by kind."""
    found = {"copy": 0, "write": 0, "other": 0}
    for name, shape, op in re.findall(r"%([\w.-]+) = \w+\[([\d,]+)\]\S* ([\w-]+)\(", text):
        if math.prod(map(int, shape.split(","))) < size:
            continue
        if op in ("copy", "transpose"):
            found["copy"] += 1
        elif op == "fusion":
            found["write" if "dynamic-update-slice" in name else "other"] += 1
    return found


def decoding(cfg, slots, wrap=lambda caches: caches):
    """The compiled text of a loop of steps over caches that it is given."""

    caches, tree = jax.tree.flatten(cfg.init_caches(2, slots))

    def steps(params, caches):
        def step(i, carry):
            token_B, caches = carry
            pos_BT = jnp.full((2, 1), i)
            out = forward(cfg, params, token_B[:, None], pos_BT=pos_BT, caches=wrap(caches))
            return out.logits_BTV[:, 0].argmax(-1).astype(jnp.int32), out.caches

        start = jnp.zeros(2, jnp.int32), jax.tree.unflatten(tree, caches)
        return jax.tree.leaves(jax.lax.fori_loop(0, 9, step, start))

    step = jax.jit(steps, donate_argnums=1)
    return step.lower(param_shapes(cfg), caches).compile().as_text()


def test_a_step_writes_caches_in_place_and_copies_none():
    cfg, slots = CACHED["gqa"], 512
    size = 2 * 2 * slots * 4
    found = whole(decoding(cfg, slots), size)
    # Keys and values of two layers; what else there is stands in the branch for NaN in empty slots.
    assert found["copy"] == 0 and found["write"] == 4 and found["other"] <= 2, found

    def turned(caches):
        """As a cache would be read that has heads behind slots."""
        turn = functools.partial(jax.tree.map, lambda a: jnp.roll(a, 1, 0) if a.ndim == 3 else a)
        return turn(caches)

    assert sum(whole(decoding(cfg, slots, turned), size).values()) > 6
