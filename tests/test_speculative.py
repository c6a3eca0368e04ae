# SPDX-License-Identifier: Apache-2.0
"""Decoding with a draft draws what decoding without one draws; `test_rounds.py` has the judging."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generate import GREEDY, RAGGED, TINY, params_of
from test_rounds import LIMIT, surprise

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import AttentionBox
from jaxgpt.boxes.init import Normal
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.position import NoPosition
from jaxgpt.boxes.rope import RoPE
from jaxgpt.errors import ConfigError, DivergedError
from jaxgpt.model import ModelConfig, forward
from jaxgpt.sample.filters import Sampling, filtered_logits
from jaxgpt.sample.generate import generate, stream
from jaxgpt.sample.speculative import Draft

SMALL = dataclasses.replace(TINY, n_layers=1, vocab_multiple=1)  # its tables end elsewhere
FILTERED = Sampling(0.7, 9, 0.9, 0.01, 1.3)


def close_to(params, by: float):
    """A draft that is often right: the model's own parameters, a little off."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    noisy = [x + by * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


@functools.cache
def short_draft() -> Draft:
    """A draft whose context ends before the model's."""
    params = params_of(TINY)
    table = params["position"]["embedding"][:9]
    params = close_to(params | {"position": {"embedding": table}}, 0.1)
    return Draft(dataclasses.replace(TINY, context_length=9), params, 3)


def assert_same(got, want):
    assert got.ids == want.ids and got.finished == want.finished
    for ours, theirs in zip(got.log_probs, want.log_probs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


# --- greedy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_greedy_is_what_it_is_without_a_draft(rows):
    """Past the end of both contexts, that of the draft first."""
    prompts, longest = RAGGED[:rows], max(map(len, RAGGED[:rows]))
    run = functools.partial(generate, TINY, params_of(TINY), prompts, sampling=GREEDY)
    for most in (16, 3, 1):
        assert_same(run(max_new_tokens=most, draft=short_draft()), run(max_new_tokens=most))
    chunks = stream(
        TINY, params_of(TINY), prompts, sampling=GREEDY, max_new_tokens=16, draft=short_draft()
    )
    drafted = [chunk for chunk in chunks if chunk.rounds_B is not None]
    tokens, rounds = sum(c.lengths_B for c in drafted), sum(c.rounds_B for c in drafted)
    assert tokens.tolist() == [9 - longest] * rows, "as far as the draft's context reaches"
    assert (rounds >= 1).all() and (rounds < tokens).any(), "some were accepted"


def test_rows_end_with_stop_tokens_and_when_the_caller_says():
    run = functools.partial(
        generate, TINY, params_of(TINY), RAGGED, max_new_tokens=16, sampling=GREEDY
    )
    whole = run().ids
    for stops in ([whole[0][2]], [whole[1][1]], whole[2][3:5]):
        assert_same(run(stop_ids=stops, draft=short_draft()), run(stop_ids=stops))
    got = run(until=lambda row, ids: row == 1 and len(ids) > 1, draft=short_draft())
    assert got.finished == [False, True, False] and len(got.ids[1]) <= 1 + 16
    assert all(ids == text[: len(ids)] for ids, text in zip(got.ids, whole, strict=True))


def test_models_and_drafts_that_are_not_finite():
    params = params_of(TINY)
    run = functools.partial(generate, TINY, max_new_tokens=7, sampling=GREEDY)
    broken = dataclasses.replace(
        short_draft(), params=jax.tree.map(lambda x: x * jnp.nan, short_draft().params)
    )
    assert_same(run(params, RAGGED, draft=broken), run(params, RAGGED))
    table = params["position"]["embedding"].at[5].set(jnp.nan)
    with pytest.raises(DivergedError, match=r"logits are not finite \(row 0"):
        run(params | {"position": {"embedding": table}}, RAGGED, draft=short_draft())


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"attention": MLA(4, kv_rank=6, nope_dim=4, rope_dim=4, v_dim=4), "position": RoPE()},
        {"attention": GQA(4, n_kv_heads=2, window=5), "position": RoPE()},
        {"attention": GQA(4), "position": NoPosition()},
    ],
)
def test_greedy_with_other_boxes_and_filters(change):
    cfg = dataclasses.replace(TINY, **change)
    for sampling in (GREEDY, Sampling(0.0, repetition_penalty=1.3)):
        run = functools.partial(generate, cfg, params_of(cfg), RAGGED, sampling=sampling)
        want = run(max_new_tokens=14)
        for draft in (Draft(SMALL, params_of(SMALL)), Draft(cfg, close_to(params_of(cfg), 0.1))):
            assert_same(run(max_new_tokens=14, draft=draft), want)
            assert_same(run(max_new_tokens=14, draft=draft, chunk=3), want)


@pytest.mark.slow
def test_long_texts_grow_both_caches():
    cfg = dataclasses.replace(TINY, context_length=600, position=NoPosition())
    prompt, params = [[3, 1, 4] * 70], params_of(cfg)
    run = functools.partial(generate, cfg, params, prompt, max_new_tokens=300, sampling=GREEDY)
    assert_same(run(draft=Draft(cfg, close_to(params, 0.02))), run())


