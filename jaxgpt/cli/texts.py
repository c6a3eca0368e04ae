# SPDX-License-Identifier: Apache-2.0
"""Generated texts as a terminal gets them: one after the other, and without its control codes."""

import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

SEPARATOR = "-" * 40


def in_order(pieces: Iterable[Any], prompt: str, samples: int) -> Iterator[str]:
    """Whole texts one after the other, each piece of the one in turn as soon as it comes.

    Args:
      pieces: `jaxgpt.sample.text.Piece`s of samples that grow side by side.
      prompt: Stands before each text.
      samples: How many there are.
    """
    waiting: dict[int, list[Any]] = {}
    turn = 0
    yield prompt
    for piece in pieces:
        waiting.setdefault(piece.sample, []).append(piece)
        while turn in waiting:
            ready = waiting.pop(turn)
            yield "".join(each.text for each in ready)
            if not ready[-1].last:
                break
            turn += 1
            yield "\n" if turn == samples else f"\n{SEPARATOR}\n{prompt}"


def escape_controls(text: str) -> str:
    """The text with control characters spelled out, newlines and tabs excepted."""
    return "".join(
        repr(char)[1:-1] if unicodedata.category(char) == "Cc" and char not in "\n\t" else char
        for char in text
    )
