# SPDX-License-Identifier: Apache-2.0
"""Scalings of rotary positions, for contexts longer than those a model was trained on.

Each changes the rates at which pairs of channels turn; YaRN also the size of queries, keys and
scores. None of them looks at the tokens, or at how many there are.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxgpt.boxes.base import RopeScaling, check_positive
from jaxgpt.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """All pairs turn `factor` times more slowly: positions are interpolated.

    Source: Chen et al. 2023, section 2.3, https://arxiv.org/abs/2306.15595
    """

    factor: float = 2.0  # how many times longer the context becomes

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def rates(self, rate_I: Float[Array, " I"], theta: float) -> Float[Array, " I"]:
        """Rates divided by the factor."""
        return rate_I / self.factor


@dataclasses.dataclass(frozen=True)
class NTKScaling(RopeScaling):
    """Pair i of I turns factor^(i/(I-1)) times more slowly: the fastest keeps its rate.

    It is the plain rope with base theta * factor^(d/(d-2)), d = 2I the rotated width.

    Source: bloc97 2023 ("NTK-aware interpolation"), as in Peng et al. 2023, section 3.1,
      https://arxiv.org/abs/2309.00071
    """

    factor: float = 2.0  # how many times more slowly the slowest pair turns

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def rates(self, rate_I: Float[Array, " I"], theta: float) -> Float[Array, " I"]:
        """Rates times factor^(-i/(I-1))."""
        return rate_I * jnp.asarray(self.factor ** -np.linspace(0, 1, len(rate_I)), jnp.float32)


@dataclasses.dataclass(frozen=True)
class DynamicNTK(RopeScaling):
    """NTK-aware scaling by the length L of a call: by factor * L / original_length - (factor - 1).

    This is the one rope whose base follows one declared length per call (`rope_length` of
    `jaxgpt.forward`, else context_length), not the tokens that are there. Calls that declare the
    same length agree to the bit: logits are causal, and cached decoding equals the full forward.
    Calls that declare different lengths are different models, and their caches do not mix. Up to
    `original_length` it is the plain rope.

    Source: emozilla 2023 ("dynamic NTK"), as in Peng et al. 2023, section 3.3,
      https://arxiv.org/abs/2309.00071; the formula is that of Transformers
    Differs from both: they take the length of what is there so far, where one token more changes
      all that came before it.
    """

    factor: float = 2.0  # what the scale grows by with each original_length more
    original_length: int = 2048  # tokens trained on

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        check_positive(original_length=self.original_length)

    def at(self, length: int) -> RopeScaling:
        """The scaling that serves this length."""
        excess = max(length / self.original_length - 1, 0.0)
        return NTKScaling(1 + self.factor * excess)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Slow pairs are interpolated, fast ones stay, those between are mixed smoothly.

    What counts is how often a pair turns within `original_length`: pairs below `low_freq_factor`
    turns are slowed down by `factor`, pairs above `high_freq_factor` are not.

    Source: Grattafiori et al. 2024 (Llama 3), https://arxiv.org/abs/2407.21783, as of version 3.1
      in https://github.com/meta-llama/llama-models
    """

    factor: float = 8.0  # how many times longer the context becomes
    low_freq_factor: float = 1.0  # turns; pairs with fewer are interpolated
    high_freq_factor: float = 4.0  # turns; pairs with more stay
    original_length: int = 8192  # tokens trained on

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        check_positive(low_freq_factor=self.low_freq_factor, original_length=self.original_length)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"high_freq_factor={self.high_freq_factor} must exceed "
                f"low_freq_factor={self.low_freq_factor}"
            )

    def rates(self, rate_I: Float[Array, " I"], theta: float) -> Float[Array, " I"]:
        """A mean of rate and rate / factor, weighted by the pair's turns."""
        turns_I = self.original_length * rate_I / (2 * math.pi)
        between = self.high_freq_factor - self.low_freq_factor
        keep_I = jnp.clip((turns_I - self.low_freq_factor) / between, 0, 1)
        return _mix(rate_I, keep_I, self.factor)


