# SPDX-License-Identifier: Apache-2.0
"""Pieces to ids in threads, and the tokenizer of a stream."""

import threading
import time

import numpy as np
import pytest

from jaxgpt.data import encoding
from jaxgpt.data.bpe import BPETokenizer, train_bpe
from jaxgpt.data.config import DataConfig
from jaxgpt.data.documents import START, Piece, Source
from jaxgpt.data.encoding import encode_pieces, make_tokenizer
from jaxgpt.data.pieces import HoldOut
from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.errors import ConfigError

BYTES = ByteTokenizer()


def numbered(texts, fresh=True):
    for number, text in enumerate(texts):
        yield Piece(text, number, number % 2 == 1, fresh, START)


class Slow(ByteTokenizer):
    """Later texts are encoded sooner; counts what is under way."""

    def __init__(self):
        super().__init__()
        self.encoded, self.lock = 0, threading.Lock()

    def encode(self, text):
        time.sleep(0.02 / (1 + len(text)))
        with self.lock:
            self.encoded += 1
        return super().encode(text)


@pytest.mark.parametrize("workers", (1, 2, 5))
def test_the_order_is_that_of_the_pieces(monkeypatch, workers):
    monkeypatch.setattr(encoding, "GROUP_PIECES", 1)
    texts = ["ä" * n for n in range(1, 30)]
    found = list(encode_pieces(numbered(texts), Slow(), workers))
    assert [bytes(one.ids).decode() for one in found] == texts
    assert [one.number for one in found] == list(range(29))
    assert [(one.n_chars, one.n_bytes) for one in found] == [(n, 2 * n) for n in range(1, 30)]
    assert [one.held_out for one in found[:3]] == [False, True, False]
    assert found[0].ids.dtype == np.uint8


def test_no_more_is_read_than_is_worked_on(monkeypatch):
    monkeypatch.setattr(encoding, "GROUP_PIECES", 1)
    read = []
    encoded = encode_pieces((read.append(p) or p for p in numbered("a" * 99)), Slow(), 2)
    next(encoded)
    assert len(read) <= 2 * 2 + 1
    encoded.close()
    assert len(read) <= 2 * 2 + 1 and not any(t.name == "encode" for t in threading.enumerate())


def test_what_cannot_be_encoded_names_its_piece():
    def refusal(texts, tokenizer):
        with pytest.raises(ConfigError) as caught:
            list(encode_pieces(numbered(texts), tokenizer, 2))
        return str(caught.value)

    assert "piece 1 of the text holds the lone surrogate U+D800" in refusal(["a", "\ud800"], BYTES)
    chars = make_tokenizer(DataConfig(), source("ab"), 1, lambda: None)
    assert "(piece 2); fix: " in refusal(["a", "b", "c"], chars)
    small = ByteTokenizer()
    small.vocab_size = 98
    assert "made the ids 98 to 98; its vocabulary has 98 (piece 1)" in refusal(["a", "b"], small)


def test_what_goes_on_has_no_space_before_it():
    class Spaced(ByteTokenizer):
        def encode(self, text):
            return super().encode(" " + text)

        def encode_on(self, text):
            return super().encode(text)

    for fresh, ids in ((True, b" b"), (False, b"b")):
        (found,) = encode_pieces(numbered(["b"], fresh), Spaced(), 1)
        assert bytes(found.ids) == ids
    tokenizer = BPETokenizer(train_bpe(["ab ab"], 260))
    assert encoding._goes_on(tokenizer) == tokenizer.encode
    assert encoding._goes_on(BYTES) == BYTES.encode


def source(*documents):
    return Source(["a"], [], lambda _: (iter([one]) for one in documents), None, HoldOut(0.5))


def test_tokenizers_of_a_stream(tmp_path):
    def made(kind, sample=1 << 20, **changes):
        data = DataConfig(tokenizer=kind, **changes)
        return make_tokenizer(data, source("ab ab", "ab cd cd"), sample, lambda: None)

    assert made("byte").fingerprint == BYTES.fingerprint
    assert made("char").decode(range(5)) == " abcd"
    whole, part = made("bpe", vocab_size=270), made("bpe", 5, vocab_size=270)
    assert whole.fingerprint == BPETokenizer(train_bpe(["ab ab", "ab cd cd"], 270)).fingerprint
    assert part.fingerprint == BPETokenizer(train_bpe(["ab ab"], 270)).fingerprint
    whole.save(tmp_path / "mine.json")
    assert made(str(tmp_path / "mine.json")).fingerprint == whole.fingerprint

    def stop():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        make_tokenizer(DataConfig(tokenizer="char"), source("ab"), 1, stop)
