# SPDX-License-Identifier: Apache-2.0
"""Token files: what is stored, when it is made again, and what is refused."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxgpt.data.answers import example
from jaxgpt.data.batches import Batches
from jaxgpt.data.corpus import Corpus
from jaxgpt.data.tokenizer import ByteTokenizer, CharTokenizer, train_tokenizer
from jaxgpt.data.tokens import HEADER_BYTES, MAGIC, open_tokens, prepare_tokens, token_dtype
from jaxgpt.errors import ConfigError, ResourceError


@dataclasses.dataclass
class CodePoints:
    """A tokenizer of one's own: id = code point + offset."""

    vocab_size: int
    offset: int = 0
    kind: str = "code points"
    eot_id: int | None = None

    @property
    def fingerprint(self) -> str:
        return f"{self.vocab_size} {self.offset}"

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(char) + self.offset for char in text], np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return "".join(chr(i - self.offset) for i in ids)

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token]).encode()

    def save(self, path: Path) -> None:
        raise NotImplementedError


def header_of(path: Path) -> dict:
    return json.loads(path.read_bytes()[len(MAGIC) : HEADER_BYTES])


def patch_header(path: Path, **changes):
    header = header_of(path) | changes
    content = path.read_bytes()
    path.write_bytes(
        (MAGIC + json.dumps(header).encode()).ljust(HEADER_BYTES) + content[HEADER_BYTES:]
    )


def refusal(path: Path, tokenizer) -> str:
    with pytest.raises(ConfigError) as caught:
        open_tokens(path, tokenizer=tokenizer)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "data" / "tokens.bin"


def test_the_text_is_split_by_position(path):
    text = "0123456789abcdéf🐕hij"
    found = prepare_tokens(Corpus.of([text]), ByteTokenizer(), path, val_fraction=0.3)
    assert bytes(found.train) == text[:14].encode() and bytes(found.val) == text[14:].encode()
    assert (found.train_chars, found.val_chars, found.val_bytes) == (14, 6, 10)
    assert found.val_fraction == 0.3 and found.vocab_size == 256
    assert isinstance(found.train, np.memmap) and not found.train.flags.writeable
    assert list(path.parent.iterdir()) == [path]


def test_documents_are_separated_and_a_cut_one_goes_on(path):
    corpus = Corpus.of(["abcd", "efghij", "kl"])

    def parts(tokenizer):
        found = prepare_tokens(corpus, tokenizer, path, val_fraction=0.5)
        return tokenizer.decode(found.train), tokenizer.decode(found.val)

    assert parts(ByteTokenizer()) == ("abcd\nef", "ghij\nkl")
    assert parts(CharTokenizer("abcdefghijkl")) == ("abcdef", "ghijkl")
    bpe = train_tokenizer("bpe", corpus, 257)
    assert parts(bpe) == ("abcd<|endoftext|>ef", "ghij<|endoftext|>kl")
    assert open_tokens(path, tokenizer=bpe).train[4] == bpe.eot_id == 256


def test_documents_begin_with_what_the_tokenizer_begins_texts_with(path):
    tokenizer = train_tokenizer("bpe", Corpus.of(["abcd"]), 257)
    tokenizer.begin_ids = (0, 1)
    found = prepare_tokens(Corpus.of(["ab", "cdef"]), tokenizer, path, val_fraction=0.5)
    head = tokenizer.decode([0, 1])
    assert tokenizer.decode(found.train) == f"{head}ab<|endoftext|>{head}c"
    assert tokenizer.decode(found.val) == f"{head}def"


def pairs(*rows) -> Corpus:
    made = [
        example("prompt-completion", {"prompt": prompt, "completion": completion}, "line 1")
        for prompt, completion in rows
    ]
    corpus = Corpus.of([one.content for one in made])
    return dataclasses.replace(corpus, examples=tuple(made))


PAIRS = pairs(("ab", "cd"), ("", "e"), ("fghi", "jk"))


def test_rows_with_answers_are_whole_and_weighed(path):
    found = prepare_tokens(PAIRS, ByteTokenizer(), path, val_fraction=0.5)
    assert (bytes(found.train), bytes(found.val)) == (b"abcd\ne\n", b"fghijk\n")
    assert found.train_weights.tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert found.val_weights.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert (found.train_chars, found.val_chars, found.val_bytes) == (7, 7, 7)
    assert isinstance(found.val_weights, np.memmap) and path.stat().st_size == HEADER_BYTES + 28
    again = open_tokens(path, tokenizer=ByteTokenizer())
    np.testing.assert_array_equal(again.val_weights, found.val_weights)
    text = prepare_tokens(Corpus.of(["abcd"]), ByteTokenizer(), path)
    assert text.train_weights is None and text.val_weights is None


