# SPDX-License-Identifier: Apache-2.0
"""How rows end, on models whose tokens are scripted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.init import Normal
from jaxgpt.errors import DivergedError
from jaxgpt.model import ModelConfig, init_params
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.generate import generate, stream

GREEDY = Sampling(temperature=0.0)
A, B, C, D = 11, 12, 13, 14


def scripted(script, context_length=32, vocab_size=16):
    """A model whose best next token depends on the position alone: script[position]."""
    cfg = ModelConfig(
        vocab_size=vocab_size,
        context_length=context_length,
        d_model=context_length,
        n_layers=1,
        attention=GQA(n_heads=1),
        head=Untied(),
        init=Normal(residual="zero"),
        vocab_multiple=1,
    )
    params = jax.jit(init_params, static_argnums=0)(cfg, jax.random.key(1))
    params["embed"]["embedding"] = jnp.zeros((vocab_size, context_length))
    params["position"]["embedding"] = jnp.eye(context_length)
    kernel = np.zeros((context_length, vocab_size), np.float32)
    kernel[np.arange(len(script)), script] = 50.0
    params["head"]["out"]["kernel"] = jnp.asarray(kernel)
    return cfg, params


def two_rows(eos, **options):
    """Row 0 is scripted to draw A, eos, C, D and row 1 to draw A, B, C, D."""
    cfg, params = scripted([A, eos, C, D, A, B, C, D, *[5] * 20])
    options = {"max_new_tokens": 4, "sampling": GREEDY, "stop_ids": [eos], **options}
    return cfg, params, [[9], [9, 9, 9, 9, 9]], options


@pytest.mark.parametrize("eos", [1, 0])  # 0 is what stands behind the end
@pytest.mark.parametrize("chunk", [2, 16])
def test_a_stop_token_stays_and_the_row_falls_silent(eos, chunk):
    cfg, params, prompts, options = two_rows(eos, chunk=chunk)
    chunks = list(stream(cfg, params, prompts, **options))
    ids = np.concatenate([c.ids_BC for c in chunks], axis=1)
    assert ids.tolist() == [[A, eos, 0, 0], [A, B, C, D]]
    assert sum(c.lengths_B for c in chunks).tolist() == [2, 4]
    assert chunks[-1].finished_B.tolist() == [True, False]
    got = generate(cfg, params, prompts, **options)
    assert got.ids == [[A, eos], [A, B, C, D]]
    assert [len(row) for row in got.log_probs] == [2, 4]
    assert got.finished == [True, False]
    alone = generate(cfg, params, prompts[1:], **options)
    assert (alone.ids, alone.log_probs) == (got.ids[1:], got.log_probs[1:])


def test_two_stop_ids_and_a_stop_id_in_the_prompt():
    cfg, params, _, options = two_rows(1, stop_ids={1, C})
    got = generate(cfg, params, [[1], [9, C, 1, 9, 1]], **options)
    assert got.ids == [[A, 1], [A, B, C]]
    assert got.finished == [True, True]


@pytest.mark.parametrize("chunk", [2, 16])
def test_it_ends_early_when_all_rows_are_finished(chunk):
    cfg, params, prompts, options = two_rows(1, stop_ids=[1, C], chunk=chunk, max_new_tokens=20)
    chunks = list(stream(cfg, params, prompts, **options))
    assert sum(c.ids_BC.shape[1] for c in chunks) == 3
    first = generate(cfg, params, [[9]], **options | {"stop_ids": [A]})
    assert first.ids == [[A]]


def test_a_row_that_finished_stays_silent_past_the_context():
    cfg, params = scripted([A, 1, C, D, A, B, C, D], context_length=8)
    options = {"max_new_tokens": 8, "sampling": GREEDY, "stop_ids": [1], "chunk": 3}
    got = generate(cfg, params, [[9], [9] * 5], **options)
    assert got.ids == [[A, 1], [A, B, C, D, D, D, D, D]]


def test_until_finishes_a_row_and_sees_all_its_new_tokens():
    cfg, params, prompts, options = two_rows(1, stop_ids=[], chunk=2, max_new_tokens=7)
    seen = []

    def until(row, ids):
        seen.append((row, len(ids)))
        return row == 0 and ids[:2] == [A, 1]

    got = generate(cfg, params, prompts, until=until, **options)
    assert got.ids == [[A, 1, C], [A, B, C, D, 5, 5, 5]]
    assert got.finished == [True, False]
    assert seen == [(0, 1), (1, 1), (0, 3), (1, 3), (1, 5), (1, 7)]
    assert generate(cfg, params, prompts, until=lambda row, ids: True, **options).finished == [
        True,
        True,
    ]


def test_the_host_may_stop_listening():
    cfg, params, prompts, options = two_rows(1)
    chunks = stream(cfg, params, prompts, **options)
    assert next(chunks).ids_BC.tolist() == [[A], [A]]
    chunks.close()


@pytest.mark.parametrize("chunk", [2, 16])
def test_late_nan_is_noticed_and_a_finished_row_cannot_cause_it(chunk):
    cfg, params, prompts, options = two_rows(1, chunk=chunk, max_new_tokens=8)
    params["embed"]["embedding"] = params["embed"]["embedding"].at[C].set(jnp.nan)
    with pytest.raises(DivergedError, match="row 1, new token 3"):
        generate(cfg, params, prompts, **options)
    params["embed"]["embedding"] = jnp.zeros_like(params["embed"]["embedding"]).at[0].set(jnp.nan)
    assert generate(cfg, params, prompts, **options).ids == [[A, 1], [A, B, C, D, 5, 5, 5, 5]]
