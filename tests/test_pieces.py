# SPDX-License-Identifier: Apache-2.0
"""Where long documents are cut, and which pieces are held out."""

import itertools
import re

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from jaxgpt.data import pieces as module
from jaxgpt.data.bpe import BPETokenizer, train_bpe
from jaxgpt.data.pieces import HoldOut, pieces

GPT4 = (  # cl100k_base of tiktoken, openai_public.py
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PROSE = "Die Würde, 1234 ...\n\n  don't \n of\t man.\nIs it so?! (no)\r\n x\n\n\ny\u2028 z "


@pytest.fixture
def short(monkeypatch):
    """Pieces of 4 to 8 characters."""
    monkeypatch.setattr(module, "PIECE", 4)
    monkeypatch.setattr(module, "LONGEST", 8)


@pytest.mark.parametrize(
    ("text", "found"),
    (
        ("", []),
        ("ab\ncd", ["ab\ncd"]),
        ("abcdefgh", ["abcdefgh"]),
        ("abcdefghi", ["abcdefgh", "i"]),
        ("ab cd\nef gh", ["ab cd\n", "ef gh"]),  # the end of a line before a space
        ("ab cd ef gh", ["ab cd", " ef gh"]),
        ("abcde\n\nfgh", ["abcde\n\nf", "gh"]),  # not beside an empty line
        ("abcde\n\nf gh", ["abcde\n\nf", " gh"]),
        ("a b  c  d e", ["a b  c", "  d e"]),
        ("       \n       \n", ["       \n", "       \n"]),
    ),
)
def test_where_documents_are_cut(short, text, found):
    assert list(pieces([text])) == found


@given(st.text(" \nab.", max_size=200), st.lists(st.integers(0, 200)))
def test_blocks_make_no_difference(text, cuts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 4)
        patch.setattr(module, "LONGEST", 8)
        bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
        blocks = [text[a:b] for a, b in itertools.pairwise(bounds)]
        found = list(pieces(blocks))
        assert found == list(pieces([text])) and "".join(found) == text
        assert all(1 <= len(piece) <= 8 for piece in found)
        assert all(len(piece) >= 4 for piece in found[:-1])


def gpt4_like() -> BPETokenizer:
    made = train_bpe([PROSE * 3], 330)
    split = pre_tokenizers.Split(tokenizers.Regex(GPT4), "isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])  # type: ignore
    return BPETokenizer(made)


@pytest.mark.parametrize("kind", ("gpt2", "gpt4"))
def test_ids_of_pieces_are_those_of_the_whole(kind, monkeypatch):
    tokenizer = gpt4_like() if kind == "gpt4" else BPETokenizer(train_bpe([PROSE * 3], 330))
    rng = np.random.default_rng(0)
    words = re.split("(?<= )|(?<=\n)", PROSE)
    for size in range(4, 40):
        monkeypatch.setattr(module, "PIECE", size)
        monkeypatch.setattr(module, "LONGEST", size + 60)
        text = "".join(rng.choice(words, 200))
        found = list(pieces([text]))
        assert len(found) > 4 and max(map(len, found)) < size + 60, "a place was not found"
        ids = np.concatenate([tokenizer.encode(piece) for piece in found])
        assert np.array_equal(ids, tokenizer.encode(text)), found


@pytest.mark.parametrize("fraction", (0.5, 0.3, 0.1, 0.001, 0.999))
def test_of_every_group_of_pieces_the_same_share_is_held_out(fraction):
    held = np.array([HoldOut(fraction)(i) for i in range(10_000)])
    assert held.sum() == round(10_000 * fraction)
    counts = held[:9_990].reshape(-1, 90).sum(1)
    assert abs(counts - 90 * fraction).max() <= 1.5
    if fraction == 0.1:
        assert (held.reshape(-1, 10).sum(1) == 1).all()
        assert len(set(np.flatnonzero(held) % 10)) == 10  # which one is not always the same


def test_extreme_shares():
    assert not any(map(HoldOut(1e-12), range(1_000))) or not all(map(HoldOut(1e-12), range(9)))
    assert sum(map(HoldOut(1 - 1e-12), range(1_000))) >= 999
