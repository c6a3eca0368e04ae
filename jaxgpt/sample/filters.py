# SPDX-License-Identifier: Apache-2.0
"""From the model's logits to a token: the filters of `Sampling`, filters of one's own, the draw.

All are pure functions of logits and token counts, one row at a time, and know nothing of the model.
A filter of one's own is a function `(logits_BV, counts_BV) -> logits_BV`; it runs after these and
removes a token by giving it -inf.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jaxgpt.errors import ConfigError
from jaxgpt.shapes import Key

Filter = Callable[[Float[Array, "B V"], Int[Array, "B V"]], Float[Array, "B V"]]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the default draws from the model's own distribution."""

    temperature: float = 1.0  # divides the logits; 0: greedy, the best token always
    top_k: int | None = None  # candidates to keep; None or 0: all
    top_p: float | None = None  # probability mass to keep, at least the best; None or 1: all
    min_p: float | None = None  # least probability, as a share of the best one's; None or 0: none
    repetition_penalty: float = 1.0  # above 1 makes tokens already seen less likely

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(
                f"temperature={self.temperature} must be finite and not negative",
                fix="0 for greedy, 1 for the model's own distribution",
            )
        if self.top_k is not None and self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} is negative", fix="0 turns it off")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"{name}={value} must be in [0, 1]")
        if not 1e-6 <= self.repetition_penalty <= 1e6:  # further out, logits overflow
            raise ConfigError(
                f"repetition_penalty={self.repetition_penalty} must be positive and moderate",
                fix="1 turns it off; 1.2 is usual",
            )


def filtered_logits(
    logits_BV: Float[Array, "B V"],
    counts_BV: Int[Array, "B V"],
    sampling: Sampling,
    filters: Sequence[Filter] = (),
) -> Float[Array, "B V"]:
    """The logits to draw from: -inf for what is filtered out.

    In this order: repetition penalty, temperature, top-k, top-p on the renormalised rest, min-p,
    `filters`. Of equal logits the smaller id counts as the better one. At temperature 0 nothing is
    divided, and top-k, top-p and min-p, which keep the best token in any case, are left out.

    Args:
      logits_BV: The model's, of any float dtype; what is -inf there (vocabulary padding) stays so,
        whatever a filter does.
      counts_BV: How often each token is in the row so far, prompt included; see `needs_counts`.
      sampling: The choices.
      filters: Further filters.

    Returns:
      float32. Without greedy, 0 is the best candidate's (before `filters`).

    Source: top-k: Fan et al. 2018, section 5.1, https://arxiv.org/abs/1805.04833; top-p: Holtzman
      et al. 2019, section 3.1, https://arxiv.org/abs/1904.09751; min-p: Nguyen et al. 2024,
      section 3, https://arxiv.org/abs/2407.01082; penalty: Keskar et al. 2019 (CTRL), section 4.1,
      https://arxiv.org/abs/1909.05858
    Differs from CTRL: negative logits are multiplied, since dividing would make them likelier.
    """
    padding_BV = logits_BV == -jnp.inf
    x_BV, penalty = logits_BV.astype(jnp.float32), sampling.repetition_penalty
    if penalty != 1:
        punished_BV = jnp.where(x_BV > 0, x_BV / penalty, x_BV * penalty)
        x_BV = jnp.where(counts_BV > 0, punished_BV, x_BV)
    if sampling.temperature > 0:
        # The best is moved to 0 first: divided by a tiny temperature, the others only go to -inf.
        limits = np.finfo(np.float32)
        temperature = float(np.clip(sampling.temperature, limits.tiny, limits.max))
        top_B1 = x_BV.max(-1, keepdims=True)
        x_BV = jnp.where(x_BV == top_B1, 0.0, (x_BV - top_B1) / temperature)
        x_BV = jnp.where(padding_BV, -jnp.inf, x_BV)
        if sampling.top_k and sampling.top_k < x_BV.shape[-1]:
            x_BV = _fewest(x_BV, jnp.ones((1, 1), jnp.int32), sampling.top_k)
        if sampling.top_p is not None and sampling.top_p < 1:
            mass_BV = jnp.exp(x_BV)  # the best token's is 1, so that it stays at any p
            least_B1 = jnp.maximum(sampling.top_p * mass_BV.sum(-1, keepdims=True), 1.0)
            x_BV = _fewest(x_BV, mass_BV, least_B1)
        if sampling.min_p:
            x_BV = jnp.where(x_BV >= math.log(sampling.min_p), x_BV, -jnp.inf)
    for own in filters:
        x_BV = own(x_BV, counts_BV)
        x_BV = jnp.where(padding_BV, -jnp.inf, x_BV.astype(jnp.float32))
    return x_BV


