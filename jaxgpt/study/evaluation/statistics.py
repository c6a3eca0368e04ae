# SPDX-License-Identifier: Apache-2.0
"""A value and its standard error: means of examples, ratios of sums, and perplexities of them.

Left out: intervals (1.96 standard errors make 95% of one) and tests between two models.
"""

import math
from typing import NamedTuple

import numpy as np

LARGEST = 700.0  # nats, of which the exponential is still a number


class Estimate(NamedTuple):
    """What was measured.

    Attributes:
      value: The number.
      stderr: Its standard error; None where there is only one example to tell from.
    """

    value: float
    stderr: float | None = None

    def scaled(self, factor: float) -> "Estimate":
        """The same in another unit."""
        return Estimate(self.value * factor, None if self.stderr is None else self.stderr * factor)

    def exponential(self) -> "Estimate":
        """The exponential; its error to first order, so it holds where it is small."""
        value = math.exp(self.value) if self.value < LARGEST else math.inf
        known = self.stderr is not None and math.isfinite(value)
        return Estimate(value, value * self.stderr if known else None)  # type: ignore[operator]


def mean(values: np.ndarray) -> Estimate:
    """The mean of examples, with the sample's standard deviation over the root of their number."""
    values = np.asarray(values, np.float64)
    n = len(values)
    stderr = float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else None
    return Estimate(float(values.mean()), stderr)


def ratio(totals: np.ndarray, counts: np.ndarray) -> Estimate:
    """Sum over sum, as nats over tokens, from parts that are drawn independently.

    Tokens of one part hang together; so the parts are what the error is told from: for the ratio
    R = sum(t) / sum(c) it is sqrt(n / (n - 1) * sum((t - R c)^2)) / sum(c).

    Args:
      totals: t of each part.
      counts: c of each part; their sum is above 0.

    Source: Cochran, Sampling Techniques, 3rd edition, section 6.3.
    """
    totals, counts = np.asarray(totals, np.float64), np.asarray(counts, np.float64)
    value, n = float(totals.sum() / counts.sum()), len(totals)
    if n < 2:
        return Estimate(value)
    rest = float(((totals - value * counts) ** 2).sum())
    return Estimate(value, math.sqrt(n / (n - 1) * rest) / float(counts.sum()))
