# SPDX-License-Identifier: Apache-2.0
"""Tokens from a model: prompts in pieces, then compiled steps over a cache, handed over in chunks.

`stream` yields the chunks as they come, `generate` collects them. Text is the caller's: this file
knows ids only, and `until` is where stop strings come in.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from jaxgpt.boxes.base import check_positive
from jaxgpt.boxes.weights import Weight
from jaxgpt.errors import ConfigError, DivergedError
from jaxgpt.model import ModelConfig
from jaxgpt.sample.batch import Batch
from jaxgpt.sample.filters import Filter, Sampling
from jaxgpt.sample.speculative import Draft, DraftBatch
from jaxgpt.sample.steps import row_keys
from jaxgpt.sample.weights import for_decoding
from jaxgpt.shapes import Key, Params

Until = Callable[[int, list[int]], bool]
_UNFILTERED = Sampling()


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The next tokens of every row.

    Attributes:
      ids_BC: New token ids; 0 from a row's length on, so only the length tells a drawn 0.
      log_probs_BC: Of those tokens, in nats, under the model itself: at temperature 1, unfiltered.
      lengths_B: How many of the C tokens each row has drawn, a stop token included.
      finished_B: True once a row has drawn a stop token, or `until` has said so.
      rounds_B: With a draft, in how many passes of the model each row drew these tokens; else None.
    """

    ids_BC: Int[np.ndarray, "B C"]
    log_probs_BC: Float[np.ndarray, "B C"]
    lengths_B: Int[np.ndarray, " B"]
    finished_B: Bool[np.ndarray, " B"]
    rounds_B: Int[np.ndarray, " B"] | None = None


@dataclasses.dataclass(frozen=True)
class Generation:
    """All new tokens, one list for each prompt; see `Chunk` for what they are."""

    ids: list[list[int]]
    log_probs: list[list[float]]
    finished: list[bool]  # False: ended by max_new_tokens


def generate(
    cfg: ModelConfig, params: Params, prompts: Sequence[Sequence[int]], **options: Any
) -> Generation:
    """Continue each prompt; the options are those of `stream`, `max_new_tokens` the only must."""
    ids: list[list[int]] = [[] for _ in prompts]
    log_probs: list[list[float]] = [[] for _ in prompts]
    finished = [False] * len(prompts)
    for chunk in stream(cfg, params, prompts, **options):
        for row, length in enumerate(chunk.lengths_B):
            ids[row] += chunk.ids_BC[row, :length].tolist()
            log_probs[row] += chunk.log_probs_BC[row, :length].tolist()
        finished = chunk.finished_B.tolist()
    return Generation(ids, log_probs, finished)


def stream(
    cfg: ModelConfig,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = _UNFILTERED,
    seed: int | Key = 0,
    samples: Sequence[int] | None = None,
    stop_ids: Collection[int] = (),
    until: Until | None = None,
    past_context: Literal["roll", "error"] = "roll",
    filters: Sequence[Filter] = (),
    dtype: DTypeLike | None = None,
    chunk: int = 16,
    prefill_chunk: int | None = None,
    draft: Draft | None = None,
) -> Iterator[Chunk]:
    """Continue each prompt, chunk by chunk; the first chunk is one token.

    Compiled code is kept for each (cfg, sampling, filters, dtype, chunk), batch size and rounded
    length, of prompts and of caches: pass the same filter objects again, not new lambdas.

    Args:
      cfg: The model.
      params: Its parameters.
      prompts: Token ids, one sequence a row, of any lengths; repeat a prompt for more samples.
      max_new_tokens: At most so many for each row.
      sampling: How tokens are chosen. "Seen" tokens are those of the whole prompt and the new ones.
      seed: A number in [0, 2**32), or a key.
      samples: Number of each row's noise; None: 0, 1, 2, ... Token n of sample s is drawn with
        fold_in(fold_in(key, s), n), so a row draws the same in any batch.
      stop_ids: A row ends with the first of these that it draws, which stays in its ids.
      until: Called between chunks with a row and all its new ids: is it finished? So a row may run
        past a stop string by less than a chunk.
      past_context: What happens beyond context_length tokens. "roll": as the full forward over the
        last context_length tokens, at positions from 0, computed anew for every token. "error":
        refuse before anything is computed.
      filters: Filters of one's own, after those of `sampling`.
      dtype: Compute and cache dtype; None: that of the embedding table. Parameters in another are
        brought to it at every call; `jaxgpt.sample.weights.for_decoding` does it once.
      chunk: Steps between two visits to the host.
      prefill_chunk: Tokens of a prompt that are fed at once, which bounds the memory; None: 512 on
        a CPU, else 2,048.
      draft: A small model that drafts tokens, as far as its context and the model's reach: other
        tokens than without it, by the same distribution; the same if greedy.

    Raises:
      ConfigError: At the call: a prompt or an option that cannot be.
      DivergedError: The model's logits are not finite.
      ValueError: `filters` left a row without a candidate.

    Cost: one token a row and step over the cache, whose length doubles as it fills; past the
      context, context_length tokens.
    """
    prompts = [list(prompt) for prompt in prompts]
    samples = range(len(prompts)) if samples is None else samples
    _check(cfg, prompts, max_new_tokens, stop_ids, past_context)
    _check_noise(seed, samples, len(prompts))
    check_positive(chunk=chunk)
    if prefill_chunk is None:
        prefill_chunk = 512 if jax.default_backend() == "cpu" else 2048
    check_positive(prefill_chunk=prefill_chunk)
    key = seed if isinstance(seed, jax.Array) else jax.random.key(seed)
    stops_V = np.zeros(cfg.dims().padded_vocab_size, bool)
    stops_V[list(stop_ids)] = True
    dtype = None if dtype is None else jnp.dtype(dtype)
    make = Batch
    if draft is not None:
        draft.check(cfg)
        make = functools.partial(DraftBatch, draft=draft)
    batch = make(
        cfg,
        _in_dtype(cfg, params, dtype),
        prompts,
        max_new_tokens=max_new_tokens,
        chunk=chunk,
        prefill_chunk=prefill_chunk,
        keys_B=row_keys(key, jnp.asarray(samples, jnp.uint32)),
        stops_V=jnp.asarray(stops_V),
        sampling=sampling,
        filters=tuple(filters),
        dtype=dtype,
    )
    return _chunks(batch, stops_V, until)


