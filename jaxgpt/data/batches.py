# SPDX-License-Identifier: Apache-2.0
"""Batches as a pure function of (seed, step), over ids in memory or mapped from a file.

There is no iterator and so no iterator state: a resumed run asks for the next step, and each of
several processes asks for its own rows of the same global batch. An epoch shows every window once,
in an order that a keyed bijection gives (a Feistel network with cycle walking: Black and Rogaway,
Ciphers with arbitrary finite domains, CT-RSA 2002), so that memory does not grow with the text.

Left out: the arithmetic of the order (`order.py`), where documents begin (`packing.py`), and
mixtures of several texts (`mixture.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import flax.struct
import numpy as np

from jaxgpt.data.order import Sizes, count_windows, window_starts
from jaxgpt.data.packing import Boundary
from jaxgpt.data.shardedids import ShardedIds
from jaxgpt.data.tokens import check_not_shrunk
from jaxgpt.errors import ConfigError


@flax.struct.dataclass
class Batch:
    """One batch; a pytree.

    Attributes:
      tokens_BT: Inputs, int32.
      targets_BT: The id that follows each input, int32.
      weights_BT: float32; 1 where the target counts, 0 for filler and what is not trained.
      segment_BT: The document of each input, int32, where they do not see each other; else None.
      pos_BT: The position of each input in its document, int32; None together with segment_BT.
    """

    # Not checked: a batch also carries shardings, shapes, or micro-batches along a leading axis.
    tokens_BT: Any
    targets_BT: Any
    weights_BT: Any
    segment_BT: Any = None
    pos_BT: Any = None


@dataclass(frozen=True, eq=False)
class Batches:
    """Training batches.

    Row r of step s is sample `g = rows of all steps before s + r`, and each sample is a window:
    see `window_starts`.

    Args:
      tokens: All ids, one dimension.
      context_length: T.
      batch_size: Rows of the global batch, at each step or at all.
      seed: Names the order.
      weights: 0 or 1 for each id, as a target; None: all are trained.
      boundary: What keeps documents apart; None: they see each other.

    Raises:
      ConfigError: A size below 1, fewer than context_length + 1 ids, or not a weight for each id.
    """

    tokens: np.ndarray | ShardedIds
    context_length: int
    batch_size: int | Sizes
    seed: int
    weights: np.ndarray | None = None
    boundary: Boundary | None = None

    def __post_init__(self):
        _check_sizes(self.context_length, self.sizes.first)
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
    def sizes(self) -> Sizes:
        """Rows of each step."""
        return self.batch_size if isinstance(self.batch_size, Sizes) else Sizes(self.batch_size)

    @property
    def n_windows(self) -> int:
        """Windows per epoch."""
        return count_windows(len(self.tokens), self.context_length)

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """The batch of one step, or the given rows of it.

        Args:
          step: Counts from 0.
          rows: Which rows of the global batch; None for all.
        """
        return self.samples(self.sizes.samples(step, rows))

    def samples(self, sample_B: np.ndarray) -> Batch:
        """The windows of samples by number, int64."""
        if isinstance(self.tokens, np.ndarray):  # the other kind sees to it itself
            check_not_shrunk(self.tokens)
        start_B = window_starts(sample_B, len(self.tokens), self.context_length, self.seed)
        place_BT = start_B[:, None] + np.arange(self.context_length + 1)
        weights_BT = _weights(self.weights, place_BT)
        return _batch(self.tokens[place_BT], weights_BT, self.boundary)

    def windows(self, step: int) -> np.ndarray:
        """Of each row of a step the text, 0, its epoch and its first id; int64, (rows, 3)."""
        return self.windows_of(self.sizes.samples(step))

    def windows_of(self, sample_B: np.ndarray) -> np.ndarray:
        """The same of samples by number."""
        start_B = window_starts(sample_B, len(self.tokens), self.context_length, self.seed)
        return np.stack([0 * sample_B, sample_B // self.n_windows, start_B], -1)


def eval_batches(
    tokens: np.ndarray | ShardedIds,
    context_length: int,
    batch_size: int,
    weights: np.ndarray | None = None,
    boundary: Boundary | None = None,
) -> Iterator[Batch]:
    """One fixed pass over all ids in windows of T without overlap.

    Every id but the first, which has no context, is a target exactly once, whatever the batch size,
    with its weight; with a boundary, the first id of a document weighs 0. The last window and the
    last batch are filled up with weight 0.

    Args:
      tokens: All ids, one dimension.
      context_length: T.
      batch_size: Rows of each batch.
      weights: 0 or 1 for each id; None: 1.
      boundary: What keeps documents apart; None: they see each other.

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
            if isinstance(tokens, np.ndarray):
                check_not_shrunk(tokens)
            place_BT = (first + rows) * context_length + np.arange(context_length + 1)
            known_BT = np.minimum(place_BT, n - 1)
            weights_BT = _weights(weights, known_BT) * (place_BT[:, 1:] < n)
            yield _batch(tokens[known_BT], weights_BT, boundary)

    return batches()


def _weights(weights: np.ndarray | None, place_BT: np.ndarray) -> np.ndarray:
    """Of the targets of windows at these places."""
    if weights is None:
        return np.ones(place_BT[:, 1:].shape, np.float32)
    return weights[place_BT[:, 1:]].astype(np.float32)


def _batch(ids_BT: np.ndarray, weights_BT: np.ndarray, boundary: Boundary | None) -> Batch:
    """Splits windows of T + 1 ids into inputs and targets."""
    ids_BT = ids_BT.astype(np.int32)
    tokens_BT, targets_BT = map(np.ascontiguousarray, (ids_BT[:, :-1], ids_BT[:, 1:]))
    if boundary is None:
        return Batch(tokens_BT, targets_BT, weights_BT)
    weights_BT = weights_BT * ~boundary.begins(ids_BT)[:, 1:]
    return Batch(tokens_BT, targets_BT, weights_BT, *boundary.split(tokens_BT))


def _check_sizes(context_length: int, batch_size: int) -> None:
    for name, size in (("context_length", context_length), ("batch_size", batch_size)):
        if size < 1:
            raise ConfigError(f"{name}={size} must be at least 1")
