# SPDX-License-Identifier: Apache-2.0
"""A tokenizer as the files of a Hugging Face folder.

That of a public model has its files and gets them back. A BPE of ours is a tokenizer.json already;
characters and bytes are written as one that makes the same ids. Where texts begin and end goes into
config.json and generation_config.json too.
"""

import json
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxgpt.data.base import Tokenizer, begin_ids, end_ids
from jaxgpt.data.parts import BYTE_OF
from jaxgpt.data.pretrained import CONFIG, GENERATION, MODEL, TOKENIZER, PretrainedTokenizer
from jaxgpt.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from jaxgpt.errors import ConfigError


class TokenFiles(NamedTuple):
    """What a folder says of tokens.

    Attributes:
      files: Text of each file by name.
      keys: Of config.json.
    """

    files: dict[str, str]
    keys: dict[str, Any]


def token_files(tokenizer: Tokenizer | None, context_length: int) -> TokenFiles:
    """The files of a tokenizer, and a generation_config.json; of none, that alone.

    Args:
      tokenizer: One of jaxgpt's kinds.
      context_length: Of the model, in tokens.

    Raises:
      ConfigError: A tokenizer of another kind.
    """
    ends = () if tokenizer is None else end_ids(tokenizer)
    eot = None if tokenizer is None else tokenizer.eot_id
    keys = {
        "bos_token_id": getattr(tokenizer, "bos_id", eot),
        "eos_token_id": None if not ends else ends[0] if len(ends) == 1 else list(ends),
        "pad_token_id": None,
    }
    said = {key: value for key, value in keys.items() if value is not None}
    generation = {GENERATION: as_text({"_from_model_config": True, **said})}
    if tokenizer is None:
        return TokenFiles(generation, keys)
    if isinstance(tokenizer, PretrainedTokenizer):
        files = {name: text for name, text in tokenizer.files.items() if name != MODEL}
        return TokenFiles(generation | files, keys)
    text = _as_json(tokenizer)
    ending = {}
    if eot is not None:
        name = tokenizers.Tokenizer.from_str(text).id_to_token(eot)
        ending = dict.fromkeys(("bos_token", "eos_token"), name)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        **ending,
    }
    files = {TOKENIZER: text, CONFIG: as_text(config)}
    return TokenFiles(generation | files, keys)


def as_text(data: dict[str, Any]) -> str:
    """JSON as transformers writes it."""
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers have the same ids, beginnings and ends of texts."""
    if one.vocab_size != other.vocab_size or begin_ids(one) != begin_ids(other):
        return False
    ends = {*end_ids(one)} == {*end_ids(other)}
    ids = range(one.vocab_size)
    return ends and all(one.token_bytes(id) == other.token_bytes(id) for id in ids)


def _as_json(tokenizer: Tokenizer) -> str:
    """A tokenizer.json."""
    match tokenizer:
        case BPETokenizer():
            return tokenizer.content
        case CharTokenizer():
            ids = {tokenizer.decode([id]): id for id in range(tokenizer.vocab_size)}
            # A character without an id is an error, not dropped: the unknown token is not there.
            made = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="<unk>"))  # type: ignore
            one = tokenizers.Regex(r"[\s\S]")
            made.pre_tokenizer = pre_tokenizers.Split(one, "isolated")  # type: ignore
            made.decoder = decoders.Fuse()  # type: ignore
        case ByteTokenizer():
            made = tokenizers.Tokenizer(models.BPE(BYTE_OF, []))  # type: ignore
            bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            made.pre_tokenizer = bytewise  # type: ignore
            made.decoder = decoders.ByteLevel()  # type: ignore
        case _:
            raise ConfigError(
                f"a tokenizer of kind {tokenizer.kind!r} cannot be written as tokenizer.json",
                fix="export without it",
            )
    return made.to_str(pretty=True)
