# SPDX-License-Identifier: Apache-2.0
"""Byte pair encoding, trained here or read from any tokenizer.json, by the `tokenizers` library.

The library merges; this file trains it, cuts long texts for it, and decodes by bytes.

Left out: chat templates, and tokenizers whose decoding has no exact inverse (WordPiece, CTC).
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int32
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxgpt.data.base import Stored, to_bytes
from jaxgpt.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
# Names that public tokenizers give to the end of a document; the first match wins.
END_NAMES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
CHUNK = 1 << 16  # characters of a chunk; BATCH chunks are worked on in parallel
BATCH = 64
BOUNDARY = re.compile(r"(?<=\S)(?=[ \n])")
# As the library writes it down: GPT-2's regular expression, no space put in front.
GPT2_SPLITTING = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


class BPETokenizer(Stored):
    """A tokenizer of the `tokenizers` library: byte-level, or sentencepiece-style.

    Args:
      source: The library's tokenizer, or the text of a tokenizer.json.

    Raises:
      ConfigError: Not a tokenizer, ids that are missing or shared, a decoder without an inverse.
    """

    def __init__(self, source: tokenizers.Tokenizer | str):
        content = source if isinstance(source, str) else source.to_str()
        try:
            self._hf = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises nothing more specific
            raise ConfigError(f"not a tokenizer.json: {error}") from None
        self._hf.no_truncation()
        self._hf.no_padding()
        self._hf.encode_special_tokens = True  # a control token's name in a text stays text
        vocabulary = self._hf.get_vocab(with_added_tokens=True)
        super().__init__(content, "bpe", len(vocabulary))
        names = {token: name for name, token in vocabulary.items()}
        if set(names) != set(range(self.vocab_size)) or not names:
            missing = next((i for i in range(self.vocab_size) if i not in names), 0)
            raise ConfigError(
                f"the ids of a vocabulary must be 0, 1, 2, ... once each: {self.vocab_size} tokens "
                f"have {len(names)} different ids, and none has id {missing}"
            )
        config = json.loads(self._hf.to_str())  # every field, in today's spelling
        piece_bytes, self._drops_space = piece_decoder(config["decoder"])
        added = self._hf.get_added_tokens_decoder()
        self._special = {token for token in added if added[token].special}
        self._pieces = [
            names[i].encode() if i in added else piece_bytes(names[i])
            for i in range(self.vocab_size)
        ]
        self._sizes = np.array([len(piece) for piece in self._pieces], np.int32)
        ends = (vocabulary.get(name) for name in END_NAMES)
        self.eot_id = next((token for token in ends if token in self._special), None)
        self._keeps_bytes = (
            config["normalizer"] is None and config["decoder"]["type"] == "ByteLevel"
        )
        self._may_cut = (
            self._keeps_bytes
            and config["pre_tokenizer"] == GPT2_SPLITTING
            and added.keys() == self._special
        )

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Ids by the lowest-ranked merge first; special tokens are neither parsed nor added.

        Raises:
          ConfigError: A lone surrogate, or bytes for which a foreign vocabulary has no token.
        """
        n_bytes = len(to_bytes(text))
        parts = chunks(text) if self._may_cut else iter([text])
        ids = [np.zeros(0, np.int32)]
        while batch := list(islice(parts, BATCH)):
            encodings = self._hf.encode_batch_fast(batch, add_special_tokens=False)
            ids += [np.array(encoding.ids, np.int32) for encoding in encodings]
        ids = np.concatenate(ids)
        if self._keeps_bytes and (kept := int(self._sizes[ids].sum())) < n_bytes:
            raise ConfigError(
                f"this tokenizer has no token for {n_bytes - kept} of the text's {n_bytes} bytes",
                fix="--data.tokenizer=bpe trains one that has all 256",
            )
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The pieces as text, special tokens included."""
        text = b"".join([self._pieces[i] for i in self._in_range(ids)]).decode(errors="replace")
        return text.removeprefix(" ") if self._drops_space else text

    def token_bytes(self, token: int) -> bytes:
        """The piece's bytes; the `▁` of sentencepiece counts as a space."""
        return b"" if token in self._special else self._pieces[token]


def train_bpe(documents: Sequence[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Trains a byte-level BPE with GPT-2's splitting and GPT-2's order of ids.

    Ids 0..255 are the bytes, then come the merges, and `<|endoftext|>` is last. The most frequent
    pair merges first; of equally frequent pairs the one with the smallest ids. The result depends
    on the text alone, not on hash seeds or the number of threads.

    Args:
      documents: The texts.
      vocab_size: Ids, all included; a small text may run out of pairs before.

    Raises:
      ConfigError: `vocab_size` is below 257.
    """
    if vocab_size < 257:
        raise ConfigError(
            f"vocab_size={vocab_size} is below 257 (256 bytes and {END_OF_TEXT})",
            fix="--data.vocab_size=257 or more",
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in documents for part in chunks(text)), trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def chunks(text: str) -> Iterator[str]:
    """Cuts a text where GPT-2's splitting always cuts: between a visible character and a space."""
    start = 0
    while start < len(text):
        match = BOUNDARY.search(text, start + CHUNK)
        end = match.start() if match else len(text)
        yield text[start:end]
        start = end


def piece_decoder(config: dict[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    """Reads how a tokenizer.json decodes.

    Args:
      config: Its `decoder`.

    Returns:
      A function from one piece of the vocabulary to its bytes, and whether decoding drops the space
      that encoding put before the text.

    Raises:
      ConfigError: A decoder that cannot be undone exactly.
    """
    steps = (config or {}).get("decoders", [config or {"type": "nothing"}])
    kinds = {step["type"] for step in steps}
    spaces: list[str] = []
    drops_space = False
    for step in steps:
        match step:
            case {"type": "ByteLevel" | "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": mark}, "content": " "}:
                spaces.append(mark)
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                spaces.append(mark)
                drops_space = scheme != "never"
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                drops_space = True
            case _:
                raise ConfigError(f"a tokenizer.json whose decoder is {step} has no exact inverse")

    def piece_bytes(piece: str) -> bytes:
        if "ByteLevel" in kinds:
            return bytes(BYTE_OF[char] for char in piece)
        if "ByteFallback" in kinds and re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes.fromhex(piece[3:5])
        for mark in spaces:
            piece = piece.replace(mark, " ")
        return piece.encode()

    return piece_bytes, drops_space


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (`bytes_to_unicode` in openai/gpt-2 src/encoder.py)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


BYTE_OF = _byte_alphabet()
