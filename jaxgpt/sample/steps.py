# SPDX-License-Identifier: Apache-2.0
"""The compiled part of sampling: one function that feeds tokens and draws, many times in a loop.

Prefill, decoding over a cache and the rolling window are the same loop: they differ in how many
tokens a step feeds, and in whether there is a cache. Which of them runs when is `generate.py`'s.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxgpt.model import ModelConfig, forward
from jaxgpt.sample.filters import draw, filtered_logits
from jaxgpt.shapes import Key, Params

PAD_ID = 0  # stands in front of a prompt and behind the end of a row; any valid id would do


class Rows(NamedTuple):
    """Where the rows of a batch stand.

    Attributes:
      tokens_BT: To be fed next: a left-padded prompt, the last token, or a window.
      length_B: Tokens of each row so far, those to be fed included.
      counts_BV: How often each token is in a row.
      finished_B: True for rows that draw no more.
      caches: For T new tokens; None where `tokens_BT` is all that the model sees.
    """

    tokens_BT: Int[Array, "B T"]
    length_B: Int[Array, " B"]
    counts_BV: Int[Array, "B V"]
    finished_B: Bool[Array, " B"]
    caches: Any


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
    sampling,
    filters,
    dtype,
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
      sampling: A `jaxgpt.sample.filters.Sampling`.
      filters: A tuple of further filters.
      dtype: Of the computation, or None.
      chunk: C, the width of what is returned.

    Returns:
      The rows; ids_BC; log_probs_BC under the model itself, NaN where its logits are not finite and
      -inf where the filters left no candidate; lengths_B, the number of tokens drawn by each row.
    """
    B = rows.length_B.shape[0]

    def more(carry):
        i, rows, *_ = carry
        return (i < count) & ~rows.finished_B.all()

    def step(carry):
        i, rows, ids_BC, log_probs_BC, lengths_B = carry
        live_B = ~rows.finished_B
        logits_BV, caches = _next_logits(cfg, params, rows, dtype)
        x_BV = filtered_logits(logits_BV, rows.counts_BV, sampling, filters)
        noise_B = jax.vmap(lambda key: jax.random.fold_in(key, first + i))(keys_B)
        id_B = draw(noise_B, x_BV, sampling)
        log_prob_B = _at(jax.nn.log_softmax(logits_BV.astype(jnp.float32), axis=-1), id_B)
        drawable_B = jnp.isfinite(_at(x_BV, id_B)) | jnp.isnan(log_prob_B)
        log_prob_B = jnp.where(drawable_B, log_prob_B, -jnp.inf)
        id_B = jnp.where(live_B, id_B, PAD_ID).astype(jnp.int32)
        rows = Rows(
            jnp.concatenate([rows.tokens_BT[:, 1:], id_B[:, None]], axis=1),
            rows.length_B + 1,
            rows.counts_BV.at[jnp.arange(B), id_B].add(live_B.astype(jnp.int32)),
            rows.finished_B | stops_V[id_B],
            caches,
        )
        ids_BC = ids_BC.at[:, i].set(id_B)
        log_probs_BC = log_probs_BC.at[:, i].set(jnp.where(live_B, log_prob_B, 0.0))
        return i + 1, rows, ids_BC, log_probs_BC, lengths_B + live_B

    ids_BC = jnp.full((B, chunk), PAD_ID, jnp.int32)
    start = (jnp.int32(0), rows, ids_BC, jnp.zeros((B, chunk)), jnp.zeros(B, jnp.int32))
    return jax.lax.while_loop(more, step, start)[1:]


def _next_logits(cfg, params, rows: Rows, dtype) -> tuple[Float[Array, "B V"], Any]:
    """Feed the tokens: the last one stands at the row's end, or at the context's."""
    T = rows.tokens_BT.shape[1]
    end_B = jnp.where(rows.finished_B, 0, jnp.minimum(rows.length_B, cfg.context_length))
    pos_BT = jnp.maximum(end_B[:, None] - T + jnp.arange(T)[None], -1)
    output = forward(
        cfg,
        params,
        rows.tokens_BT,
        pos_BT=pos_BT,
        caches=rows.caches,
        dtype=dtype,
        last_only=True,
    )
    return output.logits_BTV[:, -1], output.caches


def _at(x_BV: Float[Array, "B V"], id_B: Int[Array, " B"]) -> Float[Array, " B"]:
    return jnp.take_along_axis(x_BV, id_B[:, None], axis=1)[:, 0]


@functools.partial(jax.jit, static_argnames=("cfg", "dtype", "batch", "slots"))
def empty_caches(cfg: ModelConfig, params: Params, *, dtype, batch: int, slots: int) -> tuple:
    """Caches of the dtype that the model computes in, each of their buffers its own."""
    if dtype is None:
        one_BT = jnp.zeros((1, 1), jnp.int32)
        dtype = jax.eval_shape(functools.partial(forward, cfg), params, one_BT).logits_BTV.dtype
    return cfg.init_caches(batch, slots, dtype)


@jax.jit
def row_keys(key: Key, samples_B: Integer[Array, " B"]) -> Key:
    """The key of each sample's noise."""
    return jax.vmap(lambda sample: jax.random.fold_in(key, sample))(samples_B)
