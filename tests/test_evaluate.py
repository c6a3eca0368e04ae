# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest

from jaxgpt.data.tokenizer import ByteTokenizer, CharTokenizer
from jaxgpt.train.evaluate import evaluate


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5, 7])
def test_tokens_are_averaged_not_batches(batch_size):
    """Case D14: four windows at 2 nats a token and one at 4, in batches of any size."""
    tokens = np.zeros(41, np.uint8)
    tokens[33:] = 1  # the targets of the fifth window
    loss = np.array([2.0, 4.0])
    score = evaluate(
        lambda batch: loss[batch.targets_BT] * batch.weights_BT,
        tokens,
        CharTokenizer("ab"),
        context_length=8,
        batch_size=batch_size,
    )
    assert score.n_tokens == score.n_chars == 40
    assert score.nats_per_token == pytest.approx(2.4, abs=1e-6)
    assert score.metrics()["val_token_perplexity"] == pytest.approx(11.023, abs=1e-3)


def test_uniform_bytes_are_eight_bits_each():
    """Case D15: bytes are counted as bytes, also where a token is half a character."""
    tokenizer = ByteTokenizer()
    score = evaluate(
        lambda batch: math.log(256) * batch.weights_BT,
        tokenizer.encode("\né🐕"),
        tokenizer,
        context_length=4,
        batch_size=2,
    )
    assert (score.n_tokens, score.n_bytes, score.n_chars) == (6, 6, 2)
    assert score.metrics()["val_bits_per_byte"] == pytest.approx(8.0, abs=1e-6)


def test_a_signal_ends_the_pass():
    asked = iter([False, True])
    score = evaluate(
        lambda batch: batch.weights_BT,
        np.zeros(100, np.uint8),
        CharTokenizer("a"),
        context_length=4,
        batch_size=1,
        stop=lambda: next(asked),
    )
    assert score is None


def test_only_answers_are_scored():
    score = evaluate(
        lambda batch: batch.targets_BT * batch.weights_BT,
        np.arange(8, dtype=np.uint8),
        ByteTokenizer(),
        context_length=3,
        batch_size=2,
        weights=np.array([1, 0, 0, 1, 0, 1, 0, 1], np.uint8),
    )
    assert (score.n_tokens, score.n_bytes) == (3, 3)
    assert score.nats_per_token == pytest.approx((3 + 5 + 7) / 3)
