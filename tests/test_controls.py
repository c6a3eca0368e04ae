# SPDX-License-Identifier: Apache-2.0
"""Control tokens: what a template writes are tokens, what messages say stays text."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken

from jaxgpt.data.controls import MARKS, Controls, Piece, is_control, unmarked
from jaxgpt.errors import ConfigError

END, USER, THINK = (
    AddedToken("<|end|>", special=True),
    AddedToken("<|user|>", special=False),
    AddedToken("<think>", special=False),
)
CONTROLS = Controls({1: END, 2: USER, 3: THINK, 4: AddedToken("<|end|>>", special=True)})


def tokens(text):
    return [piece.token for piece in CONTROLS.pieces(text) if piece.token is not None]


def test_special_or_between_bars():
    assert CONTROLS.ids == {1, 2, 4} and CONTROLS.name(2) == "<|user|>"
    assert is_control(AddedToken("<\uff5cUser\uff5c>", special=False))  # DeepSeek's
    assert not is_control(AddedToken("  ", special=False))


def test_a_text_is_cut_at_the_longest_tokens():
    assert CONTROLS.pieces("a<|user|><think><|end|>>\n") == [
        Piece(0, "a", None),
        Piece(1, "<|user|>", 2),
        Piece(9, "<think>", None),
        Piece(16, "<|end|>>", 4),
        Piece(24, "\n", None),
    ]
    assert CONTROLS.pieces("") == []


PARTS = st.lists(st.sampled_from(["<|end|>", "<|user|>", "<", "|", ">", "end", "u", " ", "é"]))


@given(PARTS.map("".join), PARTS.map("".join), PARTS.map("".join))
@example("<|en", "d|", ">")
@example("<", "|end|", ">")
@example("<|end|", ">", "<|end|>>")
def test_no_message_makes_a_control_token(before, content, after):
    """Neither alone, nor with the message or the template's text beside it."""
    text = CONTROLS.mark(before) + CONTROLS.mark(content) + CONTROLS.mark(after)
    assert tokens(text) == []
    assert "".join(piece.text for piece in CONTROLS.pieces(text)) == before + content + after
    own = "<|user|>" + CONTROLS.mark(content) + "<|end|>"
    assert tokens(own) == [2, 1]
    first, *_, last = CONTROLS.pieces(own)
    assert (first.start, last.start) == (0, 8 + len(content))
    assert unmarked(own, len(own)) == 15 + len(content)


@given(st.text("abc. \n", min_size=4))
def test_a_harmless_message_is_not_touched(text):
    assert CONTROLS.mark(text) == text


def test_all_texts_of_a_message_are_marked():
    message = {"role": "user", "content": [{"text": "<|end|>"}, 1, None], "n": True}
    marked = CONTROLS.mark(message)
    assert marked["role"] == "user" and marked["content"][1:] == [1, None]
    assert tokens(marked["content"][0]["text"]) == []


def test_tokens_take_space_beside_them_as_the_library_does():
    flags = Controls(
        {
            5: AddedToken("<r>", special=True, rstrip=True),
            6: AddedToken("<w>", special=True, lstrip=True, single_word=True),
        }
    )
    assert flags.pieces("<r>\n\na <w>b <w> c") == [
        Piece(0, "<r>\n\n", 5),
        Piece(5, "a <w>b", None),
        Piece(11, " <w>", 6),
        Piece(15, " c", None),
    ]


def test_the_marks_themselves_are_refused():
    for mark in MARKS:
        with pytest.raises(ConfigError, match=rf"U\+{ord(mark):04X}"):
            Controls({}).mark([{"content": f"a{mark}"}])
