# SPDX-License-Identifier: Apache-2.0
"""Detokenisers undo what the tokenizers of the data sets do, which is written here once more."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.study.evaluation.detokenise import (
    childrens_books,
    one_billion_words,
    penn_treebank,
    wikitext,
)

WIKITEXT = [
    (" = Robert <unk> = \n", "= Robert <unk> =\n"),
    (" \n = = Career = = \n ", "\n== Career ==\n"),
    (" = = = 2000 to 2005 = = = ", "=== 2000 to 2005 ==="),
    (
        " He had a guest @-@ starring role on the series The Bill in 2000 . ",
        "He had a guest-starring role on the series The Bill in 2000.",
    ),
    (' a role as " Craig " in " Teddy \'s Story " of', 'a role as "Craig" in "Teddy\'s Story" of'),
    (" 1 @,@ 234 @.@ 5 people ( 50 % ) ; it ", "1,234.5 people (50%); it"),
    (" They didn 't know the players ' union . ", "They didn't know the players' union."),
    (" the ' first ' of <unk> 's songs ", "the 'first' of <unk>'s songs"),
    (" $ 5 and £ 6 , and / or [ 7 ] : 23 ° C ", "$5 and £6, and/or [7]: 23° C"),
]


@pytest.mark.parametrize(("stored", "natural"), WIKITEXT)
def test_wikitext(stored, natural):
    assert wikitext(stored) == natural


@pytest.mark.parametrize(
    ("undo", "stored", "natural"),
    [
        (penn_treebank, " no it was n't black monday ", "no it wasn't black monday"),
        (penn_treebank, "the traders ' $ N loss , N %", "the traders' $N loss, N%"),
        (
            one_billion_words,
            'He said : " I do n\'t know , sir . "',
            'He said: "I don\'t know, sir."',
        ),
        (one_billion_words, "It 's ( almost ) done !", "It's (almost) done!"),
        (
            childrens_books,
            "`` You -LRB- all -RRB- ca n't see it , '' said XXXXX .",
            '"You (all) can\'t see it," said XXXXX.',
        ),
    ],
)
def test_other_sets(undo, stored, natural):
    assert undo(stored) == natural


# Natural text of which nothing is lost: words, marks behind words, brackets and quotes around them.
WORD = st.sampled_from("a Bill <unk> well-known 1,234 3.5 didn't Teddy's it's N 2nd".split())
MARKED = st.builds(lambda w, m: w + m, WORD, st.sampled_from(["", "", ",", ".", ";", "?", "%"]))
PHRASE = st.lists(MARKED, min_size=1, max_size=5).map(" ".join)
WRAPPED = st.builds(
    lambda p, m: m[0] + p + m[1], PHRASE, st.sampled_from(["  ", "()", '""', "[]"])
).map(str.strip)
LINE = st.lists(WRAPPED, min_size=1, max_size=4).map(" ".join)


def stored_as_wikitext(line):
    """What WikiText's tokenizer makes of a line."""
    line = re.sub(r"(?<=\w)([-,.])(?=\w)", r" @\1@ ", line)
    line = re.sub(r"(?<=\w)('\w)", r" \1", line)
    line = re.sub(r'([(\[)\]"]|(?<!@)[,.;?%](?!@))', r" \1 ", line)
    return " " + re.sub(" +", " ", line).strip() + " "


def stored_as_treebank(line):
    """The same by the Penn Treebank's rules."""
    line = re.sub(r"(?<=\w)(n't)", r" \1", line)
    line = re.sub(r"(?<=\w)('s)", r" \1", line)
    line = re.sub(r'([()"]|[,.;?%](?!\w))', r" \1 ", line)
    return re.sub(" +", " ", line).strip()


@settings(max_examples=100, deadline=None)
@given(lines=st.lists(LINE, min_size=1, max_size=3))
def test_what_is_stored_comes_back(lines):
    assert wikitext("\n".join(map(stored_as_wikitext, lines))) == "\n".join(lines)
    plain = [line.replace("[", "").replace("]", "") for line in lines]
    stored = [stored_as_treebank(line) for line in plain]
    assert one_billion_words("\n".join(stored)) == "\n".join(plain)
    quotes = stored[0].replace("(", "-LRB-").replace(")", "-RRB-")
    assert childrens_books(quotes) == plain[0]


@settings(max_examples=50, deadline=None)
@given(text=st.text(alphabet="a.,'\"()-@=<>%s \n", max_size=40))
def test_words_and_line_ends_stay(text):
    bare = text.replace(" ", "").replace("@-@", "-").replace("@,@", ",").replace("@.@", ".")
    made = wikitext(text)
    assert re.sub("[ =@]", "", made) == re.sub("[=@]", "", bare)
    assert made.count("\n") == text.count("\n")
