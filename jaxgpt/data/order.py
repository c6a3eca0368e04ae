# SPDX-License-Identifier: Apache-2.0
"""Which samples a step has, and which window of the ids a sample is: arithmetic alone, no state.

Left out: reading the ids (`batches.py`), and which of several texts a sample is of (`mixture.py`).
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxgpt.errors import ConfigError

FEISTEL_ROUNDS = 6


@dataclass(frozen=True)
class Sizes:
    """How many rows the global batch of each step has: piecewise constant.

    Attributes:
      first: Rows until the first change.
      changes: Rows from a step on, by that step; steps count from 0.

    Raises:
      ConfigError: A size below 1, or a step below 0.
    """

    first: int
    changes: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self):
        for step, rows in self.changes.items():
            if step < 0 or rows < 1:
                raise ConfigError(
                    f"batch sizes {{{step}: {rows}}}: steps count from 0, rows from 1"
                )
        if self.first < 1:
            raise ConfigError(f"batch_size={self.first} must be at least 1")

    def at(self, step: int) -> int:
        """Rows of this step."""
        return next((self.changes[s] for s in sorted(self.changes)[::-1] if s <= step), self.first)

    def before(self, step: int) -> int:
        """Rows of all steps before this one; exact, whatever the number."""
        edges = [0, *(s for s in sorted(self.changes) if 0 < s < step), step]
        return sum((b - a) * self.at(a) for a, b in itertools.pairwise(edges))

    def all(self) -> tuple[int, ...]:
        """Every size that some step has, in the order in which they come."""
        return tuple(dict.fromkeys(self.at(step) for step in sorted({0, *self.changes})))

    def samples(self, step: int, rows: slice | None = None) -> np.ndarray:
        """The numbers of the samples of a step, or of the given rows of it, int64."""
        return self.before(step) + np.arange(self.at(step), dtype=np.int64)[rows or slice(None)]


def count_windows(n_tokens: int, context_length: int) -> int:
    """Windows per epoch, one fewer than fit, so that there is room to shift them."""
    return max(1, (n_tokens - context_length) // context_length)


def window_starts(
    sample_B: np.ndarray, n_tokens: int, context_length: int, seed: int
) -> np.ndarray:
    """Where the windows of some samples begin.

    The epoch and the place of sample g are `divmod(g, n_windows)`, its window a bijection of the
    place keyed by (seed, epoch). Windows lie side by side and are shifted together by a hash of
    (seed, epoch), so that over the epochs every token is seen in every place of the context.

    Args:
      sample_B: Numbers of samples, int64.
      n_tokens: Ids that there are, at least context_length + 1.
      context_length: T.
      seed: Names the order.

    Returns:
      int64, one start for each sample; start + context_length is below n_tokens.
    """
    n_windows = count_windows(n_tokens, context_length)
    epoch_B, place_B = np.divmod(sample_B, n_windows)
    key_B = _mix(epoch_B.astype(np.uint64) ^ _mix(np.array([seed % 2**64], np.uint64)))
    window_B = permute(place_B.astype(np.uint64), n_windows, key_B).astype(np.int64)
    room = n_tokens - n_windows * context_length
    shift_B = (_mix(key_B) % np.uint64(room)).astype(np.int64)
    return window_B * context_length + shift_B


def permute(place: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """A bijection of 0..n-1 for each key, evaluated at some places.

    Args:
      place: uint64, one dimension, each below n.
      n: Size of the set, below 2**62.
      key: uint64, one for each place.

    Returns:
      uint64, one image for each place.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    image, out = place.copy(), np.ones(len(place), bool)
    # The network permutes 4**half >= n values; following its cycle back below n permutes n.
    while out.any():
        left, right = image[out] >> half, image[out] & mask
        for turn in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (_mix(right ^ _mix(key[out] + np.uint64(turn))) & mask)
        image[out] = left << half | right
        out = image >= n
    return image


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's step and finaliser (Steele, Lea, Flood, OOPSLA 2014): uint64 to uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
