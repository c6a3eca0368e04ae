# SPDX-License-Identifier: Apache-2.0
"""The log-likelihood of ids behind other ids, for many pairs at a time: what all scores are of.

Rows are sorted by length and filled up to few widths, so that few programs are compiled; behind a
row's end stands filler, which no token before it can see. Logits are made of scored tokens alone,
some hundreds at a time. What is computed for a pair does not depend on the pairs beside it, but for
rounding.

Left out: text (`pairs.py`), and sharing the prefix that several pairs have in common.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxgpt.errors import ConfigError, DivergedError
from jaxgpt.losses import token_nats
from jaxgpt.model import ModelConfig, forward
from jaxgpt.readout import logits_of
from jaxgpt.shapes import Params, wide
from jaxgpt.stack import used

Ids = Sequence[int] | np.ndarray
Pair = tuple[Ids, Ids]
"""A context of at least one id, and the ids behind it that are scored, at least one."""

SHORTEST = 16  # tokens, of the widths that are compiled
CPU_TOKENS, TOKENS = 4096, 65_536  # of a batch, on a CPU and elsewhere
MOST_ROWS = 256
LOGIT_BYTES = 1 << 27  # of the logits that there are at a time


class Likelihoods(NamedTuple):
    """What a model thinks of continuations.

    Attributes:
      log_probs: Of each continuation behind its context, in nats, summed over its tokens.
      greedy: Whether each of its tokens is the likeliest one at its place.
      cut: How many tokens of the context were left out on the left, for lack of room.
    """

    log_probs: Float[np.ndarray, " n"]
    greedy: Bool[np.ndarray, " n"]
    cut: Int[np.ndarray, " n"]


def loglikelihoods(
    cfg: ModelConfig,
    params: Params,
    pairs: Sequence[Pair],
    *,
    batch_size: int | None = None,
    dtype: DTypeLike | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Likelihoods:
    """Score continuations.

    A pair that does not fit into the context loses tokens on the left: what is read is at most
    `context_length` tokens, and the last token of a continuation need not be read.

    Args:
      cfg: The model.
      params: Its parameters.
      pairs: Ids of contexts and continuations.
      batch_size: Rows side by side; None: as many as have 4,096 tokens together on a CPU, 65,536
        elsewhere.
      dtype: Of the computation; None: that of the embedding. Sums are in float64.
      progress: Called with the number of pairs that are done.

    Returns:
      In the order of the pairs.

    Raises:
      ConfigError: An empty context or continuation, or one that is longer than the model's context.
      DivergedError: The model's logits are not finite.
    """
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1")
    rows = [_row(cfg, number, *pair) for number, pair in enumerate(pairs)]
    n, dtype = len(rows), None if dtype is None else jnp.dtype(dtype)
    log_probs, greedy = np.zeros(n), np.ones(n, bool)
    order = sorted(range(n), key=lambda i: -len(rows[i].ids))

    def take(numbers: list[int], found: list[tuple[Array, Array, int]]) -> None:
        sizes = [rows[i].scored for i in numbers]
        nats, hits = (np.concatenate([np.asarray(f[k])[: f[2]] for f in found]) for k in (0, 1))
        starts = np.cumsum([0, *sizes[:-1]])
        for wrong in np.flatnonzero(~np.isfinite(nats))[:1]:
            number = numbers[np.searchsorted(starts, wrong, side="right") - 1]
            raise DivergedError("the model's logits are not finite", where=f"pair {number}")
        log_probs[numbers] = -np.add.reduceat(nats.astype(np.float64), starts)
        greedy[numbers] = np.logical_and.reduceat(hits, starts)

    start, waiting = 0, None
    while start < n:
        width = _width(len(rows[order[start]].ids) - 1, cfg.context_length)
        B = _n_rows(width, batch_size, n - start)
        numbers = order[start : start + B]
        found = _score(cfg, params, [rows[i] for i in numbers], B, width, dtype)
        if waiting is not None:  # the device works on one batch while the last one is read
            take(*waiting)
            progress(start)
        start, waiting = start + len(numbers), (numbers, found)
    if waiting is not None:
        take(*waiting)
        progress(n)
    return Likelihoods(log_probs, greedy, np.array([row.cut for row in rows], np.int64))


class _Row(NamedTuple):
    """Ids of which the last `scored` are scored, `cut` having been left out before them."""

    ids: np.ndarray
    scored: int
    cut: int


def _row(cfg: ModelConfig, number: int, context: Ids, continuation: Ids) -> _Row:
    if not len(context) or not len(continuation):
        empty = "continuation" if len(context) else "context"
        raise ConfigError(f"pair {number} has an empty {empty}", fix="at least one id of each")
    limit = cfg.context_length + 1
    if len(continuation) >= limit:
        raise ConfigError(
            f"pair {number} has a continuation of {len(continuation)} tokens, and the model reads "
            f"{cfg.context_length}",
            fix="leave it out, or cut it",
        )
    ids = np.concatenate([np.asarray(context, np.int64), np.asarray(continuation, np.int64)])
    if (ids < 0).any() or (ids >= (cfg.vocab_size or 0)).any():
        raise ConfigError(
            f"pair {number} holds an id outside the vocabulary of {cfg.vocab_size}",
            fix="the tokenizer that the model was trained with",
        )
    return _Row(ids[-limit:], len(continuation), max(0, len(ids) - limit))


def _width(length: int, limit: int) -> int:
    """The tokens that are read of a row of this length: of 16, 24, 32, 48, 64, 96 and so on."""
    width = SHORTEST
    while width < length:
        width = width * 3 // 2 if width & (width - 1) == 0 else width * 4 // 3
    return min(width, limit)


def _n_rows(width: int, batch_size: int | None, left: int) -> int:
    """Rows side by side: a power of two, or the number that was asked for; few of them filler."""
    tokens = CPU_TOKENS if jax.default_backend() == "cpu" else TOKENS
    most = batch_size or 1 << (max(1, min(tokens // width, MOST_ROWS)).bit_length() - 1)
    enough = 1 << (left - 1).bit_length()
    return min(most, enough if 3 * enough <= 4 * left else enough // 2)


def _score(
    cfg: ModelConfig, params: Params, rows: list[_Row], B: int, width: int, dtype: Any
) -> list[tuple[Array, Array, int]]:
    """Nats of the scored tokens, and whether they are the likeliest, in groups of some size."""
    tokens_BT = np.zeros((B, width), np.int32)
    places: list[tuple[np.ndarray, ...]] = []
    for number, row in enumerate(rows):
        length = len(row.ids) - 1
        tokens_BT[number, :length] = row.ids[:-1]
        place = np.arange(length - row.scored, length)
        places.append((np.full_like(place, number), place, row.ids[-row.scored :]))
    row_M, place_M, target_M = (
        np.concatenate(each).astype(np.int32) for each in zip(*places, strict=True)
    )
    x_BTD = _hidden(cfg, params, jnp.asarray(tokens_BT), dtype)
    read = {name: params[name] for name in ("embed", "head") if name in params}
    most, found = _group(cfg), []
    for begin in range(0, len(row_M), most):
        n = min(most, len(row_M) - begin)
        size = min(most, max(SHORTEST, 1 << (n - 1).bit_length()))
        index = np.minimum(np.arange(begin, begin + size), len(row_M) - 1)
        x_TD = _picked(x_BTD, jnp.asarray(row_M[index]), jnp.asarray(place_M[index]))
        found.append((*_terms(cfg, read, x_TD, jnp.asarray(target_M[index]), dtype), n))
    return found


def _group(cfg: ModelConfig) -> int:
    """Tokens whose logits there are at a time: a power of two."""
    most = LOGIT_BYTES // (4 * cfg.dims().padded_vocab_size)
    return 1 << (max(SHORTEST, min(most, CPU_TOKENS)).bit_length() - 1)


@functools.partial(jax.jit, static_argnames=("cfg", "dtype"))
def _hidden(
    cfg: ModelConfig, params: Params, tokens_BT: Int[Array, "B T"], dtype: Any
) -> Float[Array, "B T D"]:
    return forward(cfg, params, tokens_BT, dtype=dtype, headless=True).logits_BTV


@jax.jit
def _picked(
    x_BTD: Float[Array, "B T D"], row_M: Int[Array, " M"], place_M: Int[Array, " M"]
) -> Float[Array, "M D"]:
    return x_BTD[row_M, place_M]


@functools.partial(jax.jit, static_argnames=("cfg", "dtype"))
def _terms(
    cfg: ModelConfig,
    params: Params,
    x_MD: Float[Array, "M D"],
    target_M: Int[Array, " M"],
    dtype: Any,
) -> tuple[Float[Array, " M"], Bool[Array, " M"]]:
    logits_1MV = wide(logits_of(cfg, used(params, dtype=dtype), x_MD[None]))
    hit_M = logits_1MV[0].argmax(-1) == target_M
    return token_nats(logits_1MV, target_M[None])[0], hit_M
