# SPDX-License-Identifier: Apache-2.0
"""An interpolated character-trigram model: the baseline that a transformer must beat.

p(c | a b) = w3 f(c | a b) + w2 f(c | b) + w1 f(c) + w0 / V, with relative frequencies f of the
first nine tenths of the training ids and weights fitted by expectation maximisation on the last
tenth of them (Jelinek & Mercer 1980); then f is counted on all training ids.
"""

import numpy as np


def trigram_nats(train: np.ndarray, val: np.ndarray, vocab_size: int) -> float:
    """Mean nats per token of `val`, its first two tokens left out.

    Args:
      train: Training ids, one dimension.
      val: Validation ids.
      vocab_size: V; memory is V^3 counts.
    """
    cut = len(train) * 9 // 10
    heldout_4 = _terms(train[:cut], train[cut:], vocab_size)
    weights_4 = np.full(4, 0.25)
    for _ in range(100):
        share = heldout_4 * weights_4
        weights_4 = (share / share.sum(1, keepdims=True)).mean(0)
    return float(-np.log(_terms(train, val, vocab_size) @ weights_4).mean())


def _terms(train: np.ndarray, text: np.ndarray, V: int) -> np.ndarray:
    """For each token of `text` but two: the four probabilities that are mixed."""
    a, b, c = (train[i : len(train) - 2 + i].astype(np.int64) for i in range(3))
    three = np.bincount((a * V + b) * V + c, minlength=V**3).reshape(V, V, V)
    two, one = three.sum(0), three.sum((0, 1))
    a, b, c = (text[i : len(text) - 2 + i].astype(np.int64) for i in range(3))
    return np.stack(
        [
            three[a, b, c] / np.maximum(three[a, b].sum(-1), 1),
            two[b, c] / np.maximum(two[b].sum(-1), 1),
            one[c] / one.sum(),
            np.full(len(c), 1 / V),
        ],
        axis=1,
    )
