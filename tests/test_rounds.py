# SPDX-License-Identifier: Apache-2.0
"""What is accepted or replaced has the model's distribution, and the test would notice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.sample.filters import Sampling, draw
from jaxgpt.sample.rounds import judged

N, V = 20_000, 8
LIMIT = 5.0


def surprise(seen, expected) -> float:
    """How many standard deviations chi-square is off, for counts and their expectations."""
    rare = expected < 5
    seen, expected = (np.append(x[~rare], x[rare].sum()) for x in (seen, expected))
    if expected[-1] == 0:
        if seen[-1] > 0:
            return np.inf  # impossible, and seen
        seen, expected = seen[:-1], expected[:-1]
    df = max(len(expected) - 1, 1)
    return float((((seen - expected) ** 2 / expected).sum() - df) / np.sqrt(2 * df))


@jax.jit
def inputs(q_V, p_V):
    """N tokens drawn from softmax(q), and other noise to judge them by."""
    keys_2N = jax.random.split(jax.random.key(0), (2, N))
    q_NV, p_NV = (jnp.broadcast_to(x_V, (N, V)) for x_V in (q_V, p_V))
    return keys_2N[1], draw(keys_2N[0], q_NV, Sampling()), q_NV, p_NV


def off(judge, q_V, p_V) -> float:
    _, ids = judge(*inputs(q_V, p_V))
    expected = N * np.asarray(jax.nn.softmax(p_V), np.float64)
    return surprise(np.bincount(np.asarray(ids), minlength=V), expected)


RNG = np.random.default_rng(0)
Q_V, P_V = (jnp.asarray(RNG.normal(size=V), jnp.float32) for _ in range(2))
FEW_V = jnp.where(jnp.arange(V) < 3, Q_V, -jnp.inf)
LAST_V = jnp.where(jnp.arange(V) > 4, P_V, -jnp.inf)
CASES = {
    "different": (Q_V, P_V),
    "equal": (P_V, P_V),
    "filtered draft": (FEW_V, P_V),
    "filtered model": (Q_V, LAST_V),
    "nothing in common": (FEW_V, LAST_V),
    "certain draft": (FEW_V.at[1].set(60.0), P_V),
    "certain model": (Q_V, FEW_V.at[1].set(60.0)),
    "a draft that is not finite": (Q_V.at[2].set(jnp.nan), P_V),
}


@pytest.mark.parametrize("case", CASES)
def test_judged_tokens_are_drawn_from_the_model(case):
    q_V, p_V = CASES[case]
    assert off(jax.jit(judged), q_V, p_V) < LIMIT
    accepted, _ = jax.jit(judged)(*inputs(q_V, p_V))
    q, p = jax.nn.softmax(q_V), jax.nn.softmax(p_V)
    overlap = float(jnp.minimum(q, p).sum()) if jnp.isfinite(q).all() else 0.0
    assert abs(float(accepted.mean()) - overlap) < 0.02  # theorem 3.5 of Leviathan et al.


def wrong(accept=lambda u, p, q: u * q < p, rest=lambda p, q: jnp.maximum(p - q, 0)):
    """`judged` with one of its two rules changed."""

    def judge(keys_N, draft_N, q_NV, p_NV):
        q, p = jax.nn.softmax(q_NV), jax.nn.softmax(p_NV)
        u_key, key = jax.random.split(keys_N[0])
        at = jnp.arange(N), draft_N
        accepted = accept(jax.random.uniform(u_key, N), p[at], q[at])
        return accepted, jnp.where(
            accepted, draft_N, jax.random.categorical(key, jnp.log(rest(p, q)))
        )

    return judge


def test_mistakes_are_noticed():
    assert off(wrong(), Q_V, P_V) < LIMIT, "the rules themselves"
    mistakes = [
        wrong(accept=lambda u, p, q: u * p < q),
        wrong(accept=lambda u, p, q: u < p),
        wrong(accept=lambda u, p, q: q <= p),
        wrong(accept=lambda u, p, q: u < 1.1 * p / q),
        wrong(rest=lambda p, q: p),
        wrong(rest=lambda p, q: jnp.abs(p - q)),
        wrong(rest=lambda p, q: jnp.maximum(q - p, 0)),
    ]
    for mistake in mistakes:
        assert off(mistake, Q_V, P_V) > 2 * LIMIT