def _chunks(batch: Batch, stops_V: np.ndarray, until: Until | None) -> Iterator[Chunk]:
    """What the batch draws; the device is a chunk ahead where the host has no say in what ends.

    Not before the first chunk: it would wait until the steps are compiled.
    """
    ahead, may_run_ahead = 0, until is None and _runs_beside_the_host()
    finished_B, under_way = np.zeros(len(batch.ids), bool), collections.deque()
    while not finished_B.all():
        while len(under_way) <= ahead and not batch.done and not (batch.rolls and under_way):
            under_way.append(batch.draw())
        if not under_way:
            return
        ids_BC, log_probs_BC, lengths_B, *rounds_B = jax.device_get(under_way.popleft())
        _check_finite(log_probs_BC, batch.ids)
        for row, length in enumerate(lengths_B):
            batch.ids[row] += ids_BC[row, :length].tolist()
            finished_B[row] |= length > 0 and stops_V[ids_BC[row, length - 1]]
        if until:
            done = [end or until(row, list(batch.ids[row])) for row, end in enumerate(finished_B)]
            finished_B = np.array(done, bool)
            batch.finish(finished_B)
        C = max(lengths_B)
        yield Chunk(ids_BC[:, :C], log_probs_BC[:, :C], lengths_B, finished_B.copy(), *rounds_B)
        ahead = int(may_run_ahead)


def _runs_beside_the_host() -> bool:
    """Whether steps are computed while the host goes on; being ahead of a CPU gains nothing."""
    return jax.default_backend() != "cpu"


def _in_dtype(cfg: ModelConfig, params: Params, dtype: jnp.dtype | None) -> Params:
    """Parameters whose matrices no step has to cast."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Weight))
    ready = any(isinstance(leaf, Weight) for leaf in leaves)
    if dtype is None or ready or all(leaf.ndim < 2 or leaf.dtype == dtype for leaf in leaves):
        return params
    return for_decoding(cfg, params, dtype=dtype)


def _check(cfg, prompts, max_new_tokens, stop_ids, past_context) -> None:
    """Raise ConfigError for what can be seen to be wrong before anything is computed."""
    V, L = cfg.vocab_size, cfg.context_length
    if V is None:
        raise ConfigError("vocab_size is None", fix="set model.vocab_size, or train on a text")
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens={max_new_tokens} is negative")
    if not prompts:
        raise ConfigError("no prompts", fix="at least one, of at least one token")
    named = [(f"prompt {row}", prompt) for row, prompt in enumerate(prompts)]
    for name, ids in named:
        if not ids:
            raise ConfigError(
                f"{name} is empty", fix="start with an end-of-text token or a newline"
            )
    for name, ids in [*named, ("stop_ids", stop_ids)]:
        wrong = [i for i in ids if not 0 <= i < V]
        if wrong:
            raise ConfigError(f"{name}: id {wrong[0]} is outside the vocabulary of {V}")
    if past_context not in ("roll", "error"):
        raise ConfigError(f"past_context={past_context!r}", fix="'roll' or 'error'")
    longest = max(map(len, prompts))
    if past_context == "error" and longest + max_new_tokens > L:
        raise ConfigError(
            f"a prompt of {longest} and {max_new_tokens} new tokens exceed context_length={L}",
            fix=f"at most {max(0, L - longest)} new tokens, or past_context='roll'",
        )


def _check_noise(seed, samples, batch) -> None:
    if len(samples) != batch:
        raise ConfigError(f"{len(samples)} samples for {batch} prompts", fix="a number for each")
    seeds = [] if isinstance(seed, jax.Array) else [("seed", seed)]
    for name, number in [*seeds, *(("samples", sample) for sample in samples)]:
        if not 0 <= number < 2**32:  # a key takes 32 bits; the rest would be dropped in silence
            raise ConfigError(f"{name}: {number} must be in [0, 2**32)")


def _check_finite(log_probs_BC, ids) -> None:
    for row, step in np.argwhere(~np.isfinite(log_probs_BC))[:1]:
        where = f"row {row}, new token {len(ids[row]) + step}"
        if np.isnan(log_probs_BC[row, step]):
            raise DivergedError("the model's logits are not finite", where=where)
        raise ValueError(f"the filters left no candidate ({where})")
