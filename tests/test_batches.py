# SPDX-License-Identifier: Apache-2.0
"""Batches: every window once an epoch, the same for any slicing, any resume, any size."""

from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data.batches import Batches, eval_batches
from jaxgpt.data.order import Sizes
from jaxgpt.data.packing import Boundary
from jaxgpt.errors import ConfigError


def starts(batches: Batches, epoch: int) -> list[int]:
    """Window starts of one epoch, in order; the ids must be their own positions."""
    first, last = epoch * batches.n_windows, (epoch + 1) * batches.n_windows
    steps = range(first // batches.batch_size, -(-last // batches.batch_size))
    all_starts = np.concatenate([batches.batch(step).tokens_BT[:, 0] for step in steps])
    skip = first - steps[0] * batches.batch_size
    return all_starts[skip : skip + batches.n_windows].tolist()


def make(n_windows: int, context_length: int, batch_size: int, seed: int = 0, extra: int = 0):
    n = max(n_windows * context_length + context_length + extra, context_length + 1)
    batches = Batches(np.arange(n), context_length, batch_size, seed)
    assert batches.n_windows == n_windows
    return batches


@settings(max_examples=60, deadline=None)
@given(
    n_windows=st.sampled_from([1, 2, 3, 7, 50]),
    context_length=st.integers(1, 9),
    batch_size=st.integers(1, 12),
    seed=st.integers(-3, 2**63),
    epoch=st.integers(0, 5),
    extra=st.integers(0, 8),
)
def test_every_window_once_an_epoch(n_windows, context_length, batch_size, seed, epoch, extra):
    batches = make(n_windows, context_length, batch_size, seed, min(extra, context_length - 1))
    found = sorted(starts(batches, epoch))
    assert np.diff(found).tolist() == [context_length] * (n_windows - 1)
    assert 0 <= found[0] and found[-1] + context_length < len(batches.tokens)


def test_a_single_window_fits_exactly():
    batch = Batches(np.arange(5), context_length=4, batch_size=2, seed=7).batch(3)
    assert batch.tokens_BT.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.targets_BT.tolist() == [[1, 2, 3, 4]] * 2


def test_targets_follow_inputs_and_all_count():
    batch = make(50, 6, 5).batch(2)
    np.testing.assert_array_equal(batch.targets_BT, batch.tokens_BT + 1)
    np.testing.assert_array_equal(np.diff(batch.tokens_BT), 1)
    assert batch.weights_BT.min() == 1
    assert [x.dtype for x in jax.tree.leaves(batch)] == [np.int32, np.int32, np.float32]
    assert jax.tree.map(lambda x: x.shape, batch).tokens_BT == (5, 6)


def test_epochs_and_seeds_differ_in_order_and_shift():
    batches = make(1000, 4, 10)
    orders = [starts(batches, epoch) for epoch in (0, 1)] + [starts(make(1000, 4, 10, seed=1), 0)]
    windows = [[start // 4 for start in order] for order in orders]
    for a, b in ((0, 1), (0, 2)):
        assert np.mean(np.equal(windows[a], windows[b])) < 0.02
    assert abs(np.corrcoef(windows[0], np.arange(1000))[0, 1]) < 0.1


def test_every_phase_is_seen_over_the_epochs():
    batches = make(4, 5, 1)
    assert {min(starts(batches, epoch)) for epoch in range(100)} == set(range(5))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 8))
def test_processes_read_slices_of_one_global_batch(step, n_processes):
    """Independent shuffles per process: karpathy/llm.c#792."""
    batches = make(30, 3, 8 * n_processes)
    whole = batches.batch(step)
    parts = [batches.batch(step, slice(8 * p, 8 * p + 8)) for p in range(n_processes)]
    np.testing.assert_array_equal(np.concatenate([p.tokens_BT for p in parts]), whole.tokens_BT)
    strided = [batches.batch(step, slice(p, None, n_processes)) for p in range(n_processes)]
    np.testing.assert_array_equal(strided[0].tokens_BT, whole.tokens_BT[::n_processes])


def test_two_processes_cover_an_epoch_once():
    batches = Batches(np.repeat(np.arange(9), 4), context_length=4, batch_size=4, seed=0)
    assert batches.n_windows == 8
    seen = [
        batches.batch(step, rows).tokens_BT[:, 0]
        for step in range(2)
        for rows in (slice(0, 2), slice(2, 4))
    ]
    assert len(set(np.concatenate(seen).tolist())) == 8


def test_a_batch_depends_on_seed_and_step_alone():
    run = make(20, 3, 7)
    first = [run.batch(step).tokens_BT for step in range(12)]
    for step in (11, 3, 4, 0):
        np.testing.assert_array_equal(make(20, 3, 7).batch(step).tokens_BT, first[step])


def test_sample_order_does_not_depend_on_the_batch_size():
    a = np.concatenate([make(20, 3, 4).batch(step).tokens_BT for step in range(15)])
    b = np.concatenate([make(20, 3, 6).batch(step).tokens_BT for step in range(10)])
    np.testing.assert_array_equal(a, b)


def test_order_is_pinned():
    """Runs are resumed by later versions: the order is part of the format."""
    tokens = make(10, 4, 5, seed=42).batch(3).tokens_BT
    assert tokens[:, 0].tolist() == [28, 4, 32, 16, 0]


def test_short_texts_are_refused_with_both_numbers():
    with pytest.raises(
        ConfigError, match=r"10 tokens.*context_length=16 needs 17.*--model.con"
    ) as e:
        Batches(np.arange(10), context_length=16, batch_size=2, seed=0)
    assert e.value.exit_code == 2
    with pytest.raises(ConfigError, match="fix: a longer text"):
        Batches(np.arange(0), context_length=16, batch_size=2, seed=0)
    for sizes in ((0, 2), (4, 0)):
        with pytest.raises(ConfigError, match="at least 1"):
            Batches(np.arange(10), *sizes, seed=0)


@settings(deadline=None)
@given(st.integers(2, 60), st.integers(1, 9), st.integers(1, 9))
def test_evaluation_scores_every_id_but_the_first_once(n, context_length, batch_size):
    scored = Counter()
    for batch in eval_batches(np.arange(n, dtype=np.uint8), context_length, batch_size):
        assert batch.tokens_BT.shape == (batch_size, context_length)
        assert set(np.unique(batch.weights_BT)) <= {0, 1}
        counts = batch.weights_BT > 0
        assert counts.any()
        scored.update(batch.targets_BT[counts].tolist())
        np.testing.assert_array_equal(batch.tokens_BT[counts] + 1, batch.targets_BT[counts])
        assert batch.tokens_BT.max() < n
    assert scored == Counter(range(1, n))


def test_a_weighted_mean_does_not_depend_on_the_batch_size():
    """Mean of batch means: huggingface/transformers#41898."""
    tokens = np.concatenate([np.full(33, 2), np.full(8, 4)])

    def mean(batch_size: int) -> float:
        batches = list(eval_batches(tokens, 8, batch_size))
        total = sum((batch.targets_BT * batch.weights_BT).sum() for batch in batches)
        return total / sum(batch.weights_BT.sum() for batch in batches)

    assert [mean(size) for size in (1, 2, 3, 4, 5)] == pytest.approx([2.4] * 5, abs=1e-6)


def test_too_little_to_evaluate_is_refused_at_once():
    for n in (0, 1):
        with pytest.raises(ConfigError, match=f"validation text has {n} tokens"):
            eval_batches(np.arange(n), 8, 2)


def test_weights_go_with_their_targets():
    n = 50
    weights = (np.arange(n) % 3 == 0).astype(np.uint8)
    batches = Batches(np.arange(n), 4, 5, seed=1, weights=weights)
    plain = Batches(np.arange(n), 4, 5, seed=1)
    for step in range(6):
        batch = batches.batch(step)
        np.testing.assert_array_equal(batch.tokens_BT, plain.batch(step).tokens_BT)
        np.testing.assert_array_equal(batch.weights_BT, batch.targets_BT % 3 == 0)
        assert batch.weights_BT.dtype == np.float32
        rows = batches.batch(step, slice(2, 4))
        np.testing.assert_array_equal(rows.weights_BT, batch.weights_BT[2:4])
    scored = Counter()
    for batch in eval_batches(np.arange(n), 4, 5, weights):
        assert batch.weights_BT.dtype == np.float32
        scored.update(batch.targets_BT[batch.weights_BT > 0].tolist())
    assert scored == Counter(range(3, n, 3))


def test_weights_are_one_for_each_id():
    with pytest.raises(ConfigError, match="49 weights for 50 ids"):
        Batches(np.arange(50), 4, 5, seed=1, weights=np.ones(49))


SIZES = Sizes(4, {2: 8, 5: 2})


def test_a_schedule_of_sizes_loses_no_sample_and_doubles_none():
    plain, scheduled = make(50, 3, 1), Batches(make(50, 3, 1).tokens, 3, SIZES, seed=0)
    rows = [scheduled.batch(step).tokens_BT for step in range(8)]
    assert [len(r) for r in rows] == [4, 4, 8, 8, 8, 2, 2, 2]
    every = np.concatenate([plain.batch(g).tokens_BT for g in range(38)])
    np.testing.assert_array_equal(np.concatenate(rows), every)
    np.testing.assert_array_equal(scheduled.batch(3, slice(2, 5)).tokens_BT, rows[3][2:5])


@pytest.mark.parametrize("n_processes", [1, 2, 4])
def test_processes_cover_an_epoch_of_packed_documents_once(n_processes):
    """Case D10, with documents kept apart: the union over processes is the global batch."""
    ids = np.random.default_rng(0).integers(0, 5, 33)
    batches = Batches(ids, 4, 4, seed=0, boundary=Boundary(0, None))
    assert batches.n_windows == 7
    rows = 4 // n_processes
    for step in range(7):
        parts = [batches.batch(step, slice(p * rows, (p + 1) * rows)) for p in range(n_processes)]
        union = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        jax.tree.map(np.testing.assert_array_equal, union, batches.batch(step))
    seen = [w for step in range(7) for w in batches.windows(step).tolist()]
    for epoch in range(4):
        begin = [first for _, e, first in seen if e == epoch]
        assert np.diff(sorted(begin)).tolist() == [4] * 6


def test_documents_kept_apart_change_neither_tokens_nor_targets():
    ids = np.random.default_rng(1).integers(0, 6, 200)
    weights = (ids != 3).astype(np.uint8)
    plain = Batches(ids, 10, 5, 0, weights).batch(2)
    packed = Batches(ids, 10, 5, 0, weights, Boundary(0, None)).batch(2)
    assert len(jax.tree.leaves(plain)) == 3 and len(jax.tree.leaves(packed)) == 5
    np.testing.assert_array_equal(packed.tokens_BT, plain.tokens_BT)
    np.testing.assert_array_equal(packed.targets_BT, plain.targets_BT)
    np.testing.assert_array_equal(packed.weights_BT, plain.weights_BT * (plain.tokens_BT != 0))
    assert packed.segment_BT.dtype == packed.pos_BT.dtype == np.int32
    assert packed.weights_BT.dtype == np.float32 and packed.segment_BT.max() > 1


def test_evaluation_of_packed_documents_scores_all_but_their_first_ids():
    ids = np.array([5, 0, 7, 8, 0, 0, 9, 6, 5, 4, 0, 3])
    scored = Counter()
    for batch in eval_batches(ids, 4, 2, boundary=Boundary(0, None)):
        scored.update(batch.targets_BT[batch.weights_BT > 0].tolist())
    assert scored == Counter([0, 8, 0, 6, 5, 4, 0])  # not 5, 7, the second 0 in a row, 9 and 3
