# SPDX-License-Identifier: Apache-2.0
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.ffn import MLP
from jaxgpt.boxes.init import Normal
from jaxgpt.boxes.position import Learned, NoPosition, Sinusoidal
from jaxgpt.boxes.rope import RoPE
from jaxgpt.errors import ConfigError, DivergedError
from jaxgpt.model import ModelConfig, forward, init_params
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.generate import generate, stream

GREEDY = Sampling(temperature=0.0)
TINY = ModelConfig(
    vocab_size=21,
    context_length=12,
    d_model=16,
    n_layers=2,
    attention=GQA(n_heads=4),
    ffn=MLP(d_ff=32),
    init=Normal(std=0.5, embedding_std=0.5, residual="same"),
    vocab_multiple=8,
)
RAGGED = [[3, 1, 4], [7], [2, 7, 1, 8, 2]]


@functools.cache
def params_of(cfg: ModelConfig):
    return jax.jit(init_params, static_argnums=0)(cfg, jax.random.key(1))


@functools.partial(jax.jit, static_argnums=0)
def full_forward(cfg, params, tokens_BT):
    return forward(cfg, params, tokens_BT).logits_BTV


def full_log_probs(cfg, params, prompt, ids) -> np.ndarray:
    """Of each new token and every other: plain forwards over the last context_length tokens."""
    L, tokens = cfg.context_length, prompt + ids
    windows = [tokens[:n][-L:] for n in range(len(prompt), len(tokens))]
    padded = np.zeros((len(windows), L), np.int32)
    for row, window in enumerate(windows):
        padded[row, : len(window)] = window  # on the right: causal attention does not see it
    logits = np.asarray(full_forward(cfg, params, jnp.asarray(padded)))
    last = logits[np.arange(len(windows)), [len(window) - 1 for window in windows]]
    return np.asarray(jax.nn.log_softmax(last, axis=-1))


def assert_equals_full_forward(cfg, prompts, *, greedy=True, **options):
    params = params_of(cfg)
    sampling = GREEDY if greedy else Sampling()
    got = generate(cfg, params, prompts, sampling=sampling, **options)
    for prompt, ids, log_probs in zip(prompts, got.ids, got.log_probs, strict=True):
        want = full_log_probs(cfg, params, prompt, ids)
        np.testing.assert_allclose(log_probs, want[np.arange(len(ids)), ids], atol=2e-5)
        if greedy:
            assert ids == want.argmax(-1).tolist()
    return got


@pytest.mark.parametrize(
    ("position", "kv_heads"),
    [
        (Learned(), 4),
        (Learned(), 1),
        (Sinusoidal(), 4),
        (RoPE(), 2),
        (RoPE(), 1),
        (NoPosition(), 2),
    ],
)
def test_ragged_cached_decoding_equals_full_forwards(position, kv_heads):
    attention = GQA(n_heads=4, n_kv_heads=kv_heads)
    cfg = dataclasses.replace(TINY, position=position, attention=attention)
    assert_equals_full_forward(cfg, RAGGED, max_new_tokens=7)


def test_log_probs_are_those_of_the_model_whatever_the_filters():
    options = {"max_new_tokens": 7, "past_context": "error", "seed": 3}
    assert_equals_full_forward(TINY, RAGGED, greedy=False, **options)
    sampling = Sampling(0.7, 9, 0.9, 0.01, 1.3)
    got = generate(TINY, params_of(TINY), RAGGED, sampling=sampling, **options)
    for prompt, ids, log_probs in zip(RAGGED, got.ids, got.log_probs, strict=True):
        want = full_log_probs(TINY, params_of(TINY), prompt, ids)
        np.testing.assert_allclose(log_probs, want[np.arange(7), ids], atol=2e-5)


@pytest.mark.parametrize("position", [Learned(), Sinusoidal(), RoPE()])
def test_rolling_equals_full_forwards_over_the_last_window(position):
    cfg = dataclasses.replace(TINY, position=position)
    prompts = [[3, 1, 4], list(range(10)), [7]]  # the second reaches the context first
    assert_equals_full_forward(cfg, prompts, max_new_tokens=17)
    longer = [list(range(21)), [5, 6], [8] * 12]  # than the context
    assert_equals_full_forward(cfg, longer, max_new_tokens=5)


@pytest.mark.parametrize("length", [11, 12, 13])
def test_prompts_about_as_long_as_the_context(length):
    prompt = [i % 21 for i in range(length)]
    assert_equals_full_forward(TINY, [prompt], max_new_tokens=3)


def test_chunks_and_lengths_do_not_change_what_is_drawn():
    run = functools.partial(generate, TINY, params_of(TINY), RAGGED, seed=5)
    whole = run(max_new_tokens=16, chunk=5)
    for count, chunk in [(1, 5), (2, 5), (8, 5), (16, 1)]:
        got = run(max_new_tokens=count, chunk=chunk)
        assert got.ids == [row[:count] for row in whole.ids]
        assert got.finished == [False] * 3


def test_a_row_draws_the_same_alone_and_in_any_batch():
    run = functools.partial(generate, TINY, params_of(TINY), max_new_tokens=7)
    batch = run(RAGGED)
    assert run(RAGGED) == batch
    for row, prompt in list(enumerate(RAGGED))[1:]:
        assert run([prompt], samples=[row]).ids == [batch.ids[row]]
    assert run(RAGGED[::-1], samples=[2, 1, 0]).ids == batch.ids[::-1]
    assert run(RAGGED, seed=jax.random.key(0)) == batch
    assert run(RAGGED, seed=1).ids != batch.ids
    first, second, _ = run([[3], [3], [3]]).ids  # three samples of one prompt
    assert first != second