# --- sampled --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_token_depends_on_its_number_alone():
    """Not on the batch, the rows' pace, the chunk, or how many are drafted."""
    params = params_of(TINY)
    run = functools.partial(generate, TINY, params, sampling=FILTERED, max_new_tokens=7, seed=5)
    plain = run(RAGGED)
    assert_same(run(RAGGED, draft=Draft(TINY, params)), plain)  # a draft that is the model
    draft = Draft(TINY, close_to(params, 0.2))
    want = run(RAGGED, draft=draft).ids
    assert want != plain.ids
    assert run(RAGGED, draft=dataclasses.replace(draft, tokens=1)).ids == want
    assert run(RAGGED[::-1], samples=[2, 1, 0], draft=draft).ids == want[::-1]
    assert run(RAGGED, max_new_tokens=4, draft=draft).ids == [ids[:4] for ids in want]


@pytest.mark.slow
def test_a_row_draws_the_same_alone():
    run = functools.partial(generate, TINY, params_of(TINY), sampling=FILTERED, max_new_tokens=7)
    draft = Draft(TINY, close_to(params_of(TINY), 0.2))
    want = run(RAGGED, draft=draft).ids
    for row, prompt in enumerate(RAGGED):
        assert run([prompt], samples=[row], draft=draft).ids == [want[row]]


V, ROWS, FIRST = 4, 4096, 4
MICRO = ModelConfig(
    vocab_size=V,
    context_length=8,
    d_model=8,
    n_layers=1,
    attention=GQA(n_heads=1),
    init=Normal(std=1.0, embedding_std=1.0, residual="same"),
    vocab_multiple=1,
)


def exact(sampling, prompt) -> np.ndarray:
    """The probability of each FIRST tokens, by a full forward over each text."""
    texts = np.array(list(itertools.product(range(V), repeat=FIRST)))
    tokens = np.concatenate([np.tile(prompt, (len(texts), 1)), texts], axis=1)
    ends = range(len(prompt), tokens.shape[1])
    counts = [np.stack([np.bincount(row[:n], minlength=V) for row in tokens]) for n in ends]

    @jax.jit
    def log_probs(tokens, counts):
        logits = forward(MICRO, params_of(MICRO), tokens).logits_BTV
        logits = jnp.concatenate([logits[:, n - 1] for n in ends])
        return jax.nn.log_softmax(filtered_logits(logits, counts, sampling), axis=-1)

    each = np.asarray(log_probs(tokens, np.concatenate(counts)), np.float64)
    each = each.reshape(FIRST, len(texts), V)
    return np.exp(sum(each[n, np.arange(len(texts)), texts[:, n]] for n in range(FIRST)))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.8, 3, 0.95, 0.02, 2.0), pytest.param(Sampling(), marks=pytest.mark.slow)],
    ids=["filtered", "plain"],
)
def test_the_first_tokens_have_their_joint_distribution(sampling):
    small = dataclasses.replace(MICRO, d_model=4)
    params, prompt = params_of(MICRO), [1]
    run = functools.partial(
        stream, MICRO, params, [prompt] * ROWS, sampling=sampling, max_new_tokens=FIRST, chunk=4
    )
    chunks = list(run(draft=Draft(small, params_of(small), 3)))
    assert len(chunks) > 2, "a round, and those behind what it rejected"
    ids = [np.concatenate([c.ids_BC[i, : c.lengths_B[i]] for c in chunks]) for i in range(ROWS)]
    seen = np.bincount(np.stack(ids) @ V ** np.arange(FIRST)[::-1], minlength=V**FIRST)
    expected = ROWS * exact(sampling, prompt)
    assert abs(expected.sum() - ROWS) < 1e-2 * ROWS
    assert surprise(seen, expected) < LIMIT
    assert (
        surprise(
            seen,
            ROWS
            * exact(dataclasses.replace(sampling, temperature=0.9 * sampling.temperature), prompt),
        )
        > 2 * LIMIT
    ), "another temperature"


# --- errors ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Foreign(AttentionBox):
    """A box whose cache can only be extended."""

    def init_cache(self, dims, batch, length, dtype):
        return {}


def test_drafts_that_cannot_be():
    with pytest.raises(ConfigError, match="draft_tokens=0"):
        Draft(SMALL, {}, 0)
    other = dataclasses.replace(SMALL, vocab_size=20)
    with pytest.raises(ConfigError, match="vocabulary of 20 tokens, the model one of 21; fix: a "):
        stream(TINY, {}, [[1]], max_new_tokens=1, draft=Draft(other, {}))
    own = dataclasses.replace(SMALL, attention=Foreign())
    with pytest.raises(ConfigError, match="cache of the draft's Foreign has no method rewound"):
        stream(TINY, {}, [[1]], max_new_tokens=1, draft=Draft(own, {}))
    with pytest.raises(ConfigError, match="cache of the model's Foreign has no method rewound"):
        stream(own, {}, [[1]], max_new_tokens=1, draft=Draft(TINY, {}))
