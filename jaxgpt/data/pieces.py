# SPDX-License-Identifier: Apache-2.0
"""Documents in pieces: where a long one is cut, and which pieces are held out for validation.

A document of more than `LONGEST` characters is cut into pieces of `PIECE` to `LONGEST`, each of
which is encoded on its own. The first of these places from `PIECE` on is taken:

1. behind a newline that stands between two visible characters (an end of a line);
2. before a space behind a visible character;
3. after `LONGEST` characters, wherever that is.

At 1 and 2 the pre-tokenizers of byte-level BPE (GPT-2's, GPT-4's and their like) cut as well, so
that the ids of the pieces in a row are those of the whole; at 3 a word may be spelled otherwise.

The end of a stream is not known while it is read, so what is held out is not its last part: of
every `1 / val_fraction` pieces in a row one is, which of them says a hash of the group's number.

Left out: where documents come from (`streams.py`, `prepare.py`).
"""

from collections.abc import Iterable, Iterator
from fractions import Fraction

PIECE = 1 << 16
LONGEST = 2 * PIECE
SMALLEST = 1e-6  # share that can be held out, or left


def pieces(blocks: Iterable[str]) -> Iterator[str]:
    """Cuts one document by the module's rule; how it comes in blocks makes no difference.

    Args:
      blocks: The document's text, in a row.

    Yields:
      Its pieces, none of them empty.
    """
    waiting: list[str] = []
    n_waiting = 0
    for block in blocks:
        waiting.append(block)
        n_waiting += len(block)
        if n_waiting > 4 * LONGEST:
            text, start = "".join(waiting), 0
            while len(text) - start > LONGEST:
                end = _cut(text, start)
                yield text[start:end]
                start = end
            waiting, n_waiting = [text[start:]], len(text) - start
    text, start = "".join(waiting), 0
    while start < len(text):
        end = _cut(text, start) if len(text) - start > LONGEST else len(text)
        yield text[start:end]
        start = end


def _cut(text: str, start: int) -> int:
    low, high = start + PIECE, start + LONGEST
    for mark, behind in (("\n", 1), (" ", 0)):
        place = text.find(mark, low, high - 1)
        while place >= 0:
            around = text[place - 1] + text[place + 1] * behind
            if not any(map(str.isspace, around)):
                return place + behind
            place = text.find(mark, place + 1, high - 1)
    return high


class HoldOut:
    """Which pieces are for validation, by their numbers.

    Args:
      fraction: Share of the pieces, 0 < f < 1.
    """

    def __init__(self, fraction: float):
        within = min(max(fraction, SMALLEST), 1 - SMALLEST)
        exact = Fraction(within).limit_denominator(round(1 / SMALLEST))
        self._held, self._of = exact.numerator, exact.denominator

    def __call__(self, number: int) -> bool:
        """Whether the piece of this number, counted from 0 over all documents, is held out."""
        group = number * self._held // self._of
        first, end = (-(-g * self._of // self._held) for g in (group, group + 1))
        return number == first + _mix(group) % (end - first)


def _mix(number: int) -> int:
    """SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    mask = (1 << 64) - 1
    x = (number + 1) * 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31
