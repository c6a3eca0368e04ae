# SPDX-License-Identifier: Apache-2.0
"""Text as people write it from the word lists of old data sets: what their tokenizers did, undone.

WikiText, the Penn Treebank, the One Billion Word benchmark and the Children's Book Test stand in
files with a space around every mark. A model that has read the web finds that unlikely, and so the
GPT-2 paper undid it (section 3.1). Nothing is lost but spaces, and the marks that the tokenizers
put there themselves (`@-@`, `-LRB-`): `<unk>` and `N` stay, words and their order stay, and so the
perplexity can be told per word of the original.

Left out: capital letters of the Penn Treebank and what else is gone for good.
"""

import re

CLOSING = r"[,.;:!?%)\]}]|\.\.\."
OPENING = r"[(\[{$£€#]"
CONTRACTIONS = r"'(?:s|t|m|d|re|ve|ll|S|T|M|D|RE|VE|LL)"
BOOKS = {"``": '"', "''": '"', "-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]"}


def wikitext(text: str) -> str:
    """WikiText-2 and -103: `@-@` within words, spaces around marks, `= =` around titles."""
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    lines = []
    for line in text.split("\n"):
        line = line.strip(" ")
        if title := re.fullmatch(r"((?:= )+)(.*?)((?: =)+)", line):
            marks = "=" * (len(title[1]) // 2)
            line = f"{marks} {_marks(title[2])} {marks}"
        else:
            line = _marks(line).replace(" / ", "/").replace(" ° ", "° ")
        lines.append(line)
    return "\n".join(lines)


def penn_treebank(text: str) -> str:
    """The Penn Treebank as language models know it: lower case, `N` for numbers, few marks left."""
    return "\n".join(_marks(line.strip(" ")) for line in text.split("\n"))


def one_billion_words(text: str) -> str:
    """The One Billion Word benchmark: a sentence a line, in the treebank's words."""
    return penn_treebank(text)


def childrens_books(text: str) -> str:
    """The Children's Book Test: marks as the Penn Treebank writes them (two graves, `-LRB-`)."""
    return _marks(" ".join(BOOKS.get(word, word) for word in text.split()))


def _marks(line: str) -> str:
    """One line with its marks where they belong; quotes open and close in turn."""
    line = re.sub(r"(?<=\w) (n't|N'T)\b", r"\1", line)
    line = re.sub(rf"(?<=[\w.>]) ({CONTRACTIONS})(?!\w)", r"\1", line)
    words, out = line.split(" "), []
    open_marks: set[str] = set()
    glue = True  # whether the next word stands right behind the last
    for place, word in enumerate(words):
        closes = re.fullmatch(CLOSING, word) is not None
        opens = re.fullmatch(OPENING, word) is not None
        if word == "'" and word not in open_marks and _possessive(words, place):
            closes = True  # and opens nothing
        elif word in ('"', "'"):
            closes, opens = word in open_marks, word not in open_marks
            open_marks ^= {word}
        out.append(word if glue or closes else f" {word}")
        glue = opens
    return "".join(out)


def _possessive(words: list[str], place: int) -> bool:
    """Whether a lone apostrophe ends the word before it: `the players ' union`.

    It may as well open a quotation, which another one closes: behind an s it is taken for an ending
    if there is no other, or if all the others are behind an s too.
    """
    rest = [i for i in range(place, len(words)) if words[i] == "'"]
    endings = [i > 0 and words[i - 1][-1:] in ("s", "S") for i in rest]
    return endings[0] and (len(rest) % 2 == 1 or all(endings))
