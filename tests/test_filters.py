# SPDX-License-Identifier: Apache-2.0
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.errors import ConfigError
from jaxgpt.sample.filters import Sampling, draw, filtered_logits

HALVES = [0.5, 0.25, 0.125, 0.125]  # exact in binary
TENTHS = [0.4, 0.3, 0.2, 0.1]
INF = math.inf


def logits_of(probs, dtype=jnp.float32):
    return jnp.log(jnp.asarray([probs], jnp.float32)).astype(dtype)


@functools.partial(jax.jit, static_argnames=("sampling", "filters"))
def filtered(logits_BV, counts_BV, sampling, filters):
    return filtered_logits(logits_BV, counts_BV, sampling, filters)


@functools.partial(jax.jit, static_argnames="sampling")
def drawn(keys_B, logits_BV, sampling):
    return draw(keys_B, logits_BV, sampling)


def run(logits_BV, counts_BV=None, filters=(), **sampling):
    counts_BV = jnp.zeros(logits_BV.shape, jnp.int32) if counts_BV is None else counts_BV
    return filtered(logits_BV, counts_BV, Sampling(**sampling), filters)


def probs(logits_BV, **options) -> np.ndarray:
    return np.asarray(jax.nn.softmax(run(logits_BV, **options), axis=-1))[0]


def kept(logits_BV, **options) -> set[int]:
    return set(np.flatnonzero(np.isfinite(np.asarray(run(logits_BV, **options))[0])).tolist())


def draws(logits_BV, n, seed=0, **sampling) -> np.ndarray:
    """n tokens drawn from the first row."""
    x_BV = jnp.broadcast_to(run(logits_BV, **sampling), (n, logits_BV.shape[1]))
    keys_B = jax.random.split(jax.random.key(seed), n)
    return np.asarray(drawn(keys_B, x_BV, Sampling(**sampling)))


def assert_drawn_from(ids, expected) -> None:
    """Chi-square at 1e-4, by the bound of Laurent & Massart 2000, lemma 1; nothing outside."""
    expected = np.asarray(expected)
    observed = np.bincount(ids, minlength=len(expected))
    inside = expected > 0
    assert observed[~inside].sum() == 0
    mean = len(ids) * expected[inside]
    statistic = ((observed[inside] - mean) ** 2 / mean).sum()
    freedom, x = inside.sum() - 1, math.log(1e4)
    assert statistic <= freedom + 2 * math.sqrt(freedom * x) + 2 * x


@pytest.mark.parametrize(
    ("p", "count"),
    [(0.0, 1), (1e-9, 1), (0.4, 1), (0.5, 1), (0.6, 2), (0.75, 2), (0.8, 3), (0.9, 4), (1.0, 4)],
)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_top_p_keeps_what_has_less_than_p_before_it(p, count, order):
    best_first = sorted(range(4), key=lambda i: (-HALVES[order[i]], i))
    shuffled = [HALVES[i] for i in order]
    assert kept(logits_of(shuffled), top_p=p) == set(best_first[:count])


def test_top_p_of_75_percent_renormalises_to_two_thirds():
    np.testing.assert_allclose(probs(logits_of(HALVES), top_p=0.75), [2 / 3, 1 / 3, 0, 0], 1e-6)


def test_temperature_comes_before_top_p():
    assert kept(logits_of(HALVES), top_p=0.75, temperature=2.0) == {0, 1, 2}


def test_top_p_counts_the_mass_that_top_k_left():
    assert kept(logits_of(TENTHS), top_k=3, top_p=0.75) == {0, 1}
    assert kept(logits_of(TENTHS), top_p=0.75) == {0, 1, 2}


@pytest.mark.parametrize("options", [{"top_p": 1.0}, {"top_k": 0}, {"top_k": 4}, {"min_p": 0.0}])
def test_a_filter_turned_off_changes_nothing(options):
    logits_BV = logits_of(TENTHS)
    np.testing.assert_array_equal(run(logits_BV, **options), run(logits_BV))


def test_tiny_top_p_in_bfloat16_keeps_the_best():
    logits_BV = jnp.asarray([[0.0, 3.0, 2.984375, -1.0]], jnp.bfloat16)
    assert run(logits_BV).dtype == jnp.float32
    assert kept(logits_BV, top_p=1e-3) == {1}


