# SPDX-License-Identifier: Apache-2.0
"""The compiled part of speculative decoding: draft tokens, feed them, keep what the model accepts.

A round feeds the last token and n drafted ones to the model at once and keeps the drafted tokens up
to the first that it rejects, and one more: 1 to n + 1 tokens in a pass. A token depends on those
before it and on its own noise alone, not on where rounds begin: so rows of a batch go on each at
its own pace, and other values of n, other chunks and other batches draw the same.

Left out: when there is a draft at all, and how long caches are (`speculative.py`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxgpt.model import ModelConfig, forward
from jaxgpt.sample.filters import Filter, Sampling, draw, filtered_logits
from jaxgpt.sample.steps import PAD_ID, Rows, log_prob
from jaxgpt.shapes import Key, Params

_JUDGE = 0xFFFFFFFF  # no token has this number
_BY_WEIGHT = Sampling()


class Drawn(NamedTuple):
    """In each row `lengths_B` tokens, of `rounds_B` rounds; the rest as `draw_steps` returns it."""

    ids_BC: Int[Array, "B C"]
    log_probs_BC: Float[Array, "B C"]
    lengths_B: Int[Array, " B"]
    rounds_B: Int[Array, " B"]


class _Run(NamedTuple):
    """What is the same in all rounds."""

    cfg: ModelConfig
    params: Params
    draft_cfg: ModelConfig
    draft_params: Params
    keys_B: Key
    sampling: Sampling
    filters: tuple[Filter, ...]
    dtype: DTypeLike | None


class _State(NamedTuple):
    """Where the rows are; caches have all tokens but the last of each row."""

    rows: Rows
    drawn_B: Int[Array, " B"]
    draft_caches: tuple


@functools.partial(
    jax.jit,
    static_argnames=("cfg", "draft_cfg", "tokens", "rounds", "sampling", "filters", "dtype"),
    donate_argnames=("rows", "drawn_B", "draft_caches"),
)
def draw_rounds(
    cfg: ModelConfig,
    params: Params,
    draft_cfg: ModelConfig,
    draft_params: Params,
    rows: Rows,
    drawn_B: Int[Array, " B"],
    draft_caches: tuple,
    limit: Int[Array, ""] | int,
    *,
    keys_B: Key,
    stops_V: Bool[Array, " V"],
    tokens: int,
    rounds: int,
    sampling: Sampling,
    filters: tuple[Filter, ...],
    dtype: DTypeLike | None,
) -> tuple[Rows, Int[Array, " B"], tuple, Drawn]:
    """Up to `rounds` rounds for each row, fewer where all rows are at their end before.

    Args:
      cfg: The model.
      params: Its parameters.
      draft_cfg: The draft.
      draft_params: Its parameters.
      rows: Given away, as `drawn_B` and `draft_caches`. They feed one token each. Caches have an
        index for each row if there are several, and slots for `tokens` more than rows will have.
      drawn_B: Number of tokens drawn before.
      draft_caches: Of the same tokens as the model's.
      limit: A row waits when it has drawn so many tokens; the last of them is drawn from a position
        that both contexts have.
      keys_B: A key for each row. Token k is drafted with `fold_in(key, k)`, by which a step without
        a draft draws it: a draft that is the model draws the same tokens.
      stops_V: True for tokens that finish a row.
      tokens: n, drafted in a round.
      rounds: At most.
      sampling: How tokens are chosen, of both models.
      filters: Further filters, likewise.
      dtype: Of the computation, or None.

    Returns:
      The first three, further on, and what was drawn.

    Source: Leviathan et al. 2023, algorithm 1, https://arxiv.org/abs/2211.17192; Chen et al. 2023,
      algorithm 2, https://arxiv.org/abs/2302.01318
    Differs: the token behind n accepted ones is drafted and judged too, instead of drawn from the
      model outright. The draft's step for it writes what its cache needs next in any case.
    Cost: n + 1 steps of the draft and a pass of the model over n + 1 tokens a round.
    """
    B, C = drawn_B.shape[0], rounds * (tokens + 1)
    run = _Run(cfg, params, draft_cfg, draft_params, keys_B, sampling, filters, dtype)

    def live(state):
        return ~state.rows.finished_B & (state.drawn_B < limit)

    def more(carry):
        return (carry[0] < rounds) & live(carry[1]).any()

    def step(carry):
        i, state, drawn = carry
        live_B = live(state)
        ids_BT, log_probs_BT, kept_B, state = _round(run, state, live_B, tokens)
        # No further than the limit, and to the first stop token.
        kept_B = jnp.where(live_B, jnp.minimum(kept_B, limit - state.drawn_B), 0)
        at_1T = jnp.arange(tokens + 1)[None]
        stop_BT = stops_V[ids_BT] & (at_1T < kept_B[:, None])
        stop_B = stop_BT.any(1)
        kept_B = jnp.where(stop_B, 1 + stop_BT.argmax(1), kept_B).astype(jnp.int32)
        new_BT = at_1T < kept_B[:, None]
        slot_BT = jnp.where(new_BT, drawn.lengths_B[:, None] + at_1T, C)
        row_B1 = jnp.arange(B)[:, None]
        drawn = Drawn(
            drawn.ids_BC.at[row_B1, slot_BT].set(ids_BT, mode="drop"),
            drawn.log_probs_BC.at[row_B1, slot_BT].set(log_probs_BT, mode="drop"),
            drawn.lengths_B + kept_B,
            drawn.rounds_B + live_B,
        )
        return i + 1, _advanced(state, ids_BT, new_BT, kept_B, stop_B), drawn

    none_B = jnp.zeros(B, jnp.int32)
    drawn = Drawn(jnp.full((B, C), PAD_ID, jnp.int32), jnp.zeros((B, C)), none_B, none_B)
    state = _State(rows, drawn_B, draft_caches)
    _, state, drawn = jax.lax.while_loop(more, step, (jnp.int32(0), state, drawn))
    return state.rows, state.drawn_B, state.draft_caches, drawn


def _round(
    run: _Run, state: _State, live_B: Bool[Array, " B"], tokens: int
) -> tuple[Int[Array, "B T"], Float[Array, "B T"], Int[Array, " B"], _State]:
    """Draft, feed, judge.

    Returns:
      T = tokens + 1 tokens, of which those up to the first one that was replaced are drawn; their
      log-probabilities; how many are drawn; the state, with caches T tokens longer.
    """
    rows, at_1T = state.rows, jnp.arange(tokens + 1)[None]
    room = min(run.cfg.context_length, run.draft_cfg.context_length)
    pos_BT = rows.length_B[:, None] - 1 + at_1T
    pos_BT = jnp.where(live_B[:, None] & (pos_BT < room), pos_BT, -1)
    number_BT = state.drawn_B[:, None] + at_1T
    draft_BT, q_BTV, counts_BTV, draft_caches = _drafted(run, state, pos_BT, number_BT)
    output = forward(
        run.cfg,
        run.params,
        jnp.concatenate([rows.tokens_BT, draft_BT[:, :-1]], axis=1),
        pos_BT=pos_BT,
        caches=rows.caches,
        dtype=run.dtype,
    )
    # From here on the positions of all rows are rows.
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    logits = flat(output.logits_BTV)
    p = filtered_logits(logits, flat(counts_BTV), run.sampling, run.filters)
    if run.sampling.temperature == 0:
        ids = draw(flat(_numbered(run.keys_B, number_BT)), p, run.sampling)
        accepted = ids == flat(draft_BT)
    else:
        judge_B = jax.vmap(lambda key: jax.random.fold_in(key, jnp.uint32(_JUDGE)))(run.keys_B)
        keys = flat(_numbered(judge_B, number_BT))
        accepted, ids = judged(keys, flat(draft_BT), flat(q_BTV), p)
    log_probs = log_prob(logits, ids)
    if run.filters:
        drawable = jnp.isfinite(_at(p, ids)) | jnp.isnan(log_probs)
        log_probs = jnp.where(drawable, log_probs, -jnp.inf)
    ids, accepted = ids.astype(jnp.int32), accepted.astype(jnp.int32)
    ids_BT, log_probs_BT, accepted_BT = (
        x.reshape(draft_BT.shape) for x in (ids, log_probs, accepted)
    )
    kept_B = 1 + jnp.cumprod(accepted_BT[:, :-1], axis=1).sum(1)
    rows = rows._replace(caches=output.caches)
    return ids_BT, log_probs_BT, kept_B, _State(rows, state.drawn_B, draft_caches)


def _drafted(
    run: _Run, state: _State, pos_BT: Int[Array, "B T"], number_BT: Int[Array, "B T"]
) -> tuple[Int[Array, "B T"], Float[Array, "B T V"], Int[Array, "B T V"], tuple]:
    """T tokens of the draft, the filtered logits they were drawn from, the counts before each."""
    rows, dims = state.rows, run.cfg.dims()
    V, last = dims.padded_vocab_size, dims.vocab_size - 1
    B, T = pos_BT.shape

    def step(carry, inputs):
        token_B, counts_BV, caches = carry
        pos_B, noise_B = inputs
        output = forward(
            run.draft_cfg,
            run.draft_params,
            token_B[:, None],
            pos_BT=pos_B[:, None],
            caches=caches,
            dtype=run.dtype,
        )
        x_BV = output.logits_BTV[:, 0, :V]  # the paddings of the vocabulary may differ
        x_BV = jnp.pad(x_BV, ((0, 0), (0, V - x_BV.shape[1])), constant_values=-jnp.inf)
        seen_BV = jnp.zeros((B, V), jnp.int32) if counts_BV is None else counts_BV
        x_BV = filtered_logits(x_BV, seen_BV, run.sampling, run.filters)
        id_B = draw(noise_B, x_BV, run.sampling).astype(jnp.int32)
        id_B = jnp.minimum(id_B, last)  # one that is not finite would name padding
        after_BV = None if counts_BV is None else counts_BV.at[jnp.arange(B), id_B].add(1)
        q_BV = None if run.sampling.temperature == 0 else x_BV  # greedy, nobody asks
        return (id_B, after_BV, output.caches), (id_B, q_BV, counts_BV)

    start = rows.tokens_BT[:, 0], rows.counts_BV, state.draft_caches
    inputs = pos_BT.T, _numbered(run.keys_B, number_BT).T
    (_, _, caches), (ids_TB, *of_each) = jax.lax.scan(step, start, inputs)
    q_BTV, counts_BTV = (
        jnp.zeros((B, T, V), dtype) if x_TBV is None else x_TBV.swapaxes(0, 1)
        for x_TBV, dtype in zip(of_each, (jnp.float32, jnp.int32), strict=True)
    )
    assert caches is not None  # a module may be called without any
    return ids_TB.T, q_BTV, counts_BTV, caches


def judged(
    keys_B: Key, draft_B: Int[Array, " B"], q_BV: Float[Array, "B V"], p_BV: Float[Array, "B V"]
) -> tuple[Bool[Array, " B"], Int[Array, " B"]]:
    """Accept tokens drawn from softmax(q), or replace them, so that they are drawn from softmax(p).

    A token is accepted with probability min(1, p / q), else drawn from max(0, p - q), renormalised.

    Args:
      keys_B: Noise that had no part in drawing the tokens.
      draft_B: The tokens.
      q_BV: Logits of the draft. Where they are not finite, every token is replaced.
      p_BV: Logits of the model.

    Returns:
      Which were accepted, and the tokens with replacements.
    """
    q_BV, p_BV = (jax.nn.softmax(x_BV, axis=-1) for x_BV in (q_BV, p_BV))
    q_BV = jnp.where(jnp.isfinite(q_BV), q_BV, 0.0)
    keys_B2 = jax.vmap(jax.random.split)(keys_B)
    u_B = jax.vmap(jax.random.uniform)(keys_B2[:, 0])
    q_B = _at(q_BV, draft_B)
    accepted_B = (u_B * q_B < _at(p_BV, draft_B)) & (q_B > 0)
    rest_BV = jnp.maximum(p_BV - q_BV, 0.0)
    # Where both are equal, rounding may still reject a token, and leave nothing.
    rest_BV = jnp.where((rest_BV > 0).any(-1, keepdims=True), rest_BV, p_BV)
    other_B = draw(keys_B2[:, 1], jnp.log(rest_BV), _BY_WEIGHT)
    return accepted_B, jnp.where(accepted_B, draft_B, other_B.astype(draft_B.dtype))


def _advanced(
    state: _State,
    ids_BT: Int[Array, "B T"],
    new_BT: Bool[Array, "B T"],
    kept_B: Int[Array, " B"],
    stop_B: Bool[Array, " B"],
) -> _State:
    """The rows with their new tokens; the caches forget what was rejected."""
    rows, back_B = state.rows, ids_BT.shape[1] - kept_B
    counts_BV = rows.counts_BV
    if counts_BV is not None:
        row_B1 = jnp.arange(len(kept_B))[:, None]
        counts_BV = counts_BV.at[row_B1, ids_BT].add(new_BT.astype(jnp.int32))
    last_B1 = _at(ids_BT, jnp.maximum(kept_B - 1, 0))[:, None]

    def rewound(cache: Any) -> Any:
        return cache.rewound(cache.index - (back_B if cache.index.ndim else back_B[0]))

    rows = Rows(
        jnp.where(kept_B[:, None] > 0, last_B1, rows.tokens_BT),
        rows.length_B + kept_B,
        counts_BV,
        rows.finished_B | stop_B,
        tuple(map(rewound, rows.caches)),
    )
    return _State(rows, state.drawn_B + kept_B, tuple(map(rewound, state.draft_caches)))


def _numbered(keys_B: Key, number_BT: Int[Array, "B T"]) -> Key:
    """The key of each token."""
    return jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))(keys_B, number_BT)


def _at(x_BV: Array, index_B: Int[Array, " B"]) -> Array:
    return jnp.take_along_axis(x_BV, index_B[:, None], axis=1)[:, 0]