def test_weights_follow_ids_of_any_type(path):
    tokenizer = CodePoints(70_000)
    found = prepare_tokens(PAIRS, tokenizer, path, val_fraction=0.5)
    assert found.train.dtype == np.uint32 and found.val_weights.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_damaged_weights_are_refused_and_made_again(path):
    tokenizer = ByteTokenizer()
    prepare_tokens(PAIRS, tokenizer, path)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\2")
    assert "a weight of 2" in refusal(path, tokenizer)
    path.write_bytes(content[:-1])
    assert "ids of uint8 with weights need" in refusal(path, tokenizer)
    patch_header(path, weighted=False)
    refusal(path, tokenizer)
    assert prepare_tokens(PAIRS, tokenizer, path).val_weights.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert path.read_bytes() == content


def test_a_row_that_cannot_be_encoded_leaves_no_file(path):
    with pytest.raises(ConfigError, match="not among the 2 characters"):
        prepare_tokens(PAIRS, CharTokenizer("ab"), path)
    assert list(path.parent.iterdir()) == []


def test_no_part_is_held_out_at_zero(path):
    found = prepare_tokens(Corpus.of(["abc"]), ByteTokenizer(), path, val_fraction=0.0)
    assert (len(found.train), len(found.val), found.val_bytes) == (3, 0, 0)
    for wrong in (-0.1, 1.0):
        with pytest.raises(ConfigError, match="val_fraction"):
            prepare_tokens(Corpus.of(["abc"]), ByteTokenizer(), path, val_fraction=wrong)


def test_made_again_only_when_something_changed(path):
    """Token file reused after the tokenizer changed: OptimalScale/LMFlow#394."""
    corpus = Corpus.of(["héllo"])
    char = train_tokenizer("char", corpus, 0)

    def prepare(corpus, tokenizer, fraction=0.0) -> int:
        found = prepare_tokens(corpus, tokenizer, path, val_fraction=fraction)
        assert (found.tokenizer, found.source) == (tokenizer.fingerprint, corpus.fingerprint)
        return len(found.train) + len(found.val)

    def mtime() -> int:
        os.utime(path, ns=(1, os.stat(path).st_mtime_ns - 1))  # a rewrite cannot go unseen
        return os.stat(path).st_mtime_ns

    assert prepare(corpus, char) == 5
    assert prepare(corpus, ByteTokenizer()) == 6
    with pytest.raises(
        ConfigError, match=r"made with the byte tokenizer .* not the char tokenizer"
    ):
        open_tokens(path, tokenizer=char)
    before = mtime()
    assert prepare(corpus, ByteTokenizer()) == 6 and os.stat(path).st_mtime_ns == before
    assert prepare(Corpus.of(["hello"]), ByteTokenizer()) == 5
    assert os.stat(path).st_mtime_ns != before
    before = mtime()
    assert prepare(Corpus.of(["hello"]), ByteTokenizer(), 0.5) == 5
    assert os.stat(path).st_mtime_ns != before


def test_an_edited_fingerprint_is_refused(path):
    prepare_tokens(Corpus.of(["hello"]), ByteTokenizer(), path)
    patch_header(path, tokenizer="0" * 64)
    assert "000000000000, not the byte tokenizer" in refusal(path, ByteTokenizer())


def test_the_type_follows_the_vocabulary(path):
    sizes = {1: 1, 256: 1, 257: 2, 65_536: 2, 65_537: 4, 300_000: 4}
    assert {v: token_dtype(v).itemsize for v in sizes} == sizes
    tokenizer = CodePoints(70_000, offset=69_900)
    found = prepare_tokens(Corpus.of(["abc"]), tokenizer, path, val_fraction=0.0)
    assert header_of(path)["dtype"] == "uint32"
    assert found.train.tolist() == [69_997, 69_998, 69_999]


