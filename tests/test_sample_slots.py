# SPDX-License-Identifier: Apache-2.0
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.boxes.attention import GQA
from jaxgpt.cache import KVCache
from jaxgpt.sample.slots import cache_slots, can_grow, grow, prompt_widths
from jaxgpt.testing import tiny


@pytest.mark.parametrize(
    ("longest", "context_length", "prefill_chunk", "widths"),
    [
        (1, 8192, 512, [16]),
        (16, 8192, 512, [16]),
        (50, 8192, 512, [64]),
        (128, 8192, 512, [128]),
        (129, 8192, 512, [192]),
        (512, 8192, 512, [512]),
        (513, 8192, 512, [16, 512]),
        (1100, 8192, 512, [128, 512, 512]),
        (2048, 8192, 2048, [2048]),  # without padding
        (9000, 2048, 512, [512] * 4),  # what is before the context is not seen
        (12, 12, 512, [12]),
        (100, 1000, 7, [7] * 15),
    ],
)
def test_widths(longest, context_length, prefill_chunk, widths):
    got = prompt_widths(longest, context_length, prefill_chunk)
    assert got == widths


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 3000))
def test_a_prompt_fits_with_little_padding_and_so_does_the_context_behind_it(longest, L, chunk):
    widths = prompt_widths(longest, L, chunk)
    longest = min(longest, L)
    padding = sum(widths) - longest
    assert 0 <= padding < (64 if longest > 64 else 16)
    assert max(widths) <= chunk
    needed = sum(widths) + L - longest
    assert cache_slots(needed, L) >= needed
    assert cache_slots(needed, L) == cache_slots(L, L)  # of no further size


@pytest.mark.parametrize(
    ("context_length", "sizes"),
    [
        (12, [32]),
        (256, [320]),
        (1024, [320, 576, 1088]),
        (8192, [320, 576, 1088, 2112, 4160, 8256]),
    ],
)
def test_caches_have_few_sizes_each_about_twice_the_last(context_length, sizes):
    got = [cache_slots(needed, context_length) for needed in range(1, context_length + 1)]
    assert sorted(set(got)) == sizes
    assert all(slots >= needed for needed, slots in enumerate(got, 1))
    assert all(slots < 2 * needed + 64 for needed, slots in enumerate(got, 1) if needed > sizes[0])


def test_more_than_the_context_can_be_asked_for():
    assert cache_slots(1100, 1024) == 1152


def test_growing_keeps_what_is_there_and_frees_the_old_memory():
    cache = KVCache.empty(2, 4, 3, 5, jnp.float32)
    kv = jnp.arange(2 * 3 * 3 * 5.0).reshape(2, 3, 3, 5)
    cache = cache.extend(kv, -kv, jnp.array([[-1, 0, 1], [0, 1, 2]]))
    before = jax.tree.map(np.asarray, cache.k_BSKH)
    [longer] = grow((cache,), 9)
    assert longer.pos_BS.tolist() == [[-1, 0, 1, *[-1] * 6], [0, 1, 2, *[-1] * 6]]
    np.testing.assert_array_equal(longer.k_BSKH[:, :4], before)
    assert longer.index == 3 and not longer.k_BSKH[:, 4:].any()
    assert cache.pos_BS.is_deleted()


def test_boxes_of_ones_own_need_not_grow():
    class Rigid:
        def __init__(self, cache):
            self.cache = cache

    @dataclasses.dataclass(frozen=True)
    class Own(GQA):
        def init_cache(self, *args):
            return Rigid(super().init_cache(*args))

    assert can_grow(tiny(attention=GQA(4)))
    assert not can_grow(tiny(attention=Own(4)))
