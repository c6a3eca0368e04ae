# SPDX-License-Identifier: Apache-2.0
"""Control tokens: which they are, how their text in a message stays text, how they are found.

A control token is an added token that its tokenizer.json calls special, or whose name stands
between bars (`<|user|>`; some tokenizers forget to call those special). Other added tokens, such as
runs of spaces or `<think>`, are vocabulary like any other.

What comes from messages is marked before a template sees it: around whole control tokens, and at an
end where the first or last part of one could be completed by what stands beside it. Marks are
noncharacters of Unicode; text that is between them is never a control token, and they are gone
before encoding. So a template works on what messages really say, and where they say nothing of this
kind, on their very characters.

Left out: the templates (`chat.py`), and ids of plain text (`bpe.py`).
"""

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import AddedToken

from jaxgpt.errors import ConfigError

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # around what is text, whatever it looks like
ANSWER, END_ANSWER = "\ufdd2", "\ufdd3"  # `chatworker.py` puts them around answers
MARKS = OPEN + CLOSE + ANSWER + END_ANSWER
BARS = re.compile("<[|\uff5c].+[|\uff5c]>", re.DOTALL)


class Piece(NamedTuple):
    """A part of a rendered text.

    Attributes:
      start: Its first character's position in the text, marks not counted.
      text: What it is, without marks.
      token: The control token that it is, or None for plain text.
    """

    start: int
    text: str
    token: int | None


def is_control(token: AddedToken) -> bool:
    """Whether an added token steers, rather than says something."""
    return token.special or BARS.fullmatch(token.content) is not None


class Controls:
    """The control tokens of one tokenizer.

    Args:
      added: Its added tokens by id.
    """

    def __init__(self, added: Mapping[int, AddedToken]):
        self._tokens = {id: token for id, token in added.items() if is_control(token)}
        self._id_of = {token.content: id for id, token in self._tokens.items()}
        self.ids = frozenset(self._tokens)

    def name(self, id: int) -> str:
        """The text that a control token shows as."""
        return self._tokens[id].content

    def mark(self, value: Any) -> Any:
        """Marks what could act as a control token in a text, or in all texts of lists and dicts.

        Raises:
          ConfigError: A text with U+FDD0..U+FDD3 in it.
        """
        if isinstance(value, dict):
            return {key: self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return self._mark(value) if isinstance(value, str) else value

    def pieces(self, text: str) -> list[Piece]:
        """Cuts a text, marked or not, at its control tokens, as the `tokenizers` library does."""
        found: list[Piece] = []
        plain, position, last = "", 0, 0

        def end_plain() -> int:
            if plain:
                found.append(Piece(position, plain, None))
            return position + len(plain)

        for match in self._finder.finditer(text):
            plain += text[last : match.start()] + (match["hidden"] or "")
            last = match.end()
            if control := match["control"]:
                position = end_plain()
                id = self._id_of.get(control)
                id = self._id_of[control.strip()] if id is None else id
                found.append(Piece(position, control, id))
                plain, position = "", position + len(control)
        plain += text[last:]
        end_plain()
        return found

    def _mark(self, text: str) -> str:
        for mark in MARKS:
            if mark in text:
                raise ConfigError(
                    f"a message holds U+{ord(mark):04X}, a noncharacter that marks control tokens",
                    fix="leave it out",
                )
        marked = self._names.sub(f"{OPEN}\\g<0>{CLOSE}", text)
        heads, tails, longest = self._parts
        sizes = range(1, min(longest, len(text) + 1))
        opens = any(text[:n] in tails for n in sizes)
        closes = any(text[-n:] in heads for n in sizes)
        return OPEN * opens + marked + CLOSE * closes

    @cached_property
    def _parts(self) -> tuple[set[str], set[str], int]:
        """What a control token can begin with and end in, and the length of the longest."""
        names = list(self._id_of)
        heads = {name[:n] for name in names for n in range(1, len(name))}
        tails = {name[n:] for name in names for n in range(1, len(name))}
        return heads, tails, max(map(len, names), default=0)

    @cached_property
    def _names(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._longest_first())) or "(?!)")

    @cached_property
    def _finder(self) -> re.Pattern[str]:
        names = "|".join(self._pattern(name) for name in self._longest_first()) or "(?!)"
        hidden = f"{OPEN}(?P<hidden>{self._names.pattern}){CLOSE}"
        return re.compile(f"{hidden}|[{MARKS}]|(?P<control>{names})")

    def _longest_first(self) -> Iterator[str]:
        return iter(sorted(self._id_of, key=lambda name: (-len(name), name)))

    def _pattern(self, name: str) -> str:
        """A token's own flags: it may take white space beside it, or be no part of a word."""
        token = self._tokens[self._id_of[name]]
        pattern = re.escape(name)
        if token.single_word:
            pattern = rf"(?<!\w){pattern}(?!\w)"
        return r"\s*" * token.lstrip + pattern + r"\s*" * token.rstrip


def unmarked(text: str, position: int) -> int:
    """A position in a marked text, as one in the text without marks."""
    return position - sum(text.count(mark, 0, position) for mark in MARKS)
