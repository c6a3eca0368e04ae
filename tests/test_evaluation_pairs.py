# SPDX-License-Identifier: Apache-2.0
import pytest

from jaxgpt.data.bpe import BPETokenizer, train_bpe
from jaxgpt.data.pretrained import load_folder_tokenizer
from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.errors import ConfigError
from jaxgpt.study.evaluation.pairs import encode, encode_pair

TOKENIZER = BPETokenizer(train_bpe(["the cat sat on the mat, the cat sat " * 9], 280))


def text(ids):
    return TOKENIZER.decode(ids)


def test_spaces_belong_to_the_word_behind_them():
    context, word = encode_pair(TOKENIZER, "the cat sat on the", " cat")
    assert (text(context), text(word)) == ("the cat sat on the", " cat") and len(word) == 1
    for same in (("the cat sat on the ", "cat"), ("the cat sat on the", " cat")):
        assert encode_pair(TOKENIZER, *same) == (context, word)
    assert context + word == encode(TOKENIZER, "the cat sat on the cat")


def test_words_are_spelled_as_in_running_text():
    start, end = "the cat s", "at on the mat"  # " sat" is one token, which neither of them has
    context, rest = encode_pair(TOKENIZER, start, end)
    assert context == encode(TOKENIZER, start)
    assert rest == encode(TOKENIZER, start + end)[len(context) :]
    with pytest.raises(ConfigError, match="'at' behind 'the c' has no token of its own"):
        encode_pair(TOKENIZER, "the c", "at")


def test_an_empty_context_is_the_end_of_a_text():
    for context in ("", "  "):
        begin, ids = encode_pair(TOKENIZER, context, "the cat")
        assert begin == [TOKENIZER.eot_id] and text(ids) == context + "the cat"
    begin, ids = encode_pair(TOKENIZER, "", "<|endoftext|>the cat")
    assert begin == [TOKENIZER.eot_id] and text(ids) == "the cat", "it has one already"
    assert encode_pair(ByteTokenizer(), "", "ab") == ([10], [97, 98])


def test_names_of_control_tokens_are_these_tokens():
    assert encode(TOKENIZER, "<|endoftext|>") == [TOKENIZER.eot_id]
    assert encode(TOKENIZER, "") == []


def test_what_stands_before_every_text_stands_before_contexts(shared):
    tokenizer = load_folder_tokenizer(shared / "data" / "stories260k")
    context, word = encode_pair(tokenizer, "Once upon a", " time")
    assert context[0] == 1 == tokenizer.bos_id and context.count(1) == 1
    assert context + word == [1, *encode(tokenizer, "Once upon a time")]
    assert encode_pair(tokenizer, "", "Once")[0] == [1]


def test_a_continuation_without_a_token():
    with pytest.raises(ConfigError, match="'' behind 'the' has no token of its own"):
        encode_pair(TOKENIZER, "the", "")