def test_greedy_does_not_depend_on_seed_k_or_p():
    run = functools.partial(generate, TINY, params_of(TINY), RAGGED, max_new_tokens=5)
    want = run(sampling=GREEDY).ids
    assert run(sampling=GREEDY, seed=9).ids == want
    assert run(sampling=Sampling(0.0, top_k=3, top_p=0.1), seed=4).ids == want
    assert run(sampling=Sampling(1e-8), seed=4).ids == want


# --- vocabulary, filters, dtypes ------------------------------------------------------------------


def test_a_fresh_padded_model_never_draws_padding():
    cfg = dataclasses.replace(
        TINY, vocab_size=65, vocab_multiple=128, init=Normal(), context_length=32
    )
    prompts = [[i % 65] for i in range(500)]
    for sampling in (Sampling(), Sampling(top_k=100, top_p=0.99999)):
        got = generate(cfg, params_of(cfg), prompts, max_new_tokens=20, sampling=sampling, chunk=20)
        ids = np.asarray(got.ids)
        assert ids.shape == (500, 20)
        assert ids.min() == 0
        assert ids.max() == 64


def test_own_filters_are_called_with_counts_and_traced_once():
    traced = []

    def never_twice(logits_BV, counts_BV):
        traced.append(logits_BV.shape)
        return jnp.where(counts_BV > 0, -jnp.inf, logits_BV)

    run = functools.partial(generate, TINY, params_of(TINY), filters=[never_twice])
    for sampling in (GREEDY, Sampling()):
        got = run(RAGGED, max_new_tokens=11, sampling=sampling)
        for row, ids in zip(RAGGED, got.ids, strict=True):
            assert len(set(ids + row)) == len(set(row)) + 11
    once = len(traced)
    run([[1], [2, 3], [4, 5]], max_new_tokens=10, seed=8, stop_ids=[3], past_context="error")
    assert len(traced) == once  # other prompts, seeds, lengths and stops: nothing is traced again
    with pytest.raises(ValueError, match=r"filters left no candidate \(row 0, new token 18\)"):
        run(RAGGED, max_new_tokens=21)


def test_the_whole_prompt_counts_as_seen():
    def only_seen(logits_BV, counts_BV):
        return jnp.where(counts_BV > 0, logits_BV, -jnp.inf)

    long = [20] + [2] * 14  # 20 has left the window
    got = generate(TINY, params_of(TINY), [long] * 8, max_new_tokens=12, filters=[only_seen])
    assert {i for row in got.ids for i in row} == {2, 20}


def test_repetition_penalty_sees_the_prompt_and_the_new_tokens():
    run = functools.partial(generate, TINY, params_of(TINY), [[3, 1, 4]], max_new_tokens=6)
    assert len({3, 1, 4, *run(sampling=GREEDY).ids[0]}) < 9
    # So strong a penalty that whatever has a positive logit and is new comes first.
    assert len({3, 1, 4, *run(sampling=Sampling(0.0, repetition_penalty=1e6)).ids[0]}) == 9


@pytest.mark.parametrize("how", ["argument", "params"])
def test_bfloat16_is_asked_for_or_follows_the_parameters(how):
    params, dtype = params_of(TINY), jnp.bfloat16
    if how == "params":
        params, dtype = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), None
    got = generate(TINY, params, RAGGED, max_new_tokens=14, dtype=dtype)
    assert [len(row) for row in got.ids] == [14] * 3


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1], [2, 21]], {}, "prompt 1: id 21 is outside the vocabulary of 21"),
        ([[-1]], {}, "prompt 0: id -1"),
        ([[1]], {"stop_ids": [99]}, "stop_ids: id 99"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens=-1"),
        ([[1]], {"chunk": 0}, "chunk=0"),
        ([[1]], {"prefill_chunk": 0}, "prefill_chunk=0"),
        ([[1]], {"seed": -1}, "seed: -1"),
        ([[1]], {"seed": 2**32}, "seed: 4294967296"),
        ([[1]], {"samples": [0, 1]}, "2 samples for 1 prompts"),
        ([[1]], {"samples": [-1]}, "samples: -1"),
        (
            [[1], [2] * 10],
            {"max_new_tokens": 3, "past_context": "error"},
            "a prompt of 10 and 3 new tokens exceed context_length=12; fix: at most 2 new tokens",
        ),
        ([[2] * 13], {"past_context": "error"}, "prompt of 13"),
    ],
)
def test_wrong_requests_are_refused_at_the_call(prompts, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        stream(TINY, {}, prompts, **{"max_new_tokens": 5, **options})
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_no_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="vocab_size is None"):
        stream(dataclasses.replace(TINY, vocab_size=None), {}, [[1]], max_new_tokens=1)


def test_no_new_tokens_are_none():
    got = generate(TINY, params_of(TINY), RAGGED, max_new_tokens=0)
    assert (got.ids, got.log_probs, got.finished) == ([[]] * 3, [[]] * 3, [False] * 3)
    assert list(stream(TINY, {}, RAGGED, max_new_tokens=0)) == []


def test_logits_that_are_not_finite_end_it():
    poisoned = jax.tree.map(lambda x: x.at[0].set(jnp.nan), params_of(TINY))
    for sampling in (GREEDY, Sampling(), Sampling(top_k=2, top_p=0.5)):
        with pytest.raises(DivergedError, match="row 0, new token 0") as caught:
            generate(TINY, poisoned, RAGGED, max_new_tokens=3, sampling=sampling)
    assert caught.value.exit_code == 3