def _fewest(
    x_BV: Float[Array, "B V"], mass_bv: Array, least: Float[Array, "B 1"] | int
) -> Float[Array, "B V"]:
    """The best candidates until their masses reach `least`, -inf for the others.

    Nothing is sorted: two bisections count, first for the value of the last one that stays, then,
    where others share this value, for its id. What stays is what a stable descending sort gives.

    Args:
      x_BV: Logits, the best of them 0.
      mass_bv: Of each candidate, broadcast.
      least: The mass to reach.
    """
    B, V = x_BV.shape
    # From 0 down the bits of floats, read as whole numbers, rise; -0 comes behind 0.
    below_BV = jax.lax.bitcast_convert_type(x_BV, jnp.uint32)
    id_1V = jnp.arange(V, dtype=jnp.uint32)[None]

    def reaches(stays_BV: Array) -> Array:
        return jnp.where(stays_BV, mass_bv, 0).sum(-1, keepdims=True) >= least

    last_B1 = _smallest(lambda n_B1: reaches(below_BV <= n_B1), B, bits=32)
    better_BV, equal_BV = below_BV < last_B1, below_BV == last_B1

    def last_id() -> Array:
        bits = V.bit_length()
        return _smallest(lambda n_B1: reaches(better_BV | equal_BV & (id_1V <= n_B1)), B, bits)

    tied = (equal_BV.sum(-1) > 1).any()
    last_id_B1 = jax.lax.cond(tied, last_id, lambda: jnp.full((B, 1), V, jnp.uint32))
    return jnp.where(better_BV | equal_BV & (id_1V <= last_id_B1), x_BV, -jnp.inf)


def _smallest(holds: Callable[[Array], Array], batch: int, bits: int) -> UInt32[Array, "B 1"]:
    """For each row the smallest number for which a condition that stays true holds.

    Args:
      holds: The condition.
      batch: B.
      bits: Of the number; where the condition holds for none, it is the largest of so many bits.
    """

    def decide(i: Array, n_B1: Array) -> Array:
        bit = jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32)
        return jnp.where(holds(n_B1 + (bit - 1)), n_B1, n_B1 + bit)

    return jax.lax.fori_loop(0, bits, decide, jnp.zeros((batch, 1), jnp.uint32))


def needs_counts(sampling: Sampling, filters: Sequence[Filter]) -> bool:
    """Whether `filtered_logits` or one of `filters` looks at the counts at all."""
    return sampling.repetition_penalty != 1 or bool(filters)


def draw(keys_B: Key, logits_BV: Float[Array, "B V"], sampling: Sampling) -> Int[Array, " B"]:
    """One token for each row: the best at temperature 0, else drawn from the softmax.

    Args:
      keys_B: A key for each row, so that a row's draw does not depend on its batch.
      logits_BV: Filtered; the temperature is in them already.
      sampling: Only asked whether it is greedy.
    """
    V = logits_BV.shape[1]
    if sampling.temperature > 0:  # the Gumbel-max trick, as in `jax.random.categorical`
        logits_BV += jax.vmap(lambda key: jax.random.gumbel(key, (V,), logits_BV.dtype))(keys_B)
    # The first of the best, like argmax, which takes the time of ten such passes on a CPU.
    best_BV = logits_BV == logits_BV.max(-1, keepdims=True)
    return jnp.where(best_BV, jnp.arange(V)[None], V - 1).min(-1)
