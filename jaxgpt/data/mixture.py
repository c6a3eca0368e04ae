# SPDX-License-Identifier: Apache-2.0
"""Batches from several texts in fixed shares, again as a pure function of (seed, step).

Which text a sample is of follows a fixed pattern of 4096 places, in which each text has its share
of the places and they lie as evenly as they can: in every stretch of training the shares are those
asked for, within a few samples, and not only on average.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxgpt.data.batches import Batch, Batches
from jaxgpt.data.order import Sizes
from jaxgpt.errors import ConfigError

BITS = 12
PLACES = 1 << BITS


@dataclass(frozen=True)
class Pattern:
    """Which text each sample is of.

    Place p of the pattern has the text in whose part of 0..4095 the bit-reversal of p lies (van der
    Corput 1935, in base 2). Sample g is at place g mod 4096.

    Attributes:
      counts: Places of each text; 4096 together.
    """

    counts: tuple[int, ...]

    @classmethod
    def of(cls, weights: Sequence[float | int]) -> "Pattern":
        """The nearest shares in 4096ths, each at least one.

        Args:
          weights: Above 0; they need not sum to 1.

        Raises:
          ConfigError: No weight, a weight that is not a number above 0, or more than 4096.
        """
        if not all(0 < weight < math.inf for weight in weights):
            raise ConfigError(f"weights {list(weights)} must be numbers above 0")
        if not 0 < len(weights) <= PLACES:
            raise ConfigError(f"{len(weights)} texts in a mixture; 1 to {PLACES} can be")
        exact = np.array(weights) / math.fsum(weights) * PLACES
        counts = np.maximum(1, np.floor(exact).astype(np.int64))
        while left := PLACES - int(counts.sum()):
            short = exact - counts
            if left > 0:
                counts[short.argmax()] += 1
            else:
                counts[np.where(counts > 1, short, np.inf).argmin()] -= 1
        return cls(tuple(counts.tolist()))

    @property
    def shares(self) -> tuple[float, ...]:
        """What each text has of the samples."""
        return tuple(count / PLACES for count in self.counts)

    @functools.cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each place: its text, and how many places before it have the same text."""
        place_P = np.arange(PLACES)
        reversed_P = sum((place_P >> bit & 1) << (BITS - 1 - bit) for bit in range(BITS))
        text_P = np.searchsorted(np.cumsum(self.counts), reversed_P, side="right")
        before_P = np.zeros(PLACES, np.int64)
        for text, count in enumerate(self.counts):
            before_P[text_P == text] = np.arange(count)
        return text_P, before_P

    def split(self, sample_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The text of each sample, and its number among the samples of that text; int64."""
        text_P, before_P = self._places
        round_B, place_B = np.divmod(sample_B, PLACES)
        text_B = text_P[place_B]
        return text_B, round_B * np.array(self.counts)[text_B] + before_P[place_B]


@dataclass(frozen=True, eq=False)
class MixedBatches:
    """Training batches from several texts; each has its own epochs and its own order.

    Args:
      texts: The batches of each; their own batch size does not matter.
      pattern: Their shares.
      batch_size: Rows of the global batch, at each step or at all.

    Raises:
      ConfigError: Not a share for each text.
    """

    texts: Sequence[Batches]
    pattern: Pattern
    batch_size: int | Sizes

    def __post_init__(self):
        if len(self.texts) != len(self.pattern.counts):
            raise ConfigError(f"{len(self.pattern.counts)} shares for {len(self.texts)} texts")

    @property
    def sizes(self) -> Sizes:
        """Rows of each step."""
        return self.batch_size if isinstance(self.batch_size, Sizes) else Sizes(self.batch_size)

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """The batch of one step, or the given rows of it.

        Args:
          step: Counts from 0.
          rows: Which rows of the global batch; None for all.
        """
        text_B, sample_B = self.pattern.split(self.sizes.samples(step, rows))
        row_B = np.argsort(text_B, kind="stable")
        parts = [batches.samples(sample_B[text_B == i]) for i, batches in enumerate(self.texts)]
        back_B = np.argsort(row_B)
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[back_B], *parts)

    def windows(self, step: int) -> np.ndarray:
        """Of each row of a step the text, its epoch and its first id; int64, (rows, 3)."""
        text_B, sample_B = self.pattern.split(self.sizes.samples(step))
        rows = np.stack([batches.windows_of(sample_B) for batches in self.texts])
        windows = rows[text_B, np.arange(len(text_B))]
        windows[:, 0] = text_B
        return windows
