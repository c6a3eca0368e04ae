# SPDX-License-Identifier: Apache-2.0
"""Batches as a pure function of (seed, step), over ids in memory or mapped from a file.

There is no iterator and so no iterator state: a resumed run asks for the next step, and each of
several processes asks for its own rows of the same global batch. An epoch shows every window once,
in an order that a keyed bijection gives (a Feistel network with cycle walking: Black and Rogaway,
Ciphers with arbitrary finite domains, CT-RSA 2002), so that memory does not grow with the text.

Left out: packing of documents with masks, and mixtures of several texts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import flax.struct
import numpy as np

from jaxgpt.data.tokens import check_not_shrunk
from jaxgpt.errors import ConfigError

FEISTEL_ROUNDS = 6


@flax.struct.dataclass
class Batch:
    """One batch; a pytree.

    Attributes:
      tokens_BT: Inputs, int32.
      targets_BT: The id that follows each input, int32.
      weights_BT: float32; 1 where the target counts, 0 for filler and what is not trained.
    """

    # Not checked: a batch also carries shardings, shapes, or micro-batches along a leading axis.
    tokens_BT: Any
    targets_BT: Any
    weights_BT: Any


@dataclass(frozen=True, eq=False)
class Batches:
    """Training batches.

    Step s, row r is sample `g = s * batch_size + r`. Its epoch and place are
    `divmod(g, n_windows)`, its window a bijection of the place keyed by (seed, epoch). Windows lie
    side by side and are shifted together by a hash of (seed, epoch), so that over the epochs every
    token is seen in every place of the context.

    Args:
      tokens: All ids, one dimension.
      context_length: T.
      batch_size: Rows of the global batch.
      seed: Names the order.
      weights: 0 or 1 for each id, as a target; None: all are trained.

    Raises:
      ConfigError: A size below 1, fewer than context_length + 1 ids, or not a weight for each id.
    """

    tokens: np.ndarray
    context_length: int
    batch_size: int
    seed: int
    weights: np.ndarray | None = None

    def __post_init__(self):
        _check_sizes(self.context_length, self.batch_size)
        n, needed = len(self.tokens), self.context_length + 1
        if n < needed:
            raise ConfigError(
                f"the training text has {n} tokens, but a window of context_length="
                f"{self.context_length} needs {needed}",
                fix=(f"--model.context_length={n - 1} or " if n > 1 else "") + "a longer text",
            )

        if self.weights is not None and len(self.weights) != n:
            raise ConfigError(f"{len(self.weights)} weights for {n} ids")

    @property
    def n_windows(self) -> int:
        """Windows per epoch, one fewer than fit, so that there is room to shift them."""
        return max(1, (len(self.tokens) - self.context_length) // self.context_length)

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """The batch of one step, or the given rows of it.

        Args:
          step: Counts from 0.
          rows: Which rows of the global batch; None for all.
        """
        check_not_shrunk(self.tokens)
        row_B = np.arange(self.batch_size, dtype=np.int64)[rows or slice(None)]
        epoch_B, place_B = np.divmod(row_B + step * self.batch_size, self.n_windows)
        key_B = _mix(epoch_B.astype(np.uint64) ^ _mix(np.array([self.seed % 2**64], np.uint64)))
        window_B = permute(place_B.astype(np.uint64), self.n_windows, key_B).astype(np.int64)
        room = len(self.tokens) - self.n_windows * self.context_length
        shift_B = (_mix(key_B) % np.uint64(room)).astype(np.int64)
        start_B1 = (window_B * self.context_length + shift_B)[:, None]
        place_BT = start_B1 + np.arange(self.context_length + 1)
        return _batch(self.tokens[place_BT].astype(np.int32), _weights(self.weights, place_BT))


def eval_batches(
    tokens: np.ndarray, context_length: int, batch_size: int, weights: np.ndarray | None = None
) -> Iterator[Batch]:
    """One fixed pass over all ids in windows of T without overlap.

    Every id but the first, which has no context, is a target exactly once, whatever the batch size,
    with its weight. The last window and the last batch are filled up with weight 0.

    Args:
      tokens: All ids, one dimension.
      context_length: T.
      batch_size: Rows of each batch.
      weights: 0 or 1 for each id; None: 1.

    Raises:
      ConfigError: A size below 1, or fewer than 2 ids.
    """
    _check_sizes(context_length, batch_size)
    n = len(tokens)
    if n < 2:
        raise ConfigError(
            f"the validation text has {n} tokens; 2 are needed to score one",
            fix="--data.val_fraction=0.1 or a longer text",
        )
    rows = np.arange(batch_size, dtype=np.int64)[:, None]
    n_rows = -(-(n - 1) // context_length)

    def batches() -> Iterator[Batch]:
        for first in range(0, n_rows, batch_size):
            check_not_shrunk(tokens)
            place_BT = (first + rows) * context_length + np.arange(context_length + 1)
            known_BT = np.minimum(place_BT, n - 1)
            weights_BT = _weights(weights, known_BT) * (place_BT[:, 1:] < n)
            yield _batch(tokens[known_BT].astype(np.int32), weights_BT)

    return batches()


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


def _weights(weights: np.ndarray | None, place_BT: np.ndarray) -> np.ndarray:
    """Of the targets of windows at these places."""
    if weights is None:
        return np.ones(place_BT[:, 1:].shape, np.float32)
    return weights[place_BT[:, 1:]].astype(np.float32)


def _batch(window_BT: np.ndarray, weights_BT: np.ndarray) -> Batch:
    """Splits windows of T + 1 ids into inputs and targets."""
    tokens_BT, targets_BT = map(np.ascontiguousarray, (window_BT[:, :-1], window_BT[:, 1:]))
    return Batch(tokens_BT=tokens_BT, targets_BT=targets_BT, weights_BT=weights_BT)


def _check_sizes(context_length: int, batch_size: int) -> None:
    for name, size in (("context_length", context_length), ("batch_size", batch_size)):
        if size < 1:
            raise ConfigError(f"{name}={size} must be at least 1")
