# SPDX-License-Identifier: Apache-2.0
"""Text to ids and back: characters, bytes, and byte pair encoding, behind one Protocol.

One rule holds for every tokenizer: `decode(ids)` is the concatenated bytes of the ids read as UTF-8,
special tokens as their text, ill-formed bytes as U+FFFD; a sentencepiece-style tokenizer drops the
one space that it puts before the text. So `decode` cleans nothing up and text can be streamed id by
id. What is encoded is always plain text: `<|endoftext|>` in a prompt is 13 characters, not the
control token, and nothing is put in front (no BOS).

Left out: chat templates, and tokenizers whose decoding cannot be undone exactly (WordPiece, CTC).
"""

import codecs
import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, runtime_checkable

import numpy as np
import tokenizers
from jaxtyping import Int32
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxgpt.data.corpus import Corpus
from jaxgpt.errors import ConfigError, ResourceError

END_OF_TEXT = "<|endoftext|>"
# Names that public tokenizers give to the end of a document, first match wins.
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
BLOCK = 1 << 22  # characters encoded at a time: bounds the memory of intermediates
CHUNK = 1 << 16  # characters per call of the BPE; chunks run in parallel


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the library asks of a tokenizer; any class with these members will do."""

    @property
    def kind(self) -> str:
        """`char`, `byte`, `bpe`, or a name of one's own."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        ...

    @property
    def eot_id(self) -> int | None:
        """The id between documents, or None."""
        ...

    @property
    def fingerprint(self) -> str:
        """sha256 of everything that decides ids."""
        ...

    def encode(self, text: str) -> Int32[np.ndarray, "T"]:
        """Ids of a text; raises ConfigError where it cannot be encoded whole."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ids, by the rule of this module; raises ConfigError on an unknown id."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Bytes that one id stands for; none for a special token."""
        ...

    def save(self, path: Path) -> None:
        """Writes one JSON file, atomically, for `load_tokenizer`."""
        ...


@contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that appears under `path` whole and on disk, or not at all.

    Raises:
      ResourceError: The system refused to write (full disk, no permission).
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except ResourceError:
        raise
    except OSError as error:
        raise ResourceError(
            f"cannot write {path}: {error.strerror or error}", fix="free space or another folder"
        ) from error


class _Stored:
    """A tokenizer that is fully described by one JSON text."""

    _json: str

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the JSON, however it is laid out."""
        canonical = json.dumps(json.loads(self._json), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Writes the JSON, atomically."""
        with write_atomically(path) as file:
            file.write(self._json.encode())


class CharTokenizer(_Stored):
    """One id per character that occurs, in order of code points.

    Args:
      chars: The characters, in any order and number: a whole text will do.
    """

    kind = "char"
    eot_id = None

    def __init__(self, chars: str):
        table = "".join(sorted(set(chars)))
        if not table:
            raise ConfigError("a character tokenizer needs at least one character")
        self._codes = np.frombuffer(_utf(table, "utf-32-le"), np.uint32)
        # Every code point above the table's last shares the final entry, which stays -1.
        self._id_of = np.full(int(self._codes[-1]) + 2, -1, np.int32)
        self._id_of[self._codes] = np.arange(len(table), dtype=np.int32)
        self._json = json.dumps({"jaxgpt_tokenizer": "char", "chars": table}) + "\n"
        self.vocab_size = len(table)

    def encode(self, text: str) -> Int32[np.ndarray, "T"]:
        """One id per character.

        Raises:
          ConfigError: Characters without an id, all of them named; they are never skipped.
        """
        ids = np.empty(len(text), np.int32)
        for start in range(0, len(text), BLOCK):
            codes = np.frombuffer(_utf(text[start : start + BLOCK], "utf-32-le"), np.uint32)
            ids[start : start + BLOCK] = self._id_of[np.minimum(codes, len(self._id_of) - 1)]
        if (ids < 0).any():
            unseen = sorted({text[i] for i in np.flatnonzero(ids < 0)})
            shown = ", ".join(f"{char!r} (U+{ord(char):04X})" for char in unseen[:10])
            more = f" and {len(unseen) - 10} more" if len(unseen) > 10 else ""
            raise ConfigError(
                f"not among the {self.vocab_size} characters of this tokenizer: {shown}{more}",
                fix="leave them out, or train with --data.tokenizer=byte",
            )
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The characters of the ids."""
        return self._codes[_in_range(ids, self.vocab_size)].tobytes().decode("utf-32-le")

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 of the character."""
        return self.decode([token]).encode()


