# SPDX-License-Identifier: Apache-2.0
import json

import numpy as np
import pytest

from jaxgpt.data.base import Stored, begin_ids, end_ids
from jaxgpt.data.bpe import train_bpe
from jaxgpt.data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    load_folder_tokenizer,
)
from jaxgpt.errors import ConfigError
from jaxgpt.interop.tokenfiles import same_tokens, token_files

TEXT = "the quick  brown fox,\r\n\tand “漢字” 🙂\n" * 3


def bpe():
    return BPETokenizer(train_bpe([TEXT], 280))


def written(tokenizer, folder, **keys):
    files, said = token_files(tokenizer, 64)
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "config.json").write_text(json.dumps(said | keys))
    return load_folder_tokenizer(folder)


@pytest.mark.parametrize("make", [lambda: CharTokenizer(TEXT), ByteTokenizer, bpe])
def test_our_tokenizers_come_back(tmp_path, make):
    tokenizer = make()
    back = written(tokenizer, tmp_path)
    assert same_tokens(back, tokenizer)
    np.testing.assert_array_equal(back.encode(TEXT), tokenizer.encode(TEXT))
    assert back.decode(back.encode(TEXT)) == TEXT
    assert (begin_ids(back), end_ids(back)) == ((), end_ids(tokenizer))


def test_a_character_without_an_id_is_an_error_not_dropped(tmp_path):
    back = written(CharTokenizer("ab"), tmp_path)
    for encode in (back.encode, back.encode_on, back.encode_controls):
        with pytest.raises(ConfigError, match="parts for which there is no token"):
            encode("axb")


def test_where_texts_end(tmp_path):
    files, keys = token_files(bpe(), 64)
    assert keys == {"bos_token_id": 279, "eos_token_id": 279, "pad_token_id": None}
    generation = json.loads(files["generation_config.json"])
    assert generation == {"_from_model_config": True, "bos_token_id": 279, "eos_token_id": 279}
    config = json.loads(files["tokenizer_config.json"])
    assert config["eos_token"] == "<|endoftext|>" and config["model_max_length"] == 64
    files, keys = token_files(None, 64)
    assert set(keys.values()) == {None} and list(files) == ["generation_config.json"]


def test_files_of_a_public_model_stay_as_they_are(shared, tmp_path):
    folder = shared / "data" / "stories260k"
    tokenizer = load_folder_tokenizer(folder)
    back = written(tokenizer, tmp_path)
    assert same_tokens(back, tokenizer) and begin_ids(back) == begin_ids(tokenizer) != ()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (folder / name).read_text()


def test_a_chat_template_goes_along(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = written(bpe(), tmp_path)
    files, _ = token_files(tokenizer, 64)
    assert files["chat_template.jinja"] == "{{ messages[0].content }}"
    assert "config.json" not in files


def test_several_ends(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 279]}')
    (tmp_path / "tokenizer.json").write_text(bpe().content)
    tokenizer = load_folder_tokenizer(tmp_path)
    assert token_files(tokenizer, 64).keys["eos_token_id"] == [3, 279]


def test_another_kind_is_refused():
    class Mine(Stored):
        def encode(self, text):
            return np.zeros(0, np.int32)

        def decode(self, ids):
            return ""

        def token_bytes(self, token):
            return b""

    with pytest.raises(ConfigError, match=r"kind 'morse' cannot be written as tokenizer\.json"):
        token_files(Mine("{}", "morse", 2), 64)


def test_other_tokens_are_seen():
    assert not same_tokens(CharTokenizer("ab"), CharTokenizer("abc"))
    assert not same_tokens(CharTokenizer("ab"), CharTokenizer("ac"))
