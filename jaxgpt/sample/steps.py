# SPDX-License-Identifier: Apache-2.0
"""The compiled part of sampling: feed a piece of the prompts; feed and draw many times in a loop.

Decoding over a cache and the rolling window are the same loop: they differ in how many tokens a
step feeds, and in whether there is a cache. Which of them runs when is `generate.py`'s.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxgpt.model import ModelConfig, forward
from jaxgpt.sample.filters import Filter, Sampling, draw, filtered_logits
from jaxgpt.shapes import Key, Params

PAD_ID = 0  # stands in front of a prompt and behind the end of a row; any valid id would do


class Rows(NamedTuple):
    """Where the rows of a batch stand.

    Attributes:
      tokens_BT: To be fed next: the last token, or a window.
      length_B: Tokens of each row so far, those to be fed included.
      counts_BV: How often each token is in a row; None where nothing asks (`needs_counts`).
      finished_B: True for rows that draw no more.
      caches: Of the tokens before; None where `tokens_BT` is all that the model sees.
    """

    tokens_BT: Int[Array, "B T"]
    length_B: Int[Array, " B"]
    counts_BV: Int[Array, "B V"] | None
    finished_B: Bool[Array, " B"]
    caches: Any


@functools.partial(
    jax.jit,
    static_argnames=("cfg", "sampling", "filters", "dtype", "slots", "plain"),
    donate_argnames="rows",
)
def feed_prompt(
    cfg: ModelConfig,
    params: Params,
    rows: Rows,
    keys_B: Key,
    stops_V: Bool[Array, " V"],
    tokens_BT: Int[Array, "B T"],
    after: Int[Array, ""] | int,
    *,
    sampling: Sampling,
    filters: tuple[Filter, ...],
    dtype: DTypeLike | None,
    slots: int | None = None,
    plain: bool = False,
) -> tuple[Rows, Int[Array, "B 1"], Float[Array, "B 1"], Int[Array, " B"]]:
    """Feed a piece of the prompts, and draw each row's first token behind the last piece.

    Args:
      cfg: The model.
      params: Its parameters.
      rows: Given away. Their length is that of the whole prompt, the caches hold the pieces before.
      keys_B: See `draw_steps`.
      stops_V: See `draw_steps`.
      tokens_BT: The piece, left-padded where a row has not begun.
      after: Tokens of the prompts behind this piece; as long as there are any, nothing is drawn.
      sampling: See `draw_steps`.
      filters: See `draw_steps`.
      dtype: See `draw_steps`.
      slots: Of the caches that the first piece begins.
      plain: Promises that this is the first piece and that none of it is padding.

    Returns:
      As `draw_steps`, for one step.
    """
    end_B = jnp.minimum(rows.length_B, cfg.context_length) - after
    caches = slots if rows.caches is None else rows.caches
    pos_BT = None if plain else _positions(end_B, tokens_BT.shape[1])
    logits_BV, caches = _next_logits(cfg, params, tokens_BT, pos_BT, caches, dtype)
    live_B = ~rows.finished_B & (jnp.asarray(after) == 0)
    rows = rows._replace(caches=caches)
    how = sampling, filters
    rows, id_B, log_prob_B = _drawn(rows, logits_BV, live_B, keys_B, stops_V, 0, *how)
    return rows, id_B[:, None], log_prob_B[:, None], live_B.astype(jnp.int32)


@functools.partial(
    jax.jit,
    static_argnames=("cfg", "sampling", "filters", "dtype", "chunk"),
    donate_argnames="rows",
)
def draw_steps(
    cfg: ModelConfig,
    params: Params,
    rows: Rows,
    keys_B: Key,
    stops_V: Bool[Array, " V"],
    first: Int[Array, ""] | int,
    count: Int[Array, ""] | int,
    *,
    sampling: Sampling,
    filters: tuple[Filter, ...],
    dtype: DTypeLike | None,
    chunk: int,
) -> tuple[Rows, Int[Array, "B C"], Float[Array, "B C"], Int[Array, " B"]]:
    """Draw `count` tokens for each row, fewer where all rows finish before.

    A finished row goes on as padding, at position -1, where no other row can notice it.

    Args:
      cfg: The model.
      params: Its parameters.
      rows: Given away: the buffers of the caches are written in place.
      keys_B: A key for each row; token n is drawn with `fold_in(key, n)`.
      stops_V: True for tokens that finish a row.
      first: Number of tokens drawn before.
      count: At most `chunk`.
      sampling: How tokens are chosen.
      filters: Further filters.
      dtype: Of the computation, or None.
      chunk: C, the width of what is returned.

    Returns:
      The rows; ids_BC; log_probs_BC under the model itself, NaN where its logits are not finite and
      -inf where the filters left no candidate; lengths_B, the number of tokens drawn by each row.
    """
    B, T = rows.tokens_BT.shape

    def more(carry):
        i, rows, *_ = carry
        return (i < count) & ~rows.finished_B.all()

    def step(carry):
        i, rows, ids_BC, log_probs_BC, lengths_B = carry
        live_B = ~rows.finished_B
        end_B = jnp.where(live_B, jnp.minimum(rows.length_B, cfg.context_length), 0)
        pos_BT = _positions(end_B, T)
        logits_BV, caches = _next_logits(cfg, params, rows.tokens_BT, pos_BT, rows.caches, dtype)
        rows = rows._replace(caches=caches)
        how = first + i, sampling, filters
        rows, id_B, log_prob_B = _drawn(rows, logits_BV, live_B, keys_B, stops_V, *how)
        ids_BC = ids_BC.at[:, i].set(id_B)
        log_probs_BC = log_probs_BC.at[:, i].set(log_prob_B)
        return i + 1, rows, ids_BC, log_probs_BC, lengths_B + live_B

    ids_BC = jnp.full((B, chunk), PAD_ID, jnp.int32)
    start = (jnp.int32(0), rows, ids_BC, jnp.zeros((B, chunk)), jnp.zeros(B, jnp.int32))
    return jax.lax.while_loop(more, step, start)[1:]


def _positions(end_B: Int[Array, " B"], T: int) -> Int[Array, "B T"]:
    """Of T tokens, the last of which stands before position `end_B`; -1 for padding."""
    return jnp.maximum(end_B[:, None] - T + jnp.arange(T)[None], -1)


def _next_logits(cfg, params, tokens_BT, pos_BT, caches, dtype) -> tuple[Array, Any]:
    """Logits of the token behind the last one, and the extended caches."""
    output = forward(
        cfg, params, tokens_BT, pos_BT=pos_BT, caches=caches, dtype=dtype, last_only=True
    )
    return output.logits_BTV[:, -1], output.caches


def _drawn(
    rows: Rows,
    logits_BV: Float[Array, "B V"],
    live_B: Bool[Array, " B"],
    keys_B: Key,
    stops_V: Bool[Array, " V"],
    number: Int[Array, ""] | int,
    sampling: Sampling,
    filters: tuple[Filter, ...],
) -> tuple[Rows, Int[Array, " B"], Float[Array, " B"]]:
    """The next token of each live row, number `number`, and the rows with it."""
    B, V = logits_BV.shape
    counts_BV = rows.counts_BV
    if counts_BV is None:
        counts_BV = jnp.zeros((B, V), jnp.int32)  # nobody looks, so it is never made
    x_BV = filtered_logits(logits_BV, counts_BV, sampling, filters)
    noise_B = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys_B)
    id_B = draw(noise_B, x_BV, sampling)
    log_prob_B = log_prob(logits_BV, id_B)
    if filters:
        drawable_B = jnp.isfinite(_at(x_BV, id_B)) | jnp.isnan(log_prob_B)
        log_prob_B = jnp.where(drawable_B, log_prob_B, -jnp.inf)
    id_B = jnp.where(live_B, id_B, PAD_ID).astype(jnp.int32)
    if rows.counts_BV is not None:
        counts_BV = counts_BV.at[jnp.arange(B), id_B].add(live_B.astype(jnp.int32))
    rows = Rows(
        jnp.concatenate([rows.tokens_BT[:, 1:], id_B[:, None]], axis=1),
        rows.length_B + live_B,
        None if rows.counts_BV is None else counts_BV,
        rows.finished_B | live_B & stops_V[id_B],
        rows.caches,
    )
    return rows, id_B, jnp.where(live_B, log_prob_B, 0.0)


def log_prob(logits_BV: Float[Array, "B V"], id_B: Int[Array, " B"]) -> Float[Array, " B"]:
    """Of one token a row in nats; NaN where a logit is NaN or infinite, padding's aside."""
    x_BV = logits_BV.astype(jnp.float32)
    top_B = x_BV.max(-1)
    mass_B = jnp.exp(x_BV - top_B[:, None]).sum(-1)
    return _at(logits_BV, id_B).astype(jnp.float32) - top_B - jnp.log(mass_B)


def _at(x_BV: Float[Array, "B V"], id_B: Int[Array, " B"]) -> Float[Array, " B"]:
    return jnp.take_along_axis(x_BV, id_B[:, None], axis=1)[:, 0]


@jax.jit
def row_keys(key: Key, samples_B: Integer[Array, " B"]) -> Key:
    """The key of each sample's noise."""
    return jax.vmap(lambda sample: jax.random.fold_in(key, sample))(samples_B)
