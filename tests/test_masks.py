# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.masks import Visibility
from jaxgpt.testing import jit_forward, jit_init, tiny


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


# --- prefix-LM: a model of another kind, by another mask ------------------------------------------

TOKENS = np.random.default_rng(0).integers(0, 30, (2, 10), np.int32)
PREFIX = jnp.array([4, 6])


def test_a_prefix_is_seen_by_all_of_its_row():
    pos = jnp.array([[0, 1, 2, 3], [-1, 0, 1, 2]])
    mask = Visibility.of(pos, prefix_B=jnp.array([3, 2])).mask()
    assert mask.astype(int).tolist() == [
        [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        [[0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 1, 1]],  # padding is seen by none
    ]


def test_a_prefix_of_at_most_one_token_is_the_causal_mask():
    pos = jnp.array([[0, 1, 2, 3]] * 2)
    want = Visibility.of(pos).mask()
    assert np.array_equal(Visibility.of(pos, prefix_B=jnp.array([0, 1])).mask(), want)


def test_a_window_does_not_hide_the_prefix():
    pos = jnp.array([[0, 1, 2, 3, 4]])
    mask = Visibility.of(pos, prefix_B=jnp.array([2])).replace(window=2).mask()
    assert mask[0, 4].tolist() == [True, True, False, True, True]


def test_packed_documents_have_a_prefix_each():
    pos, segment = jnp.array([[0, 1, 0, 1, 2]]), jnp.array([[0, 0, 1, 1, 1]])
    mask = Visibility.of(pos, segment, jnp.array([2])).mask()[0]
    want = np.zeros((5, 5), bool)
    want[:2, :2], want[2:, 2:4], want[4, 4] = True, True, True
    assert np.array_equal(mask, want)


def prefix_lm(window=None):
    cfg = tiny(attention=GQA(n_heads=4, window=window), context_length=12)
    return cfg, jit_init(cfg, jax.random.key(0))


def logits(cfg, params, tokens, prefix_B=PREFIX, **call):
    return np.asarray(jit_forward(cfg, params, tokens, prefix_B=prefix_B, **call).logits_BTV)


def test_a_prefix_lm_reads_its_prefix_both_ways_and_the_rest_forward():
    cfg, params = prefix_lm()
    before = logits(cfg, params, TOKENS)
    for t in range(10):
        changed = TOKENS.copy()
        changed[:, t] ^= 1
        same = (logits(cfg, params, changed) == before).all(-1)
        for row, n in enumerate(PREFIX.tolist()):
            seen_from = 0 if t < n else t  # a token of the prefix changes all logits of its row
            assert same[row, :seen_from].all() and not same[row, seen_from:].any()


def test_a_prefix_lm_is_another_model():
    cfg, params = prefix_lm()
    causal = np.asarray(jit_forward(cfg, params, TOKENS).logits_BTV)[..., :31]
    assert (np.abs(logits(cfg, params, TOKENS)[..., :31] - causal).max((0, 2)) > 1e-2).all()
    one = logits(cfg, params, TOKENS, prefix_B=jnp.array([1, 0]))[..., :31]
    np.testing.assert_allclose(one, causal, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_decoding_behind_a_whole_prefix_equals_the_full_forward(window):
    """The prefix must be fed in one piece: what was written before it was read would be wrong."""
    cfg, params = prefix_lm(window)
    want = logits(cfg, params, TOKENS)[..., :31]
    pos = np.tile(np.arange(10), (2, 1))

    def decoded(first):
        caches, got, start = cfg.init_caches(2, 12), [], 0
        for end in range(first, 11):
            fed = slice(start, end)
            call = dict(pos_BT=pos[:, fed], prefix_B=PREFIX, caches=caches)
            out = jit_forward(cfg, params, TOKENS[:, fed], **call)
            caches, start = out.caches, end
            got.append(out.logits_BTV[..., :31])
        return np.concatenate(got, 1)

    error = np.abs(decoded(6) - want) / max(1.0, np.abs(want).max())
    assert error.max() < 2e-5
    if window is None:
        assert np.abs(decoded(3) - want)[:, 3:].max() > 1e-2


def test_padding_in_front_of_a_prefix_changes_nothing():
    cfg, params = prefix_lm()
    want = logits(cfg, params, TOKENS)[..., :31]
    pos = np.tile(np.arange(-2, 10), (2, 1)).clip(-1)
    tokens = np.concatenate([TOKENS[:, :2], TOKENS], 1)
    got = logits(cfg, params, tokens, pos_BT=pos)[:, 2:, :31]
    np.testing.assert_allclose(got, want, atol=2e-5 * max(1.0, np.abs(want).max()))


def test_a_prefix_lm_is_trained_as_it_is_run():
    """Recomputed and scanned layers see the prefix too."""
    cfg, params = prefix_lm()
    got = logits(cfg, params, TOKENS, remat="full", scan=True)[..., :31]
    np.testing.assert_allclose(got, logits(cfg, params, TOKENS)[..., :31], atol=1e-4)