def test_rows_are_filtered_each_for_itself():
    logits_BV = jnp.concatenate([logits_of(HALVES), logits_of(TENTHS[::-1])])
    both = np.asarray(run(logits_BV, top_p=0.6, top_k=3))
    for row in range(2):
        np.testing.assert_array_equal(
            both[row], run(logits_BV[row : row + 1], top_p=0.6, top_k=3)[0]
        )


def test_zeros_of_either_sign_are_equal():
    logits_BV = jnp.asarray([[-0.0, -jnp.inf, 0.0, 0.0]])
    assert kept(logits_BV, top_p=0.3) == kept(logits_BV, top_k=1) == {0}


@pytest.mark.parametrize(("k", "count"), [(1, 1), (2, 2), (65, 65), (100, 65), (10**9, 65)])
def test_top_k_keeps_exactly_k_real_tokens_even_of_equal_ones(k, count):
    logits_BV = jnp.where(jnp.arange(128) < 65, 0.0, -jnp.inf)[None]
    assert kept(logits_BV, top_k=k) == set(range(count))


def sorted_and_cut(x_V, top_k, top_p) -> set[int]:
    """What top-k and top-p say: the k best, then of these what has less than p before it."""
    order = np.argsort(-x_V, kind="stable")[:top_k]
    order = order[np.isfinite(x_V[order])]
    mass = np.exp(x_V[order].astype(np.float64))
    before = np.cumsum(mass / mass.sum()) - mass / mass.sum()
    return set(order[(before < top_p) | (np.arange(len(order)) == 0)].tolist())


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (40, 1.0), (700, 0.7), (50, 0.93)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])  # the latter with many equal ones
def test_what_stays_is_what_sorting_gives(top_k, top_p, dtype):
    logits_BV = 3 * jax.random.normal(jax.random.key(top_k), (5, 700)).astype(dtype)
    logits_BV = logits_BV.at[1].set(jnp.round(logits_BV[1])).at[:, 600:].set(-jnp.inf)
    options = {"top_k": top_k, "top_p": top_p, "temperature": 0.8}
    got_BV = np.asarray(run(logits_BV, **options))
    x_BV = np.asarray(run(logits_BV, temperature=0.8))
    for got_V, x_V in zip(got_BV, x_BV, strict=True):
        want = sorted_and_cut(x_V, top_k, top_p)
        assert set(np.flatnonzero(np.isfinite(got_V)).tolist()) == want
        np.testing.assert_array_equal(got_V[list(want)], x_V[list(want)])


def test_the_vocabulary_is_not_sorted():
    def text(function, *args):
        return jax.jit(function).lower(*args).compile().as_text().lower()

    def both(keys_B, logits_BV):
        sampling = Sampling(0.7, top_k=50, top_p=0.9, min_p=0.01)
        return draw(keys_B, filtered_logits(logits_BV, counts_BV, sampling), sampling)

    logits_BV, keys_B = jnp.zeros((2, 1000)), jax.random.split(jax.random.key(0), 2)
    counts_BV = jnp.zeros((2, 1000), jnp.int32)
    assert not re.search(r" sort\(|topk", text(both, keys_B, logits_BV))
    assert re.search(r" sort\(|topk", text(lambda x_BV: jax.lax.top_k(x_BV, 50), logits_BV))


def test_min_p_is_a_share_of_the_best():
    assert kept(logits_of(TENTHS), min_p=0.45) == {0, 1, 2}
    assert kept(logits_of(TENTHS), min_p=1.0) == {0}
    # After top-k and top-p: the share is of the best in any case, so the sets intersect.
    assert kept(logits_of(TENTHS), min_p=0.2, top_k=3) == {0, 1, 2}


def test_repetition_penalty_makes_seen_tokens_less_likely_whatever_their_sign():
    logits_BV = jnp.asarray([[2.0, -2.0, 2.0, -2.0, -jnp.inf]])
    counts_BV = jnp.asarray([[3, 1, 0, 0, 1]])
    got = run(logits_BV, counts_BV, repetition_penalty=2.0)
    np.testing.assert_array_equal(got, [[-1.0, -6.0, 0.0, -4.0, -INF]])  # the best is moved to 0
    greedy = run(logits_BV, counts_BV, repetition_penalty=2.0, temperature=0.0)
    np.testing.assert_array_equal(greedy, [[1.0, -4.0, 2.0, -2.0, -INF]])


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6, 1e-38, 1e-44])
@pytest.mark.parametrize("options", [{}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}])
def test_cold_draws_are_the_argmax(temperature, options):
    cases = [([1, 2, -INF], 1), ([-1, -2, -3], 0), ([3, -1, 2], 0), ([-INF, -5, -INF], 1)]
    with jax.debug_nans(True):
        for logits, best in cases:
            for seed in range(2):
                logits_BV = jnp.asarray([logits], jnp.float32)
                ids = draws(logits_BV, 6, seed, temperature=temperature, **options)
                assert ids.tolist() == [best] * 6


