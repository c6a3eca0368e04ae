# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of the `tokenizers` library that need care; test_tokenizer.py has the common ones."""

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxgpt.data.bpe import BPETokenizer
from jaxgpt.data.tokenizer import StreamDecoder
from jaxgpt.errors import ConfigError


def stream(tokenizer, ids) -> str:
    decoder = StreamDecoder(tokenizer)
    return "".join(map(decoder.push, ids)) + decoder.flush()


def test_a_control_token_made_of_plain_text_is_refused():
    """A vocabulary whose merges end in a control token: a prompt could speak for the template."""
    hf = Library(models.BPE({"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4}, [("<", "s"), ("<s", ">")]))
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(["<s>"])
    tokenizer = BPETokenizer(hf)
    assert tokenizer.encode("s<").tolist() == [1, 0]
    for encode in (tokenizer.encode, tokenizer.encode_on):
        with pytest.raises(ConfigError, match="makes a control token of the text '<s>'"):
            encode("s<s>")
    assert tokenizer.encode_controls("s<s>").tolist() == [1, 4]


def test_words_that_end_in_spaces():
    """GPT-1's: a space follows every word but the last."""
    vocabulary = {"<unk>": 0, "h": 1, "i</w>": 2, "hi</w>": 3, "a</w>": 4, "h</w>": 5, "i": 6}
    hf = Library(
        models.BPE(vocabulary, [("h", "i</w>")], unk_token="<unk>", end_of_word_suffix="</w>")
    )
    hf.normalizer = normalizers.BertNormalizer(lowercase=True)
    hf.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    hf.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer = BPETokenizer(hf)
    ids = tokenizer.encode("Hi  a hi").tolist()
    assert ids == [3, 4, 3]
    for some in (ids, [3], [], [1, 2, 0, 4], [3, 1, 6]):
        assert tokenizer.decode(some) == stream(tokenizer, some) == hf.decode(some)
    assert tokenizer.decode(ids) == "hi a hi"
