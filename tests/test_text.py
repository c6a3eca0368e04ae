# SPDX-License-Identifier: Apache-2.0
import json

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.data.tokenizer import ByteTokenizer, CharTokenizer, load_folder_tokenizer
from jaxgpt.errors import ConfigError
from jaxgpt.model import init_params
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.generate import Chunk
from jaxgpt.sample.text import StopStrings, start_ids, stream_text
from jaxgpt.testing import tiny


def cut(pieces, stops) -> str:
    stop = StopStrings(stops)
    return "".join([stop.push(piece) for piece in pieces] + [stop.flush()])


@pytest.mark.parametrize(
    "pieces, stops, text",
    [
        (["one. tw", "o"], ["."], "one"),
        (["on", "e<", "en", "d>two"], ["<end>"], "one"),
        (["one<en", "d"], ["<end>"], "one<end"),
        (["aaab"], ["aab"], "a"),
        (["abc", "d"], ["abcd", "c"], "ab"),  # "c" is complete first
        (["xab"], ["b", "ab"], "x"),  # complete together: the longer
        (["one", ""], [], "one"),
        (["stop"], ["stop"], ""),
    ],
)
def test_text_ends_before_the_first_stop_string(pieces, stops, text):
    assert cut(pieces, stops) == text


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4)), st.data())
def test_pieces_do_not_matter(text, stops, data):
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)]
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    assert cut(pieces, stops) == (text[: min(ends)[1]] if ends else text)


def test_nothing_is_held_back_without_need():
    stop = StopStrings(["xyz"])
    assert [stop.push(c) for c in "axybxyz!"] == ["a", "", "", "xyb", "", "", "", ""]
    assert stop.found and stop.push("more") == "" and stop.flush() == ""
    with pytest.raises(ConfigError, match="empty stop string"):
        StopStrings(["a", ""])


class WithEnd(CharTokenizer):
    """Characters, the last of them the end of text."""

    def __init__(self, chars: str):
        super().__init__(chars)
        self.eot_id = self.vocab_size - 1


CHARS = "\nabcdefg"


@pytest.fixture(scope="module")
def model():
    cfg = tiny()
    tokenizer = CharTokenizer("".join(chr(97 + i) for i in range(cfg.vocab_size - 1)) + "\n")
    return cfg, init_params(cfg, jax.random.key(0)), tokenizer


def texts(model, prompt, **options):
    found = [""] * options.get("samples", 1)
    ends = []
    for piece in stream_text(*model, prompt, max_new_tokens=12, **options):
        assert piece.sample not in ends, "nothing comes after the last piece"
        found[piece.sample] += piece.text
        ends += [piece.sample] * piece.last
    assert sorted(ends) == list(range(len(found)))
    return found


def test_samples_side_by_side_are_those_of_each_alone(model):
    three = texts(model, "ab", samples=3, seed=5)
    assert len(set(three)) == 3 and all(len(text) == 12 for text in three)
    assert texts(model, "ab", seed=5) == three[:1]
    assert texts(model, "ab", samples=3, seed=6) != three


def test_stop_strings_and_end_of_text_are_not_shown(model):
    cfg, params, tokenizer = model
    (whole,) = texts(model, "ab", seed=1)
    stop = whole[5:7]
    (short,) = texts(model, "ab", seed=1, stop=(stop,))
    assert short == whole[: whole.index(stop)]
    ending = WithEnd(tokenizer.decode(range(tokenizer.vocab_size)))
    last = ending.decode([ending.eot_id])
    many = texts((cfg, params, ending), "ab", samples=8, seed=2, sampling=Sampling(temperature=3.0))
    assert not any(last in text for text in many)
    assert any(len(text) < 12 for text in many), "one of eight ends early"


def test_an_empty_prompt(model):
    ending = WithEnd(CHARS)
    assert start_ids(ending) == [ending.eot_id]
    assert start_ids(CharTokenizer(CHARS)) == [0] and CharTokenizer(CHARS).decode([0]) == "\n"
    assert start_ids(CharTokenizer("xyz")) == [0]
    assert start_ids(ByteTokenizer()) == [10]
    assert texts(model, "", seed=3) == texts(model, "\n", seed=3)


class WithRules(CharTokenizer):
    """Characters, of which some begin or end a text, as of a pretrained model."""

    begin_ids: tuple[int, ...] = (3,)
    bos_id = 5
    end_ids = (1, 2)


def test_a_prompt_stands_behind_what_begins_every_text(model):
    cfg, params, plain = model
    rules = WithRules(plain.decode(range(plain.vocab_size)))
    ids = [3, *plain.encode("ab").tolist()]
    greedy = {"sampling": Sampling(temperature=0.0)}
    (whole,) = texts((cfg, params, plain), ids, **greedy)
    (text,) = texts((cfg, params, rules), "ab", **greedy)
    ends = [whole.find(end) for end in rules.decode([1, 2]) if end in whole]
    assert text == whole[: min(ends, default=len(whole))]
    assert texts((cfg, params, rules), ids, **greedy) == [text], "ids are taken as they are"
    many = texts((cfg, params, rules), "ab", samples=8, seed=2, sampling=Sampling(temperature=3.0))
    assert not any(end in text for text in many for end in rules.decode([1, 2]))
    assert any(len(text) < 12 for text in many)


def test_what_an_empty_prompt_begins_with():
    rules = WithRules(CHARS)
    assert start_ids(rules) == [3]
    rules.begin_ids = ()
    assert start_ids(rules) == [5]
    rules.bos_id, rules.eot_id = None, 7
    assert start_ids(rules) == [7]


def test_an_empty_prompt_of_a_sentencepiece_tokenizer(shared, monkeypatch):
    """The text that a model writes from BOS begins without the space of its first word."""
    folder = shared / "data" / "stories260k"
    tokenizer = load_folder_tokenizer(folder)
    reference = json.loads((folder / "reference.json").read_text())
    bos, *ids = reference["greedy_from_bos_ids"]
    assert start_ids(tokenizer) == [bos]

    def model(cfg, params, prompts, *, stop_ids, until, **_):
        assert prompts == [[bos]] and stop_ids == (2,)
        array = np.array([ids])
        yield Chunk(array, array * 0.0, np.array([len(ids)]), np.array([True]))

    monkeypatch.setattr("jaxgpt.sample.text.stream", model)
    pieces = stream_text(tiny(), {}, tokenizer, "")
    assert "".join(piece.text for piece in pieces) == reference["greedy_text"]


def test_prompts_that_cannot_be(model):
    with pytest.raises(ConfigError, match=r"'é' \(U\+00E9\)"):
        texts(model, "é")
    with pytest.raises(ConfigError, match="not valid UTF-8"):
        texts(model, "a\udcffb")
    with pytest.raises(ConfigError, match="num_samples=0"):
        texts(model, "a", samples=0)
