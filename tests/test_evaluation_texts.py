# SPDX-License-Identifier: Apache-2.0
import functools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.errors import ConfigError
from jaxgpt.model import init_params
from jaxgpt.study.evaluation.texts import evaluate_text
from jaxgpt.study.evaluation.windows import windows
from jaxgpt.testing import jit_forward, tiny

CFG = tiny(vocab_size=256, n_layers=1)
TEXT = "One two, three \N{DOG FACE} dogs.\n"


@functools.cache
def params(zero=False):
    drawn = jax.jit(init_params, static_argnums=0)(CFG, jax.random.key(0))
    return jax.tree.map(np.zeros_like, drawn) if zero else drawn


class Begun(ByteTokenizer):
    begin_ids = (1,)


def score(*documents, tokenizer=None, zero=False, **options):
    return evaluate_text(CFG, params(zero), tokenizer or ByteTokenizer(), documents, **options)


@given(st.data())
def test_windows_score_every_id_once(data):
    context = data.draw(st.integers(1, 9))
    stride, length = data.draw(st.integers(1, context)), data.draw(st.integers(0, 40))
    found = list(windows(length, context, stride))
    assert [i for w in found for i in range(w.first, w.end)] == list(range(length))
    assert all(0 < w.end - w.begin <= context for w in found)
    assert all(w.first - w.begin >= context - stride for w in found[1:])


def test_windows_of_the_page_of_transformers():
    assert list(windows(10, 4, 4)) == [(0, 0, 4), (4, 4, 8), (8, 8, 10)]
    assert list(windows(10, 4, 2)) == [(0, 0, 4), (2, 4, 6), (4, 6, 8), (6, 8, 10)]
    for stride in (0, 5):
        with pytest.raises(ConfigError, match=f"stride={stride} must be between 1 and"):
            windows(10, 4, stride)


@pytest.mark.parametrize("stride", [8, 3])
def test_a_text_is_scored_as_by_hand(stride):
    ids, nats, count, last = np.frombuffer(TEXT.encode(), np.uint8), 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end, row = min(begin + 8, len(ids)), np.zeros((1, 8), np.int32)
        row[0, : end - begin] = ids[begin:end]
        logits = jit_forward(CFG, params(), row).logits_BTV[0]
        first = max(last, begin + 1)
        log_probs = np.asarray(jax.nn.log_softmax(logits), np.float64)
        nats -= log_probs[np.arange(first, end) - begin - 1, ids[first:end]].sum()
        count, last = count + end - first, end
        if end == len(ids):
            break
    found = score(TEXT, context=8, stride=stride)
    assert found.total.n_tokens == count and found.n_unscored == len(ids) - count
    assert found.total.nats == pytest.approx(nats, rel=1e-5)
    assert found.metrics()["token_perplexity"].value == pytest.approx(math.exp(nats / count))


def test_windows_stay_in_a_document():
    both, *each = score(TEXT, "Another."), score(TEXT), score("Another.")
    assert both.total.nats == pytest.approx(sum(one.total.nats for one in each), rel=1e-6)
    assert (both.n_documents, len(both.parts)) == (2, 2)
    assert both.n_unscored == sum(one.n_unscored for one in each)
    ids = [ByteTokenizer().encode(text) for text in (TEXT, "Another.")]
    assert score(*ids).total == pytest.approx(both.total)


def test_uniform_logits_are_eight_bits_a_byte():  # D15
    found = score("\N{LATIN SMALL LETTER E WITH ACUTE}\N{DOG FACE}", zero=True, prefix=[10])
    values = {name: each.value for name, each in found.metrics().items()}
    assert values["bits_per_byte"] == pytest.approx(8, abs=1e-6)
    assert values["bits_per_char"] == pytest.approx(24, abs=1e-6)
    assert values["token_perplexity"] == pytest.approx(256, rel=1e-6)
    assert "word_perplexity" not in values and found.n_unscored == 0
    words = score("ab cd\n", zero=True, prefix=[10], n_words=3)
    assert words.metrics()["word_perplexity"].value == pytest.approx(256**2, rel=1e-6)


def test_the_first_id_and_the_bos():
    assert score("abcd").total.n_tokens == 3 and score("abcd").n_unscored == 1
    assert score("abcd").total.n_bytes == 3
    prefixed = score("abcd", prefix=[10])
    assert prefixed.total.n_tokens == prefixed.total.n_bytes == 4
    begun = score("abcd", tokenizer=Begun(), prefix=[10])  # the prefix is for those without
    assert begun.total == pytest.approx(score("abcd", prefix=[1]).total)
    assert score(np.array([1, 97, 98, 99, 100]), tokenizer=Begun()).total == begun.total
    long = score("abcdefghijkl", tokenizer=Begun(), context=5)
    assert (long.n_windows, long.total.n_tokens, long.n_unscored) == (3, 12, 0)
    parts = [score(part, tokenizer=Begun()).total.nats for part in ("abcd", "efgh", "ijkl")]
    assert long.total.nats == pytest.approx(sum(parts), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 17}, "context=17 must be between 2 and the model's 16"),
        ({"context": 8, "stride": 9}, "stride=9 must be between 1 and the window of 8"),
    ],
)
def test_windows_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        score(TEXT, **options)


def test_nothing_to_score():
    with pytest.raises(ConfigError, match="no token to score"):
        score("a")
