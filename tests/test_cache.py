# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.cache import KVCache, LatentCache


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
