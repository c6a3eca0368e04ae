# SPDX-License-Identifier: Apache-2.0
"""The validation loss: one fixed full pass, every token but the first scored once."""

from collections.abc import Callable

import numpy as np

from jaxgpt.data.batches import Batch, eval_batches
from jaxgpt.data.packing import Boundary
from jaxgpt.data.shardedids import ShardedIds
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.losses import Score


def evaluate(
    nats_of: Callable[[Batch], np.ndarray],
    tokens: np.ndarray | ShardedIds,
    tokenizer: Tokenizer,
    *,
    context_length: int,
    batch_size: int,
    weights: np.ndarray | None = None,
    boundary: Boundary | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Score | None:
    """Score a text in windows of `context_length` without overlap.

    The result does not depend on the batch size: tokens are weighted, not batches, and sums are in
    float64.

    Args:
      nats_of: Weighted nats (B, T) of a batch.
      tokens: The text's ids.
      tokenizer: Tells how many characters and bytes each id stands for.
      context_length: T.
      batch_size: B.
      weights: 1 for each id that is scored, 0 for the others; None: all are.
      boundary: What keeps documents apart; then the first id of each is not scored.
      stop: Asked before each batch; True ends the pass.

    Returns:
      The score, or None if it was stopped.
    """
    n_bytes = np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)])
    n_chars = np.array([_characters(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)])
    nats, counted, chars, bytes_ = 0.0, 0, 0, 0
    for batch in eval_batches(tokens, context_length, batch_size, weights, boundary):
        if stop():
            return None
        nats += float(np.asarray(nats_of(batch), np.float64).sum())
        scored = batch.targets_BT[batch.weights_BT > 0]
        counted += scored.size
        chars += int(n_chars[scored].sum())
        bytes_ += int(n_bytes[scored].sum())
    return Score(nats, counted, chars, bytes_)


def _characters(token: bytes) -> int:
    """Characters that begin in these bytes: each has one byte of UTF-8 that continues no other."""
    return sum(byte & 0xC0 != 0x80 for byte in token)
