# SPDX-License-Identifier: Apache-2.0
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.masks import Visibility


def rule(q, k, window=None, causal=True):
    return [[s >= 0 and (not causal or 0 <= t - s < (window or 99)) for s in k] for t in q]


def test_plain_attention_sees_the_past_and_itself():
    mask = Visibility.full(3, 5).mask()
    assert mask.shape == (1, 5, 5)  # one mask for all rows
    assert np.array_equal(mask[0], np.tri(5, dtype=bool))


@pytest.mark.parametrize("window", [None, 1, 4, 8, 100])
def test_the_rule_of_positions(window):
    pos = jnp.array([[0, 1, 2, 3, 4, 5, 6, 7], [-1, -1, 0, 1, 2, 3, 4, 5]])
    mask = Visibility.of(pos).replace(window=window).mask()
    assert np.array_equal(mask, [rule(p, p, window) for p in pos.tolist()])


def test_a_window_counts_the_query_itself():  # N07
    mask = Visibility.full(1, 8).replace(window=4).mask()
    assert mask.sum(-1).tolist() == [[1, 2, 3, 4, 4, 4, 4, 4]] and mask.sum() == 26


def test_plain_and_explicit_positions_agree():
    full = Visibility.full(2, 6).replace(window=3)
    assert np.array_equal(full.mask()[0], full.replace(plain=False).mask()[1])


def test_padding_is_not_seen_and_sees_nothing():
    pos = jnp.array([[-1, -1, 0, 1]])
    visibility = Visibility.of(pos)
    mask = visibility.mask()[0]
    assert (
        not mask[:2].any() and not mask[:, :2].any() and mask[2:, 2:].tolist() == [[1, 0], [1, 1]]
    )
    assert visibility.valid_BT.tolist() == [[False, False, True, True]]


def test_without_the_causal_rule_every_filled_key_is_seen():
    pos = jnp.array([[0, 1, 2]])
    visibility = Visibility(pos, jnp.array([[0, -1, 2]]), causal=False, window=1)
    assert visibility.mask().tolist() == [[[True, False, True]] * 3]


def test_documents_of_a_packed_row_are_apart():
    pos, segment = jnp.array([[0, 1, 0, 1, 2]]), jnp.array([[7, 7, 8, 8, 8]])
    want = np.zeros((5, 5), bool)
    want[:2, :2], want[2:, 2:] = np.tri(2), np.tri(3)
    assert np.array_equal(Visibility.of(pos, segment).mask()[0], want)


def test_the_last_query_of_a_cache_sees_all_filled_slots():  # S05: not only the first
    visibility = Visibility.of(jnp.array([[2]])).onto(jnp.array([[0, 1, 2, -1]]))
    assert visibility.mask().tolist() == [[[True, True, True, False]]] and not visibility.plain


def test_segments_and_a_cache_exclude_each_other():
    pos = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="one document a row"):
        Visibility.of(pos, pos).onto(pos)
