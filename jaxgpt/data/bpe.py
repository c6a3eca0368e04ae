# SPDX-License-Identifier: Apache-2.0
"""Byte pair encoding, trained here or read from any tokenizer.json, by the `tokenizers` library.

The library merges; this file trains it, cuts long texts for it, and decodes by bytes (`parts.py`).

Left out: chat templates (`pretrained.py`), and tokenizers whose decoding has no exact inverse
(WordPiece, CTC).
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int32, Int64
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxgpt.data.base import Stored, to_bytes
from jaxgpt.data.controls import Controls, Piece, is_control
from jaxgpt.data.parts import begin_ids, piece_decoder, without_space
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
CHUNK = 1 << 11  # characters of a chunk; long ones are slower. BATCH are worked on in parallel
BATCH = 1 << 10
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

    Attributes:
      begin_ids: What its tokenizer.json puts before every text (BOS). `encode` does not.
      controls: Its control tokens.
      spaces_follow: Decoding drops a space at the end of a text, not one at its beginning.

    Args:
      source: The library's tokenizer, or the text of a tokenizer.json.
      content: What `save` writes; None: the tokenizer.json.

    Raises:
      ConfigError: Not a tokenizer, ids that are missing or shared, a decoder without an inverse.
    """

    def __init__(self, source: tokenizers.Tokenizer | str, *, content: str | None = None):
        text = source if isinstance(source, str) else source.to_str()
        self._hf = _parse(text)
        vocabulary = self._hf.get_vocab(with_added_tokens=True)
        super().__init__(text if content is None else content, "bpe", len(vocabulary))
        names = {token: name for name, token in vocabulary.items()}
        if set(names) != set(range(self.vocab_size)) or not names:
            missing = next((i for i in range(self.vocab_size) if i not in names), 0)
            raise ConfigError(
                f"the ids of a vocabulary must be 0, 1, 2, ... once each: {self.vocab_size} tokens "
                f"have {len(names)} different ids, and none has id {missing}"
            )
        rule = piece_decoder(_part(self._hf.decoder))
        self._drops_space, self.spaces_follow = rule.drops_first_space, rule.drops_last_space
        added = self._hf.get_added_tokens_decoder()
        self.controls = Controls(added)
        self._pieces = [
            names[i].encode()
            if i in self.controls.ids or (rule.bytewise and i in added)
            else rule.piece_bytes(names[i])
            for i in range(self.vocab_size)
        ]
        self._sizes = np.array([len(piece) for piece in self._pieces], np.int32)
        self._forbidden = np.zeros(self.vocab_size, bool)
        self._forbidden[[i for i in self.controls.ids if names[i] != self._unknown]] = True
        ends = (vocabulary.get(name) for name in END_NAMES)
        self.eot_id = next((token for token in ends if token in self.controls.ids), None)
        ending = _part(self._hf.post_processor)
        self.has_post_processor, self.begin_ids = ending is not None, begin_ids(ending)
        self._hf.post_processor = None  # type: ignore  # it would trim offsets
        splitting = _part(self._hf.pre_tokenizer)
        self._keeps_bytes = self._hf.normalizer is None and rule.bytewise
        self._may_cut = (
            self._keeps_bytes and splitting == GPT2_SPLITTING and added.keys() == self.controls.ids
        )

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Ids by the lowest-ranked merge first; control tokens are neither parsed nor added.

        Raises:
          ConfigError: A lone surrogate, bytes for which a foreign vocabulary has no token, or a
            foreign vocabulary that makes a control token of its text.
        """
        n_bytes = len(to_bytes(text))
        parts = chunks(text) if self._may_cut else iter([text])
        ids = [np.zeros(0, np.int32)]
        while batch := list(islice(parts, BATCH)):
            with _one_line():
                encodings = self._hf.encode_batch_fast(batch, add_special_tokens=False)
            ids += [np.array(encoding.ids, np.int32) for encoding in encodings]
        return self._checked(np.concatenate(ids), n_bytes)

    def encode_on(self, text: str) -> Int32[np.ndarray, " T"]:
        """Ids of a text that goes on where another ended: no space is put in front of it."""
        with _one_line():
            ids = self._plain.encode(text, add_special_tokens=False).ids
        return self._checked(np.array(ids, np.int32), len(to_bytes(text)))

    def encode_controls(self, text: str) -> Int32[np.ndarray, " T"]:
        """Ids of a text in which the names of control tokens are these tokens.

        For text of one's own, such as a template's. What others wrote goes through `encode`.
        """
        return self.encode_pieces(self.controls.pieces(text))[0]

    def encode_pieces(
        self, pieces: Sequence[Piece]
    ) -> tuple[Int32[np.ndarray, " T"], Int64[np.ndarray, " T"]]:
        """Ids of a text that `Controls.pieces` has cut, and where each begins in the text."""
        ids, starts = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
        for piece in pieces:
            if piece.token is not None:
                ids.append(np.array([piece.token], np.int32))
                starts.append(np.array([piece.start]))
                continue
            library = self._inner if piece.start else self._hf
            n_bytes = len(to_bytes(piece.text))
            with _one_line():
                encoding = library.encode(piece.text, add_special_tokens=False)
            ids.append(self._checked(np.array(encoding.ids, np.int32), n_bytes))
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            starts.append(piece.start + offsets[:, 0])
        return np.concatenate(ids), np.concatenate(starts)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The pieces as text, special tokens included."""
        text = b"".join([self._pieces[i] for i in self._in_range(ids)]).decode(errors="replace")
        text = text.removesuffix(" ") if self.spaces_follow else text
        return text.removeprefix(" ") if self._drops_space else text

    def token_bytes(self, token: int) -> bytes:
        """The piece's bytes; the `▁` of sentencepiece counts as a space."""
        return b"" if token in self.controls.ids else self._pieces[token]

    def _checked(self, ids: np.ndarray, n_bytes: int) -> np.ndarray:
        if self._forbidden[ids].any():
            name = self.controls.name(int(ids[self._forbidden[ids]][0]))
            raise ConfigError(f"this tokenizer makes a control token of the text {name!r}")
        if self._keeps_bytes and (kept := int(self._sizes[ids].sum())) < n_bytes:
            raise ConfigError(
                f"this tokenizer has no token for {n_bytes - kept} of the text's {n_bytes} bytes",
                fix="--data.tokenizer=bpe trains one that has all 256",
            )
        return ids

    @property
    def _unknown(self) -> str | None:
        return getattr(self._hf.model, "unk_token", None)

    @cached_property
    def _inner(self) -> tokenizers.Tokenizer:
        """The library's tokenizer for what stands behind a control token."""
        return self._without_space(everywhere=False)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The library's tokenizer for what stands behind plain text."""
        return self._without_space(everywhere=True)

    def _without_space(self, *, everywhere: bool) -> tokenizers.Tokenizer:
        parts = {name: _part(getattr(self._hf, name)) for name in ("normalizer", "pre_tokenizer")}
        changed = {name: without_space(part, everywhere) for name, part in parts.items()}
        if changed == parts:
            return self._hf
        return _parse(json.dumps(json.loads(self._hf.to_str()) | changed))


@contextmanager
def _one_line() -> Iterator[None]:
    """What the library raises for text without tokens (vocabularies of characters) as ours."""
    try:
        yield
    except Exception as error:
        raise ConfigError(f"the text has parts for which there is no token: {error}") from None


def _parse(text: str) -> tokenizers.Tokenizer:
    try:
        library = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # what Rust raises where it gives up is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"not a tokenizer.json: {error}") from None
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True  # a control token's name in a text stays text
    added = library.get_added_tokens_decoder().values()
    # Called special or not: see `controls.py`.
    library.add_special_tokens([token for token in added if is_control(token)])  # type: ignore
    return library


def _part(part: Any) -> dict[str, Any] | None:
    """A part of the library's tokenizer as JSON: every field, in today's spelling."""
    return None if part is None else json.loads(part.__getstate__())


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
