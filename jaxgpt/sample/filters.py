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
from jaxtyping import Array, Float, Int

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
      counts_BV: How often each token is in the row so far, prompt included.
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
        # Zeros of either sign are equal, but to `top_k` they are not.
        x_BV = jnp.where(x_BV == top_B1, 0.0, (x_BV - top_B1) / temperature)
        x_BV = _best(jnp.where(padding_BV, -jnp.inf, x_BV), sampling.top_k, sampling.top_p)
        if sampling.min_p:
            x_BV = jnp.where(x_BV >= math.log(sampling.min_p), x_BV, -jnp.inf)
    for own in filters:
        x_BV = own(x_BV, counts_BV)
    return jnp.where(padding_BV, -jnp.inf, x_BV.astype(jnp.float32))


def _best(x_BV: Float[Array, "B V"], top_k: int | None, top_p: float | None) -> Float[Array, "B V"]:
    """Top-k, then top-p, on one descending order."""
    B, V = x_BV.shape
    k, p = min(top_k or V, V), 1.0 if top_p is None else top_p
    if k == V and p == 1:
        return x_BV
    best_Bk, ids_Bk = jax.lax.top_k(x_BV, k)
    if p < 1:
        # A token stays if the mass before it is below p; the best has none before it.
        mass_Bk = jnp.cumsum(jax.nn.softmax(best_Bk, axis=-1), axis=-1)
        stays_Bk = jnp.pad(mass_Bk[:, :-1] < p, ((0, 0), (1, 0)), constant_values=True)
        best_Bk = jnp.where(stays_Bk, best_Bk, -jnp.inf)
    return jnp.full_like(x_BV, -jnp.inf).at[jnp.arange(B)[:, None], ids_Bk].set(best_Bk)


def draw(keys_B: Key, logits_BV: Float[Array, "B V"], sampling: Sampling) -> Int[Array, " B"]:
    """One token for each row: the best at temperature 0, else drawn from the softmax.

    Args:
      keys_B: A key for each row, so that a row's draw does not depend on its batch.
      logits_BV: Filtered; the temperature is in them already.
      sampling: Only asked whether it is greedy.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV)
