# SPDX-License-Identifier: Apache-2.0
"""Long prompts in pieces and caches that grow: other ways to the same tokens."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.ffn import MLP
from jaxgpt.boxes.init import Normal
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.rope import RoPE
from jaxgpt.model import ModelConfig, forward, init_params
from jaxgpt.sample import batch, slots
from jaxgpt.sample import generate as generating
from jaxgpt.sample.batch import Batch
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.generate import generate, stream
from jaxgpt.sample.steps import row_keys

GREEDY = Sampling(temperature=0.0)
MICRO = ModelConfig(
    vocab_size=24,
    context_length=96,
    d_model=16,
    n_layers=1,
    position=RoPE(),
    attention=GQA(n_heads=2, n_kv_heads=1),
    ffn=MLP(d_ff=16),
    init=Normal(std=0.4, embedding_std=0.5, residual="same"),
    vocab_multiple=1,
)
WINDOW = dataclasses.replace(MICRO, attention=GQA(n_heads=2, window=9))
LATENT = dataclasses.replace(MICRO, attention=MLA(2, kv_rank=6, nope_dim=4, rope_dim=4, v_dim=5))
MODELS = [
    pytest.param(MICRO, id="gqa"),
    pytest.param(WINDOW, id="window", marks=pytest.mark.slow),
    pytest.param(LATENT, id="mla", marks=pytest.mark.slow),
]


@functools.cache
def params_of(cfg):
    return jax.jit(init_params, static_argnums=0)(cfg, jax.random.key(1))


def prompt(length, step=7):
    return [(step * i + 3) % 24 for i in range(length)]


@functools.partial(jax.jit, static_argnums=0)
def log_probs_of(cfg, params, tokens_BT):
    return jax.nn.log_softmax(forward(cfg, params, tokens_BT).logits_BTV, axis=-1)


def assert_uncached_argmax(cfg, start, ids, log_probs):
    """The tokens and their log-probabilities are those of one forward without a cache."""
    tokens_1T = np.zeros((1, cfg.context_length), np.int32)  # padded behind, where nothing looks
    fed = (start + ids)[: cfg.context_length]
    tokens_1T[0, : len(fed)] = fed
    want_TV = np.asarray(log_probs_of(cfg, params_of(cfg), tokens_1T))[0]
    want_TV = want_TV[len(start) - 1 : len(start) - 1 + len(ids)]
    assert ids == want_TV.argmax(-1).tolist()
    np.testing.assert_allclose(log_probs, want_TV.max(-1), atol=2e-5)


def batch_of(cfg, prompts, sampling=GREEDY, filters=(), **options):
    B, V = len(prompts), cfg.dims().padded_vocab_size
    sizes: dict[str, Any] = {"max_new_tokens": 40, "chunk": 4, "prefill_chunk": 32, "dtype": None}
    return Batch(
        cfg,
        params_of(cfg),
        prompts,
        keys_B=row_keys(jax.random.key(0), jnp.arange(B, dtype=jnp.uint32)),
        stops_V=jnp.zeros(V, bool),
        sampling=sampling,
        filters=filters,
        **sizes | options,
    )


@pytest.fixture
def small_buckets(monkeypatch):
    """Caches of 16, 32, 64, 128 and 192 slots for a context of 96."""
    monkeypatch.setattr(slots, "FIRST_SLOTS", 16)
    monkeypatch.setattr(batch, "ROOM", 1)


@pytest.fixture
def calls(monkeypatch):
    """The device's part is left out; what it would be told, feeding and drawing."""
    fed, drawn = [], []

    def feed(cfg, params, rows, *, tokens_BT, slots, plain, **options):
        fed.append((tokens_BT.shape[1], slots, plain))
        if slots is not None:
            rows = rows._replace(caches=cfg.init_caches(len(tokens_BT), slots))
        return rows, *nothing(rows, 1)

    def draw(cfg, params, rows, *, first, count, chunk, **options):
        drawn.append((first, count))
        return rows, *nothing(rows, chunk, count)

    def nothing(rows, width, count=1):
        B = len(rows.length_B)
        ids_BC = jnp.zeros((B, width), jnp.int32)
        return ids_BC, jnp.zeros((B, width)), jnp.full(B, count)

    monkeypatch.setattr(batch, "feed_prompt", feed)
    monkeypatch.setattr(batch, "draw_steps", draw)
    return fed, drawn


@pytest.mark.parametrize("cfg", MODELS)
def test_greedy_is_the_uncached_argmax_at_every_edge_of_a_bucket(cfg, small_buckets):
    prompts = [prompt(7), prompt(3, 5)]
    got = generate(cfg, params_of(cfg), prompts, max_new_tokens=90, sampling=GREEDY, chunk=3)
    for start, ids, log_probs in zip(prompts, got.ids, got.log_probs, strict=True):
        assert_uncached_argmax(cfg, start, ids, log_probs)


def test_caches_grow_only_when_they_are_full(small_buckets, calls):
    rows, sizes = batch_of(MICRO, [prompt(7)], max_new_tokens=90), {}
    while not rows.done:
        rows.draw()
        sizes[rows.drawn] = rows.rows.caches[0].pos_BS.shape[1]
    # Behind a prompt padded to 16 there are drawn - 1 tokens.
    assert all(15 + drawn <= slots for drawn, slots in sizes.items())
    assert all(slots <= 32 or slots < 2 * (15 + drawn) for drawn, slots in sizes.items())
    assert sorted(set(sizes.values())) == [32, 64, 128]


