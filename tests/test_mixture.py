# SPDX-License-Identifier: Apache-2.0
"""Shares of several texts: exact over the pattern, close everywhere, and each text read in full."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data.batches import Batches
from jaxgpt.data.mixture import PLACES, MixedBatches, Pattern
from jaxgpt.data.order import Sizes
from jaxgpt.data.packing import Boundary
from jaxgpt.errors import ConfigError

WEIGHTS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None)
@given(WEIGHTS)
def test_shares_are_the_nearest_and_no_text_is_left_out(weights):
    pattern = Pattern.of(weights)
    assert sum(pattern.counts) == PLACES and min(pattern.counts) >= 1
    asked = np.array(weights) / sum(weights)
    small = (asked < 1 / PLACES).sum()  # they got a place each, which others lack
    assert max(abs(pattern.shares - asked)) <= (1 + small) / PLACES
    assert Pattern.of([3 * weight for weight in weights]).counts == pytest.approx(
        pattern.counts, abs=1
    )


def test_shares_are_pinned():
    """Runs are resumed by later versions: the pattern is part of the format."""
    pattern = Pattern.of([0.7, 0.3])
    assert pattern.counts == (2867, 1229)
    text_B, sample_B = pattern.split(np.arange(12))
    assert text_B.tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert sample_B.tolist() == [0, 1, 2, 0, 3, 4, 5, 1, 6, 7, 8, 2]
    far = 10**15 * PLACES + 3
    assert [x.tolist() for x in pattern.split(np.array([far]))] == [[1], [10**15 * 1229]]


@settings(max_examples=30, deadline=None)
@given(WEIGHTS, st.integers(0, 10**12))
def test_samples_of_a_text_count_up_one_by_one_and_its_share_is_kept(weights, start):
    pattern, g = Pattern.of(weights), np.arange(start, start + 2 * PLACES, dtype=np.int64)
    text_B, sample_B = pattern.split(g)
    for text, share in enumerate(pattern.shares):
        mine = sample_B[text_B == text]
        np.testing.assert_array_equal(mine, np.arange(mine[0], mine[0] + len(mine)))
        # Of the first g samples the text has its share, within a few, from the start of training.
        assert abs(mine - g[text_B == text] * share).max() < 6


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "0 texts"),
        ([1, 0.0], "above 0"),
        ([float("nan")], "above 0"),
        ([1] * 4097, "4097 texts"),
    ],
)
def test_weights_that_cannot_be(weights, message):
    with pytest.raises(ConfigError, match=message):
        Pattern.of(weights)


def mixed(batch_size=4, boundary=None) -> MixedBatches:
    """Three texts whose ids tell the text and, without a boundary, the place."""
    texts = [np.arange(n) + 1000 * i for i, n in enumerate((45, 90, 33))]
    pattern = Pattern.of([2, 1, 1])
    parts = [Batches(ids, 4, 1, i, boundary=boundary) for i, ids in enumerate(texts)]
    return MixedBatches(parts, pattern, batch_size)


def test_each_text_has_its_own_epochs():
    batches = mixed()
    rows = np.concatenate([batches.batch(step).tokens_BT for step in range(40)])
    for text, part in enumerate(batches.texts):
        first = rows[rows[:, 0] // 1000 == text][:, 0] - 1000 * text
        assert len(first) == (80, 40, 40)[text]
        for epoch in range(len(first) // part.n_windows):
            seen = sorted(first[epoch * part.n_windows : (epoch + 1) * part.n_windows])
            assert np.diff(seen).tolist() == [4] * (part.n_windows - 1)
    np.testing.assert_array_equal(rows[:, 1:], rows[:, :-1] + 1)


@pytest.mark.parametrize("n_processes", [1, 2, 4])
def test_processes_read_slices_of_one_mixture(n_processes):
    """Case D10: every row of the global batch once, also where documents are kept apart."""
    batches, rows = mixed(8, Boundary(7, None)), 8 // n_processes
    for step in range(10):
        parts = [batches.batch(step, slice(p * rows, (p + 1) * rows)) for p in range(n_processes)]
        union = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        jax.tree.map(np.testing.assert_array_equal, union, batches.batch(step))
        assert union.segment_BT is not None


def test_rows_do_not_depend_on_the_batch_size():
    one = np.concatenate([mixed(1).batch(g).tokens_BT for g in range(20)])
    sizes = Sizes(2, {1: 4, 3: 10})
    other = np.concatenate([mixed(sizes).batch(step).tokens_BT for step in range(4)])
    np.testing.assert_array_equal(one, other)


def test_a_row_s_window_is_named_by_its_text():
    batches = mixed()
    for step in (0, 5):
        batch = batches.batch(step)
        for (text, _, first), row in zip(batches.windows(step), batch.tokens_BT, strict=True):
            assert row[0] == 1000 * text + first


def test_a_share_for_each_text():
    with pytest.raises(ConfigError, match="2 shares for 3 texts"):
        MixedBatches(mixed().texts, Pattern.of([1, 1]), 4)