@dataclasses.dataclass(frozen=True)
class YaRN(RopeScaling):
    """Slow pairs are interpolated, fast ones stay, with a ramp over those between.

    Pairs that turn more than `beta_fast` times within `original_length` stay, those with fewer
    than `beta_slow` turns are interpolated. Rotated queries and keys are multiplied by m(1), with
    m(c) = 0.1 c ln(factor) + 1, or by `attention_factor`. DeepSeek's form multiplies them by
    m(mscale) / m(mscale_all_dim), and all scores, those of channels without rotation too, by
    m(mscale_all_dim)^2.

    Source: Peng et al. 2023, sections 3.2 and 3.4, https://arxiv.org/abs/2309.00071; mscale: the
      code of DeepSeek-V2 (https://arxiv.org/abs/2405.04434) and V3; without `truncate`: gpt-oss
      (https://arxiv.org/abs/2508.10925)
    Differs from the paper, as its code does: the ramp is linear in the index of the pair, between
      whole indices if `truncate`.
    """

    factor: float = 4.0  # how many times longer the context becomes
    original_length: int = 4096  # tokens trained on
    beta_fast: float = 32.0  # turns; pairs with more stay
    beta_slow: float = 1.0  # turns; pairs with fewer are interpolated
    truncate: bool = True  # whether the ramp begins and ends at whole indices
    attention_factor: float | None = None  # on rotated queries and keys; None: by the formula
    mscale: float | None = None  # DeepSeek's, for queries and keys; needs mscale_all_dim
    mscale_all_dim: float | None = None  # DeepSeek's, for the scores; None: they are not scaled

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        for name in ("original_length", "beta_slow", "attention_factor", "mscale"):
            check_positive(**{name: getattr(self, name)})
        check_positive(mscale_all_dim=self.mscale_all_dim)
        if self.beta_fast < self.beta_slow:
            raise ConfigError(f"beta_fast={self.beta_fast} is below beta_slow={self.beta_slow}")
        if self.mscale is not None and (self.attention_factor or self.mscale_all_dim is None):
            raise ConfigError(
                f"mscale={self.mscale} has no effect",
                fix="set mscale_all_dim beside it, and no attention_factor",
            )

    def rates(self, rate_I: Float[Array, " I"], theta: float) -> Float[Array, " I"]:
        """A mean of rate and rate / factor, weighted by a ramp over the pairs."""
        n_pairs = len(rate_I)

        def pair(turns: float) -> float:
            """The index whose rate theta^(-i/n_pairs) makes that many turns, not whole."""
            wavelength = self.original_length / turns
            return n_pairs * math.log(wavelength / (2 * math.pi)) / math.log(theta)

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low = max(low, 0)
        high = max(low, min(high, 2 * n_pairs - 1))
        slow_I = np.clip((np.arange(n_pairs) - low) / ((high - low) or 0.001), 0, 1)
        return _mix(rate_I, jnp.asarray(1 - slow_I, jnp.float32), self.factor)

    def magnitude(self) -> float:
        """`attention_factor`, or m(mscale) / m(mscale_all_dim), or m(1)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._m(self.mscale) / self._m(self.mscale_all_dim)
        return self._m(1.0)

    def score_scale(self) -> float:
        """m(mscale_all_dim)^2, or 1."""
        return 1.0 if self.mscale_all_dim is None else self._m(self.mscale_all_dim) ** 2

    def _m(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0


def _check_factor(factor: float) -> None:
    if not factor >= 1:
        raise ConfigError(f"factor={factor} would shorten the context; it must be at least 1")


def _mix(rate_I: Array, keep_I: Array, factor: float) -> Array:
    """Rates kept by a share of `keep` and interpolated by the rest."""
    return keep_I * rate_I + (1 - keep_I) * (rate_I / factor)
