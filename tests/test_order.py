# SPDX-License-Identifier: Apache-2.0
"""Which samples a step has, and which window a sample is; their use is in test_batches.py."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data.order import Sizes, count_windows, permute, window_starts
from jaxgpt.errors import ConfigError


@pytest.mark.parametrize("n_windows", [1, 2, 3, 7, 1000])
def test_permutation_is_a_bijection(n_windows):
    place = np.arange(n_windows, dtype=np.uint64)
    for key in range(20):
        image = permute(place, n_windows, np.full(n_windows, key, np.uint64))
        assert sorted(image.tolist()) == list(range(n_windows))


def test_permutations_of_a_small_set_all_occur():
    place = np.arange(3, dtype=np.uint64)
    seen = Counter(
        tuple(permute(place, 3, np.full(3, key, np.uint64)).tolist()) for key in range(600)
    )
    assert len(seen) == 6 and min(seen.values()) > 40


def test_permutation_of_a_huge_set_stays_inside_and_apart():
    n = 2**33 - 5
    place = np.concatenate([np.arange(5000), n - 1 - np.arange(5000)]).astype(np.uint64)
    image = permute(place, n, np.zeros(10_000, np.uint64))
    assert len(set(image.tolist())) == 10_000 and image.max() < n
    assert 0.45 < np.mean(image < n / 2) < 0.55
    assert abs(np.corrcoef(place[:5000].astype(float), image[:5000].astype(float))[0, 1]) < 0.05


def test_each_place_has_its_own_key():
    place = np.array([3, 3, 5, 5], np.uint64)
    key = np.array([0, 1, 0, 1], np.uint64)
    mixed = permute(place, 1000, key)
    for i in range(4):
        assert mixed[i] == permute(place[i : i + 1], 1000, key[i : i + 1])[0]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.dictionaries(st.integers(0, 12), st.integers(1, 9), max_size=4))
def test_samples_before_a_step_are_those_of_all_steps_before(first, changes):
    sizes, rows, total = Sizes(first, changes), first, 0
    for step in range(20):
        rows = changes.get(step, rows)
        assert (sizes.at(step), sizes.before(step)) == (rows, total)
        assert sizes.samples(step).tolist() == list(range(total, total + rows))
        assert rows in sizes.all()
        total += rows
    assert set(sizes.all()) == {sizes.at(step) for step in range(20)}


def test_sample_numbers_are_exact_where_32_and_53_bits_end():
    sizes = Sizes(2**20, {3: 2**20 + 1})
    step = 2**40
    assert sizes.before(step) == 2**60 + step - 3
    assert sizes.samples(step, slice(0, 2)).tolist() == [sizes.before(step), sizes.before(step) + 1]


@pytest.mark.parametrize("changes", [{-1: 3}, {2: 0}, {0: -4}])
def test_sizes_that_cannot_be(changes):
    with pytest.raises(ConfigError, match="steps count from 0, rows from 1"):
        Sizes(4, changes)


def test_windows_lie_inside_whatever_the_number_of_ids():
    for n_tokens, context_length in ((5, 4), (9, 4), (10, 4), (2**33 + 3, 1024)):
        n_windows = count_windows(n_tokens, context_length)
        sample_B = np.arange(min(n_windows, 2000), dtype=np.int64) + 5 * n_windows
        start_B = window_starts(sample_B, n_tokens, context_length, seed=3)
        assert len(set(start_B.tolist())) == len(sample_B) and start_B.min() >= 0
        assert start_B.max() + context_length < n_tokens
