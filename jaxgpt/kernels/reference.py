# SPDX-License-Identifier: Apache-2.0
"""Scaled dot-product attention in plain JAX: what any faster kernel is tested against.

It builds the score matrix, so its memory grows with T * S; scores and softmax are in float32.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxgpt.masks import Visibility
from jaxgpt.placing import active
from jaxgpt.products import narrow_first
from jaxgpt.shapes import Key, rounded, wide

# (q_pos_BT, k_pos_BS) -> scores to add, broadcastable to (B, N, T, S)
ScoreBias = Callable[[Int[Array, "B T"], Int[Array, "B S"]], Float[Array, "..."]]

MASKED = -1e30  # finite, so that a row without any visible key stays finite


def dropout(x: Float[Array, "..."], rate: float, key: Key | None) -> Float[Array, "..."]:
    """Zero each entry with probability `rate` and scale the rest by 1/(1 - rate).

    The identity without a key: evaluation and sampling pass none.

    Source: Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html
    """
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKP: Float[Array, "B S K P"],
    visibility: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
    bias: ScoreBias | None = None,
    sinks_N: Float[Array, " N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key | None = None,
    tap: Callable[[str, Array], Array] | None = None,
) -> Float[Array, "B T N P"]:
    """Softmax(cap(scale * q k^T) + bias, over visible keys) v, with N/K query heads to a key head.

    Query head n reads key/value head n // (N/K). A query that sees nothing gives zero.

    Args:
      q_BTNH: Queries. N must be a multiple of K.
      k_BSKH: Keys.
      v_BSKP: Values, of a width P of their own. What stands in slots that are not filled has no
        influence, NaN included.
      visibility: Who sees whom.
      scale: Factor on the scores, usually H**-0.5.
      softcap: Scores become softcap * tanh(scores / softcap), before bias and mask, or None.
      bias: Scores to add before the mask (ALiBi), or None.
      sinks_N: For each query head the score of one more key, whose value is zero: it takes a share
        of the probability. None: no sinks.
      dropout_rate: Rate on the probabilities.
      dropout_key: None for no dropout.
      tap: Called at `scores` (scaled and capped) and `probs`, both (B, N, T, S); None: never.

    Numerics: scores and softmax in float32, probabilities cast to the values' dtype.
    Cost: 2 B N T S (H + P) FLOPs; 4 B N T S bytes for the scores.
    Source: Vaswani et al. 2017, eq. 1, https://arxiv.org/abs/1706.03762; grouped heads: Ainslie et
      al. 2023, https://arxiv.org/abs/2305.13245; softcap: Gemma Team 2024, section 2,
      https://arxiv.org/abs/2408.00118; sinks: Xiao et al. 2023, https://arxiv.org/abs/2309.17453,
      as a trained logit: OpenAI 2025 (gpt-oss), https://arxiv.org/abs/2508.10925
    """
    B, arrays = len(q_BTNH), (q_BTNH, k_BSKH, v_BSKP, visibility)
    # A mask is drawn for all rows at once, and a tap sees those of all devices.
    whole = dropout_key is not None or (tap is not None and active() is not None)
    n_parts = 1 if whole else in_parts(q_BTNH, k_BSKH, visibility)
    bounds = list(itertools.pairwise(B * i // n_parts for i in range(n_parts + 1)))

    def tapped(name: str, parts: list[Array]) -> list[Array]:
        if tap is None:
            return parts
        x_BNTS = tap(name, jnp.concatenate(parts))
        return [x_BNTS[first:last] for first, last in bounds]

    def rows(first: int, last: int) -> Any:  # positions may be one row for all
        return jax.tree.map(lambda x: x[first:last] if len(x) == B else x, arrays)

    parts = [rows(*bound) for bound in bounds]
    scores = tapped("scores", [_scores(q, k, scale, softcap) for q, k, _, _ in parts])
    pairs = zip(scores, parts, strict=True)
    probs = tapped("probs", [_probs(x, see, bias, sinks_N) for x, (*_, see) in pairs])
    probs = [dropout(x.astype(v_BSKP.dtype), dropout_rate, dropout_key) for x in probs]
    pairs = zip(probs, parts, strict=True)
    return jnp.concatenate([_outputs(x, v, see) for x, (_, _, v, see) in pairs])


PARTS = 3  # at most, on a CPU
PART_BYTES = 2**20  # of scores, at least


def in_parts(q_BTNH: Array, k_BSKH: Array, visibility: Visibility) -> int:
    """In how many independent calls the rows are served.

    XLA's CPU back end keeps a batch of products on one core, and independent ones on several: 10 to
    30% of the time of attention and its gradient on two cores. A slice of a cache would be a copy.
    """
    if jax.default_backend() != "cpu" or visibility.cached:
        return 1
    (B, T, N, _), S = q_BTNH.shape, k_BSKH.shape[1]
    return max(1, min(PARTS, B // 2, 4 * B * N * T * S // PART_BYTES))  # single rows take memory


def _scores(q_BTNH: Array, k_BSKH: Array, scale: float, softcap: float | None) -> Array:
    (B, T, N, H), (_, S, K, _) = q_BTNH.shape, k_BSKH.shape
    # One contiguous batch of B*K plain matrix products: about twice as fast on CPU as an einsum
    # over four-dimensional operands, and the same work elsewhere. G query heads share each of them.
    q = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B * K, -1, H)
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bqh,bsh->bqs", q, _by_head(k_BSKH), preferred_element_type=dtype)
    scores_BNTS = scores.reshape(B, N, T, S) * scale
    if softcap is not None:
        scores_BNTS = softcap * jnp.tanh(scores_BNTS / softcap)
    return rounded(scores_BNTS)


def _probs(
    scores_BNTS: Array, visibility: Visibility, bias: ScoreBias | None, sinks_N: Array | None
) -> Array:
    if bias is not None:
        scores_BNTS += bias(visibility.q_pos_BT, visibility.k_pos_BS)
    sinks = None if sinks_N is None else sinks_N.astype(scores_BNTS.dtype)[None, :, None, None]
    return _softmax(scores_BNTS, visibility.mask()[:, None], sinks)


def _outputs(probs_BNTS: Array, v_BSKP: Array, visibility: Visibility) -> Array:
    (B, N, T, S), v = probs_BNTS.shape, _by_head(v_BSKP)
    y = _mixed(probs_BNTS.reshape(len(v), -1, S), v, visibility)
    return y.reshape(B, N, T, -1).transpose(0, 2, 1, 3)


def _by_head(x_BSKH: Array) -> Array:
    """Keys or values as B*K matrices of S rows."""
    B, S, K, _ = x_BSKH.shape
    return narrow_first(x_BSKH.transpose(0, 2, 1, 3).reshape(B * K, S, -1))


@jax.custom_jvp
def _softmax(scores: Array, seen: Array, sinks: Array | None) -> Array:
    """Probabilities of the keys that are seen, with a derivative that needs them alone."""
    return _shares(scores, seen, sinks)[0]


def _shares(scores: Array, seen: Array, sinks: Array | None) -> tuple[Array, Array]:
    """The probabilities of the keys, and of the sink; 0 where nothing is seen."""
    scores = jnp.where(seen, scores, MASKED)
    top = scores.max(-1, keepdims=True)
    top = top if sinks is None else jnp.maximum(top, sinks)
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    sunk = jnp.zeros_like(top) if sinks is None else jnp.exp(sinks - top)
    total = jnp.maximum(weights.sum(-1, keepdims=True) + sunk, 1e-30)
    return weights / total, sunk / total


@_softmax.defjvp
def _softmax_slope(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (scores, seen, sinks), (d_scores, _, d_sinks) = primals, tangents
    probs = _softmax(scores, seen, sinks)
    d_scores = jnp.where(seen, d_scores, 0.0)
    mean = (probs * d_scores).sum(-1, keepdims=True)
    if sinks is not None:
        mean += _shares(scores, seen, sinks)[1] * d_sinks
    return probs, probs * (d_scores - mean)


FEW = 8  # queries of a key head at a time, up to which a GPU multiplies and adds without a copy


def _mixed(
    probs_JQS: Array, v_JSP: Array, visibility: Visibility, backend: str | None = None
) -> Array:
    """The product of both; what stands in slots that are not filled counts nothing, NaN included.

    Zero times NaN is NaN, so such slots are emptied, which writes a copy of the values. A step over
    a cache does without: a GPU empties them in the loop of a multiply-and-add, the others look
    first whether there was any need. Local letters: J is B * K, Q is T * N/K.
    """

    def product(v_JSP: Array) -> Array:
        return jnp.einsum("jqs,jsp->jqp", probs_JQS, v_JSP)

    def emptied() -> Array:
        filled_BS = visibility.k_pos_BS >= 0
        filled_JS = jnp.repeat(filled_BS, len(v_JSP) // len(filled_BS), axis=0)
        return jnp.where(filled_JS[..., None], v_JSP, 0)

    gpu = (backend or jax.default_backend()) == "gpu"
    if visibility.plain:
        return product(v_JSP)
    if not visibility.cached or (gpu and probs_JQS.shape[1] > FEW):
        return product(emptied())
    if gpu:
        return (wide(probs_JQS)[..., None] * wide(emptied())[:, None]).sum(2).astype(v_JSP.dtype)
    y_JQP = product(v_JSP)
    return jax.lax.cond(jnp.isfinite(y_JQP).all(), lambda: y_JQP, lambda: product(emptied()))