def test_ids_outside_the_vocabulary_are_refused(path):
    with pytest.raises(ConfigError, match="id 99 at position 2 is outside the vocabulary of 99"):
        prepare_tokens(Corpus.of(["abc"]), CodePoints(99), path, val_fraction=0.0)
    assert not path.exists()
    tokenizer = CharTokenizer("abc")
    prepare_tokens(Corpus.of(["abcabc"]), tokenizer, path)
    content = bytearray(path.read_bytes())
    content[-2] = 3
    path.write_bytes(content)
    assert "id 3 at position 4 is outside the vocabulary of 3" in refusal(path, tokenizer)


@pytest.mark.parametrize("change", [-1, 1, -3, -5000])
def test_a_file_of_another_length_is_refused_and_made_again(path, change):
    corpus, tokenizer = Corpus.of(["abc" * 100]), CodePoints(300)
    prepare_tokens(corpus, tokenizer, path)
    os.truncate(path, max(0, path.stat().st_size + change))
    refusal(path, tokenizer)
    assert len(prepare_tokens(corpus, tokenizer, path).train) == 270


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 1},
        {"n_train": -1},
        {"n_train": "3"},
        {"val_bytes": None},
        {"extra": 1},
        {"weighted": 1},
    ],
)
def test_a_damaged_header_is_refused(path, changes):
    prepare_tokens(Corpus.of(["abc"]), ByteTokenizer(), path)
    patch_header(path, **changes)
    refusal(path, ByteTokenizer())


def test_unreadable_headers_and_absent_files(path):
    assert "no token file" in refusal(path, ByteTokenizer())
    prepare_tokens(Corpus.of(["abc"]), ByteTokenizer(), path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"format"', b'"format'))
    assert "damaged" in refusal(path, ByteTokenizer())
    path.write_bytes(content.replace(MAGIC, b"x" * len(MAGIC)))
    assert "not a token file" in refusal(path, ByteTokenizer())


def test_another_kind_of_file_is_never_overwritten(tmp_path):
    (tmp_path / "novel.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is not a token file"):
        prepare_tokens(Corpus.of(["abc"]), ByteTokenizer(), tmp_path / "novel.txt")
    assert (tmp_path / "novel.txt").read_text() == "years of work"
    with pytest.raises(ResourceError):
        prepare_tokens(Corpus.of(["abc"]), ByteTokenizer(), tmp_path)


def test_a_failed_write_leaves_nothing(path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="No space left"):
        prepare_tokens(Corpus.of(["abc"]), ByteTokenizer(), path)
    assert list(path.parent.iterdir()) == []


def test_a_file_cut_short_while_open_is_an_error_not_a_crash(path):
    found = prepare_tokens(Corpus.of(["abc" * 10_000]), ByteTokenizer(), path)
    batches = Batches(found.train, context_length=8, batch_size=4, seed=0)
    batches.batch(0)
    os.truncate(path, HEADER_BYTES)
    with pytest.raises(ConfigError, match=r"shrank from 34096 to 4096 bytes"):
        batches.batch(1)


class Positions(np.ndarray):
    """A huge array of which every element is its own position, shifted right by `shift` bits."""

    size, shift = 0, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index):
        return np.asarray(index) >> self.shift


def test_positions_beyond_two_to_the_31(path):
    n, step = 2**32 + 1000, 2**40
    positions = np.empty(0, np.int64).view(Positions)
    positions.size, positions.shift = n, 2
    batches = Batches(positions, context_length=4, batch_size=64, seed=0)
    starts = batches.batch(step).tokens_BT[:, 0].astype(np.int64) * 4
    assert batches.n_windows == n // 4 - 1 and (starts > 2**31).sum() > 20 and starts.max() < n
    assert len(set(starts.tolist())) == 64

    prepare_tokens(Corpus.of(["abc"]), ByteTokenizer(), path)
    patch_header(path, n_train=n, n_val=0)
    with open(path, "r+b") as file:
        file.truncate(HEADER_BYTES + n)  # sparse: takes no space
        for row, start in enumerate(starts):
            file.seek(HEADER_BYTES + int(start))
            file.write(bytes([row + 1] * 4))  # the window begins in these four
        file.seek(HEADER_BYTES + n - 3)
        file.write(b"xyz")
    found = open_tokens(path, tokenizer=ByteTokenizer())
    assert len(found.train) == n and bytes(found.train[-3:]) == b"xyz"
    batch = Batches(found.train, context_length=4, batch_size=64, seed=0).batch(step)
    assert batch.tokens_BT[:, 0].tolist() == list(range(1, 65))