class ByteTokenizer(_Stored):
    """The 256 bytes of UTF-8; an id is the byte's value, and there is no special token."""

    kind = "byte"
    vocab_size = 256
    eot_id = None
    _json = json.dumps({"jaxgpt_tokenizer": "byte"}) + "\n"

    def encode(self, text: str) -> Int32[np.ndarray, "T"]:
        """The bytes of the text."""
        return np.frombuffer(_utf(text), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The bytes as text; ill-formed ones as U+FFFD."""
        ids = _in_range(ids, self.vocab_size)
        return ids.astype(np.uint8).tobytes().decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The byte."""
        return bytes([token])


class BPETokenizer(_Stored):
    """A tokenizer of the `tokenizers` library: byte-level, or sentencepiece-style.

    Args:
      source: The library's tokenizer, or the text of a tokenizer.json.

    Raises:
      ConfigError: Not a tokenizer, ids that are missing or shared, or a decoder without an inverse.
    """

    kind = "bpe"

    def __init__(self, source: tokenizers.Tokenizer | str):
        self._json = source if isinstance(source, str) else source.to_str()
        try:
            self._hf = tokenizers.Tokenizer.from_str(self._json)
        except Exception as error:  # the library raises nothing more specific
            raise ConfigError(f"not a tokenizer.json: {error}") from None
        self._hf.no_truncation()
        self._hf.no_padding()
        self._hf.encode_special_tokens = True  # control tokens in a text stay text
        vocabulary = self._hf.get_vocab(with_added_tokens=True)
        self.vocab_size = len(vocabulary)
        tokens = {token: name for name, token in vocabulary.items()}
        missing = next((i for i in range(self.vocab_size) if i not in tokens), None)
        if missing is not None or not tokens:
            raise ConfigError(
                f"vocabulary of {self.vocab_size} tokens is not 0..{self.vocab_size - 1}: "
                f"{len(tokens)} different ids, no id {missing or 0}"
            )
        config = json.loads(self._hf.to_str())  # every field, in today's spelling
        to_bytes, self._drops_space = _piece_decoder(config["decoder"])
        added = self._hf.get_added_tokens_decoder()
        self._special = {i for i, token in added.items() if token.special}
        self._pieces = [
            _utf(tokens[i]) if i in added else to_bytes(tokens[i]) for i in range(self.vocab_size)
        ]
        self.eot_id: int | None = next(
            (vocabulary[name] for name in END_NAMES if vocabulary.get(name) in self._special), None
        )
        self._byte_level = config["normalizer"] is None and config["decoder"]["type"] == "ByteLevel"
        # Only GPT-2's own splitting is known to cut wherever a word meets a space.
        splitting = json.loads(_untrained().to_str())["pre_tokenizer"]
        self._chunked = (
            self._byte_level
            and config["pre_tokenizer"] == splitting
            and added.keys() == self._special
        )

    def encode(self, text: str) -> Int32[np.ndarray, "T"]:
        """Ids by the lowest-ranked merge first; special tokens are neither parsed nor added.

        Raises:
          ConfigError: A lone surrogate, or bytes for which a foreign vocabulary has no token.
        """
        size = len(_utf(text))
        chunks = _chunks(text) if self._chunked else iter([text])
        parts = [np.zeros(0, np.int32)]
        while batch := list(islice(chunks, BLOCK // CHUNK)):
            for encoding in self._hf.encode_batch_fast(batch, add_special_tokens=False):
                parts.append(np.array(encoding.ids, np.int32))
        ids = np.concatenate(parts)
        if self._byte_level and (kept := int(self._lengths[ids].sum())) < size:
            raise ConfigError(
                f"this tokenizer has no token for {size - kept} of the text's {size} bytes",
                fix="--data.tokenizer=bpe trains one that has all 256",
            )
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The pieces as text, special tokens included."""
        ids = _in_range(ids, self.vocab_size)
        text = b"".join([self._pieces[i] for i in ids]).decode(errors="replace")
        return text.removeprefix(" ") if self._drops_space else text

    def token_bytes(self, token: int) -> bytes:
        """The piece's bytes; a sentencepiece `▁` counts as a space."""
        return b"" if token in self._special else self._pieces[token]

    @cached_property
    def _lengths(self) -> np.ndarray:
        return byte_lengths(self)


class StreamDecoder:
    """Turns ids into text one by one; the pieces add up to `decode` of all ids.

    Bytes of an unfinished character are held back, so U+FFFD only stands for bytes that can no longer
    become one.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._started = False

    def push(self, token: int) -> str:
        """Takes the next id; returns the text that is now certain, possibly none."""
        content = self._tokenizer.token_bytes(token)
        if not content:  # a special token shows as its text
            content = self._tokenizer.decode([token]).encode()
        elif not self._started and content.decode(errors="replace") != self._tokenizer.decode(
            [token]
        ):
            content = content[1:]  # the one space that this tokenizer puts before a text
        self._started = True
        return self._utf8.decode(content)

    def flush(self) -> str:
        """Ends the text; returns U+FFFD if a character is unfinished, and starts anew."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._started = False
        return rest


def train_tokenizer(
    kind: Literal["char", "byte", "bpe"] | str | Path, corpus: Corpus, vocab_size: int
) -> Tokenizer:
    """Makes a tokenizer for a corpus.

    BPE is byte-level with GPT-2's splitting: ids 0..255 are the bytes (in GPT-2's order), then come
    the merges, and `<|endoftext|>` is last. The most frequent pair merges first; of equally frequent
    pairs the one with the smallest ids. The result depends on the text alone, not on hash seeds or
    the number of threads. A small text may run out of pairs before `vocab_size`.

    Args:
      kind: `char`, `byte`, `bpe`, or the path of a tokenizer to load instead.
      corpus: The text.
      vocab_size: Ids of a `bpe`, all included; the others bring their own number.

    Raises:
      ConfigError: `vocab_size` below 257, or a path without a usable tokenizer.
    """
    if kind == "char":
        return CharTokenizer("".join(set().union(*corpus.documents)))
    if kind == "byte":
        return ByteTokenizer()
    if kind != "bpe":
        return load_tokenizer(kind)
    if vocab_size < 257:
        raise ConfigError(
            f"vocab_size={vocab_size} is below 257 (256 bytes and {END_OF_TEXT})",
            fix="--data.vocab_size=257 or more",
        )
    tokenizer = _untrained()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    chunks = (chunk for document in corpus.documents for chunk in _chunks(document))
    tokenizer.train_from_iterator(chunks, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return BPETokenizer(tokenizer)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer that `save` wrote, or any tokenizer.json.

    Raises:
      ConfigError: No such file, or not a usable tokenizer.
      ResourceError: The system refused to read it.
    """
    where = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text)
        ours = content.get("jaxgpt_tokenizer")
    except FileNotFoundError:
        raise ConfigError(
            f"no tokenizer at {where}", fix="--data.tokenizer=char, byte, bpe or a file"
        ) from None
    except OSError as error:
        raise ResourceError(f"cannot read {where}: {error.strerror}") from error
    except (ValueError, RecursionError, AttributeError) as error:
        raise ConfigError(f"not a tokenizer: {error}", where=where) from None
    if ours is None:
        try:
            return BPETokenizer(text)
        except ConfigError as error:
            raise ConfigError(error.what, where=where, fix=error.fix) from None
    if ours == "byte":
        return ByteTokenizer()
    chars = content.get("chars")
    if ours == "char" and isinstance(chars, str) and chars == "".join(sorted(set(chars))):
        return CharTokenizer(chars)
    raise ConfigError("not a character table sorted by code point", where=where)


def byte_lengths(tokenizer: Tokenizer) -> Int32[np.ndarray, "V"]:
    """Bytes that each id stands for; 0 for special tokens. For bits per byte."""
    return np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)], np.int32)


def _utf(text: str, encoding: str = "utf-8") -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"prompt is not valid UTF-8: lone surrogate U+{ord(text[error.start]):04X} "
            f"at character {error.start}",
            fix="pass it in UTF-8",
        ) from None


def _in_range(ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    array = np.asarray(ids, np.int64)
    if array.size and not (0 <= array.min() and array.max() < vocab_size):
        bad = array[(array < 0) | (array >= vocab_size)][0]
        raise ConfigError(f"id {bad} is outside the vocabulary of {vocab_size}")
    return array


def _untrained() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    return tokenizer


def _chunks(text: str) -> Iterator[str]:
    """Cuts a text where GPT-2's splitting always cuts: between a visible character and a space."""
    boundary = re.compile(r"(?<=\S)(?=[ \n])")
    start = 0
    while start < len(text):
        match = boundary.search(text, start + CHUNK)
        end = match.start() if match else len(text)
        yield text[start:end]
        start = end


def _piece_decoder(config: dict[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    """Reads tokenizer.json's decoder: bytes of one piece, and whether the first space is dropped."""
    steps = (config or {}).get("decoders", [config or {"type": "none"}])
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
                raise ConfigError(f"decoding by {step['type']} cannot be undone exactly")

    def to_bytes(piece: str) -> bytes:
        if "ByteLevel" in kinds:
            return bytes(BYTE_OF[char] for char in piece)
        if "ByteFallback" in kinds and re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        for mark in spaces:
            piece = piece.replace(mark, " ")
        return _utf(piece)

    return to_bytes, drops_space


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (`bytes_to_unicode` in openai/gpt-2's encoder.py)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


BYTE_OF = _byte_alphabet()
