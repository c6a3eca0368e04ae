# SPDX-License-Identifier: Apache-2.0
import functools

import jax
import numpy as np
import pytest

from jaxgpt.errors import ConfigError, DivergedError
from jaxgpt.study.evaluation import likelihood
from jaxgpt.study.evaluation.likelihood import loglikelihoods
from jaxgpt.testing import jit_forward, tiny

CFG = tiny()
LENGTHS = [(4, 3), (10, 2), (3, 4), (1, 11), (20, 4), (11, 1), (4, 13)]  # of a context of 16


@functools.cache
def params():
    from jaxgpt.testing.tools import worn

    return worn(CFG)


def pairs():
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(0, CFG.vocab_size, n) for n in each) for each in LENGTHS]


def alone(context, continuation):
    """One pair, nothing beside it and nothing behind it."""
    ids = np.concatenate([context, continuation])[-CFG.context_length - 1 :]
    logits = jit_forward(CFG, params(), ids[None, :-1].astype(np.int32)).logits_BTV
    rows = np.asarray(jax.nn.log_softmax(logits[0]), np.float64)[-len(continuation) :]
    return rows[range(len(continuation)), continuation].sum(), (
        rows.argmax(-1) == continuation
    ).all()


def test_pairs_are_scored_as_if_alone():
    found = loglikelihoods(CFG, params(), pairs())
    want = [alone(*pair) for pair in pairs()]
    np.testing.assert_allclose(found.log_probs, [x for x, _ in want], rtol=1e-5)
    assert found.greedy.tolist() == [bool(g) for _, g in want]
    assert found.cut.tolist() == [0, 0, 0, 0, 7, 0, 0]


def test_batches_change_nothing(monkeypatch):
    want = loglikelihoods(CFG, params(), pairs())
    calls = []
    found = loglikelihoods(CFG, params(), pairs(), batch_size=2, progress=calls.append)
    np.testing.assert_allclose(found.log_probs, want.log_probs, rtol=1e-5)
    assert calls == [2, 4, 6, 7]
    monkeypatch.setattr(likelihood, "LOGIT_BYTES", 1)  # 16 tokens at a time
    few = loglikelihoods(CFG, params(), pairs())
    np.testing.assert_allclose(few.log_probs, want.log_probs, rtol=1e-5)
    assert (few.greedy == want.greedy).all()


def test_the_greedy_continuation_is_known():
    context = pairs()[0][0]
    logits = jit_forward(CFG, params(), context[None].astype(np.int32)).logits_BTV
    best = int(logits[0, -1].argmax())
    found = loglikelihoods(CFG, params(), [(context, [i]) for i in range(CFG.vocab_size)])
    assert np.flatnonzero(found.greedy).tolist() == [best]
    assert np.exp(found.log_probs).sum() == pytest.approx(1, abs=1e-5)


def test_few_widths():
    widths = {likelihood._width(n, 1000) for n in range(1, 1001)}
    assert sorted(widths) == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1000]
    assert all(likelihood._width(n, 1000) >= n for n in range(1, 1001))
    rows = [likelihood._n_rows(256, None, left) for left in (1, 2, 3, 5, 6, 8, 99)]
    assert rows == [1, 2, 4, 4, 8, 8, 16]
    assert likelihood._n_rows(1024, 3, 99) == 3


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (([], [1]), "pair 0 has an empty context"),
        (([1], []), "pair 0 has an empty continuation"),
        (([1], [31]), "outside the vocabulary of 31"),
        (([1], [2] * 17), "a continuation of 17 tokens, and the model reads 16"),
    ],
)
def test_what_cannot_be_scored(pair, message):
    with pytest.raises(ConfigError, match=message):
        loglikelihoods(CFG, params(), [pair])


def test_numbers_that_are_none():
    broken = jax.tree.map(lambda a: a * np.nan, params())
    with pytest.raises(DivergedError, match="not finite"):
        loglikelihoods(CFG, broken, pairs()[:1])
    assert loglikelihoods(CFG, params(), []).log_probs.shape == (0,)