def test_a_short_sample_has_one_size(small_buckets, calls, monkeypatch):
    monkeypatch.setattr(batch, "ROOM", 40)
    rows, sizes = batch_of(MICRO, [prompt(7)]), set()
    while not rows.done:
        rows.draw()
        sizes.add(rows.rows.caches[0].pos_BS.shape[1])
    assert sizes == {64}


@pytest.mark.parametrize("cfg", MODELS)
@pytest.mark.parametrize("length", [33, pytest.param(64, marks=pytest.mark.slow)])
def test_a_prompt_in_pieces_is_the_whole_prompt(cfg, length):
    prompts = [prompt(length), prompt(3, 5), prompt(34, 11)]
    run = functools.partial(generate, cfg, params_of(cfg), prompts, max_new_tokens=3)
    whole, pieces = run(sampling=GREEDY), run(sampling=GREEDY, prefill_chunk=32)
    assert pieces.ids == whole.ids
    np.testing.assert_allclose(pieces.log_probs, whole.log_probs, atol=2e-5)
    for start, ids, log_probs in zip(prompts, pieces.ids, pieces.log_probs, strict=True):
        assert_uncached_argmax(cfg, start, ids, log_probs)


@pytest.mark.slow
def test_pieces_of_a_prompt_that_is_longer_than_the_context():
    run = functools.partial(generate, MICRO, params_of(MICRO), [prompt(130), prompt(9)])
    whole = run(max_new_tokens=1, prefill_chunk=96)
    pieces = run(max_new_tokens=1, prefill_chunk=32)
    assert pieces.ids == whole.ids
    np.testing.assert_allclose(pieces.log_probs, whole.log_probs, atol=2e-5)


@pytest.mark.parametrize(
    ("lengths", "prefill_chunk", "pieces"),
    [
        ([32, 32], 32, [(32, 192, True)]),  # no row has padding: a kernel may take it for plain
        ([31, 31], 32, [(32, 192, False)]),
        ([32, 31], 32, [(32, 192, False)]),
        ([64, 64], 32, [(32, 192, True), (32, None, False)]),
        ([65, 2], 32, [(16, 192, False), (32, None, False), (32, None, False)]),
        ([200, 200], 96, [(96, 192, True)]),
    ],
)
def test_the_pieces_and_what_is_promised_of_them(calls, lengths, prefill_chunk, pieces):
    batch_of(MICRO, [prompt(n) for n in lengths], prefill_chunk=prefill_chunk).draw()
    assert calls[0] == pieces


@pytest.mark.parametrize(
    ("beside", "until", "dispatched"),
    [
        (True, None, (0, 2, 3, 3)),
        (True, lambda row, ids: False, (0, 1, 2, 3)),
        (False, None, (0, 1, 2, 3)),
    ],
)
def test_the_device_is_a_chunk_ahead_unless_the_host_has_a_say(
    calls, beside, until, dispatched, monkeypatch
):
    monkeypatch.setattr(generating, "_runs_beside_the_host", lambda: beside)
    options: dict[str, Any] = {"max_new_tokens": 12, "chunk": 4, "until": until}
    for seen, _ in enumerate(stream(MICRO, params_of(MICRO), [prompt(5)], **options)):
        assert calls[1] == [(1, 4), (5, 4), (9, 3)][: dispatched[seen]]


def test_the_window_begins_when_the_host_has_all_tokens(calls, monkeypatch):
    monkeypatch.setattr(generating, "_runs_beside_the_host", lambda: True)
    options: dict[str, Any] = {"max_new_tokens": 20, "chunk": 4}
    for seen, _ in enumerate(stream(MICRO, params_of(MICRO), [prompt(90)], **options)):
        told = [(1, 4), (5, 2), (7, 4), (11, 4), (15, 4), (19, 1)]
        assert calls[1] == told[: (0, 2, 2, 4, 5, 6, 6)[seen]]


def test_counts_are_kept_only_where_something_asks(calls):
    def own(logits_BV, counts_BV):
        return logits_BV

    for sampling, filters, kept in [
        (GREEDY, (), False),
        (Sampling(repetition_penalty=1.1), (), True),
        (GREEDY, (own,), True),
    ]:
        rows = batch_of(MICRO, [prompt(5), [1]], sampling, filters)
        rows.draw()
        counts_BV = rows.rows.counts_BV
        assert (counts_BV is not None) == kept
        assert counts_BV is None or counts_BV.sum(1).tolist() == [5, 1]


@pytest.mark.parametrize("how", ["argument", "params"])
def test_caches_have_the_dtype_of_the_computation(how):
    params, dtype = params_of(MICRO), jnp.dtype(jnp.bfloat16)
    rows = batch_of(MICRO, [prompt(5)], dtype=dtype)
    if how == "params":
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        rows = batch_of(MICRO, [prompt(5)])
        rows._params = params
    rows.draw()
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(rows.rows.caches)}
    assert dtypes == {dtype, jnp.dtype(jnp.int32)}


def test_matrices_are_cast_once_and_only_if_they_have_another_dtype(calls, monkeypatch):
    cast, casts = generating.for_decoding, []
    monkeypatch.setattr(
        generating, "for_decoding", lambda *args, **how: casts.append(how) or cast(*args, **how)
    )
    params, dtype = params_of(MICRO), jnp.dtype(jnp.bfloat16)
    for how, times in [({}, 0), ({"dtype": "float32"}, 0), ({"dtype": "bfloat16"}, 1)]:
        casts.clear()
        list(stream(MICRO, params, [[1]], max_new_tokens=9, chunk=2, **how))
        assert casts == [{"dtype": dtype}] * times
    casts.clear()
    ready = cast(MICRO, params, dtype=dtype)
    list(stream(MICRO, ready, [[1]], max_new_tokens=9, chunk=2, dtype=dtype))
    assert not casts
