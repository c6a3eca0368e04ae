# SPDX-License-Identifier: Apache-2.0
"""Student's t: intervals of means, and paired differences of two models.

Left out: where the numbers come from.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxgpt.errors import ConfigError

LEVEL = 0.95
"""Of intervals."""


def t_within(t: float, freedom: int) -> float:
    """The probability of a value between -t and t.

    Args:
      t: At least 0.
      freedom: Degrees of freedom, at least 1.

    Source: Abramowitz & Stegun 1964, 26.7.3 and 26.7.4, exact for whole degrees of freedom.
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = cosine if odd else 1.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    if odd:
        return 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0))
    return sine * total


def t_quantile(within: float, freedom: int) -> float:
    """The t for which a value lies between -t and t with this probability.

    Args:
      within: In [0, 1).
      freedom: Degrees of freedom, at least 1.
    """
    high = 1.0
    while t_within(high, freedom) < within:
        high *= 2
    low = 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, freedom) < within else (low, middle)
    return high


def half_width(sd: float, n: int, level: float = LEVEL) -> float:
    """Half the t-interval of a mean of n numbers of this standard deviation; inf for one alone."""
    return t_quantile(level, n - 1) * sd / math.sqrt(n) if n > 1 else math.inf


@dataclasses.dataclass(frozen=True)
class Paired:
    """The difference of two models, over pairs.

    Attributes:
      difference: Mean of the second minus the first.
      standard_error: Of it.
      low: Lower end of its t-interval.
      high: Upper end.
      p_value: Of a difference as large, or larger, where there is none; two-sided.
      n: Pairs.
    """

    difference: float
    standard_error: float
    low: float
    high: float
    p_value: float
    n: int


def paired(
    first: Sequence[float] | np.ndarray,
    second: Sequence[float] | np.ndarray,
    weights: Sequence[float] | np.ndarray | None = None,
) -> Paired:
    """Paired t-test of sums over pairs: windows of a text with their tokens, or seeds.

    The difference is that of the sums over the sum of weights; its variance is that of a ratio, of
    residuals d - difference * weight. With equal weights that is the paired t-test. Pairs are taken
    as independent: of windows of one text that is an approximation, and a cautious reader takes
    longer ones.

    Args:
      first: Of each pair the first model's sum, as nats of a window.
      second: The second model's.
      weights: What is summed over in each pair, as its tokens; None: one.

    Raises:
      ConfigError: Fewer than two pairs.

    Source: Student 1908; for ratios: Cochran 1977, Sampling Techniques, eq. 6.13.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    w = np.ones_like(a) if weights is None else np.asarray(weights, np.float64)
    n, total = len(a), float(w.sum())
    if n < 2:
        raise ConfigError(f"{n} pairs are too few to compare", fix="a longer text, or more seeds")
    difference = float((b - a).sum()) / total
    residuals = (b - a) - difference * w
    error = math.sqrt(n / (n - 1) * float((residuals**2).sum())) / total
    half = t_quantile(LEVEL, n - 1) * error
    if error == 0:
        p_value = float(difference == 0)
    else:
        p_value = max(1 - t_within(abs(difference) / error, n - 1), 0.0)
    return Paired(difference, error, difference - half, difference + half, p_value, n)