def test_greedy_takes_the_first_of_equal_tokens():
    assert draws(jnp.asarray([[0.0, 1.0, 1.0]]), 5, temperature=0.0).tolist() == [1] * 5


@pytest.mark.parametrize("temperature", [1e38, 1e300])
def test_hot_draws_are_uniform_over_the_real_tokens(temperature):
    logits_BV = jnp.where(jnp.arange(128) < 65, jnp.arange(128.0) - 30, -jnp.inf)[None]
    with jax.debug_nans(True):
        ids = draws(logits_BV, 20_000, temperature=temperature)
    assert_drawn_from(ids, np.where(np.arange(128) < 65, 1 / 65, 0))


def test_draws_follow_the_softmax():
    logits_BV = jax.random.normal(jax.random.key(3), (1, 40)) * 2
    assert_drawn_from(draws(logits_BV, 20_000), jax.nn.softmax(logits_BV)[0])
    assert_drawn_from(draws(logits_BV, 20_000, temperature=0.7), jax.nn.softmax(logits_BV / 0.7)[0])


def test_the_chi_square_bound_notices_a_wrong_distribution():
    ids = draws(logits_of(TENTHS), 20_000, temperature=1.1)
    with pytest.raises(AssertionError):
        assert_drawn_from(ids, TENTHS)


@pytest.mark.parametrize("p", [0.0, 0.5, 0.8])
def test_4000_draws_stay_in_the_nucleus_within_four_sigma(p):
    logits_BV = logits_of([HALVES[i] for i in (2, 0, 3, 1)])
    expected = probs(logits_BV, top_p=p)
    observed = np.bincount(draws(logits_BV, 4000, top_p=p), minlength=4) / 4000
    sigma = np.sqrt(expected * (1 - expected) / 4000)
    assert (abs(observed - expected) <= 4 * sigma).all()


def test_own_filters_run_last_and_cannot_bring_padding_back():
    def ban_best(x_BV, counts_BV):
        return jnp.where(x_BV == x_BV.max(-1, keepdims=True), -jnp.inf, x_BV)

    def flatten(x_BV, counts_BV):
        return jnp.zeros(x_BV.shape, jnp.bfloat16) - counts_BV

    logits_BV = jnp.asarray([[1.0, 3.0, 2.0, -jnp.inf]])
    assert kept(logits_BV, filters=(ban_best,), top_k=2) == {2}
    got = run(logits_BV, jnp.asarray([[0, 1, 2, 0]]), filters=(ban_best, flatten), temperature=0.0)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, [[0, -1, -2, -INF]])


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(
        st.floats(-50, 50, width=32, allow_subnormal=False) | st.just(-INF), min_size=6, max_size=6
    ).filter(lambda row: max(row) > -INF),
    options=st.sampled_from(
        [
            {"temperature": 1e-8, "top_p": 0.3},
            {"temperature": 1e38, "top_k": 3},
            {"top_p": 0.0},
            {"top_k": 1},
            {"top_k": 7, "top_p": 0.9, "min_p": 0.2},
            {"temperature": 0.5, "min_p": 0.5},
        ]
    ),
)
def test_the_best_always_stays_and_nothing_is_nan(logits, options):
    x = np.asarray(run(jnp.asarray([logits]), **options))[0]
    assert not np.isnan(x).any()
    assert x[int(np.argmax(logits))] == 0 == x.max()
    assert (x[np.isneginf(logits)] == -INF).all()
    assert np.isfinite(x).sum() <= options.get("top_k", 6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": INF},
        {"top_k": -1},
        {"top_p": 1.5},
        {"top_p": -0.1},
        {"top_p": math.nan},
        {"min_p": 1.5},
        {"min_p": math.nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": math.nan},
        {"repetition_penalty": INF},
    ],
)
def test_wrong_settings_are_named_in_one_line(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{name}={value}") as caught:
        Sampling(**wrong)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
