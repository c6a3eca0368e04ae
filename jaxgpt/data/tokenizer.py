# SPDX-License-Identifier: Apache-2.0
"""Text to ids and back: characters, bytes, and byte pair encoding, behind one Protocol.

`base.py` has the Protocol and the rule of decoding, `bpe.py` the third kind, `pretrained.py` those
of models that others have trained.

Left out: chat templates (`chat.py`).
"""

import codecs
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from jaxgpt.data.base import Stored, Tokenizer, to_bytes
from jaxgpt.data.bpe import BPETokenizer, train_bpe
from jaxgpt.data.corpus import Corpus
from jaxgpt.data.hubtokenizer import NAMED, fetch_tokenizer
from jaxgpt.data.pretrained import PretrainedTokenizer, load_folder_tokenizer
from jaxgpt.errors import ConfigError, ResourceError

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "CharTokenizer",
    "PretrainedTokenizer",
    "StreamDecoder",
    "Tokenizer",
    "byte_lengths",
    "load_folder_tokenizer",
    "load_tokenizer",
    "train_tokenizer",
]

BLOCK = 1 << 22  # characters encoded at a time: bounds the memory of intermediates


class CharTokenizer(Stored):
    """One id per character that occurs, in order of code points.

    Args:
      chars: The characters, in any order and number: a whole text will do.
    """

    def __init__(self, chars: str):
        table = "".join(sorted(set(chars)))
        if not table:
            raise ConfigError("a character tokenizer needs at least one character")
        self._codes = np.frombuffer(to_bytes(table, "utf-32-le"), np.uint32)
        # Code points above the table's last one share the final entry, which stays -1.
        self._id_of = np.full(int(self._codes[-1]) + 2, -1, np.int32)
        self._id_of[self._codes] = np.arange(len(table), dtype=np.int32)
        content = json.dumps({"jaxgpt_tokenizer": "char", "chars": table}) + "\n"
        super().__init__(content, "char", len(table))

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """One id per character; ConfigError names those without an id, none is ever skipped."""
        ids = np.empty(len(text), np.int32)
        for start in range(0, len(text), BLOCK):
            codes = np.frombuffer(to_bytes(text[start : start + BLOCK], "utf-32-le"), np.uint32)
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
        return self._codes[self._in_range(ids)].tobytes().decode("utf-32-le")

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 of the character."""
        return self.decode([token]).encode()


class ByteTokenizer(Stored):
    """The 256 bytes of UTF-8; an id is the byte's value, and there is no special token."""

    def __init__(self):
        super().__init__(json.dumps({"jaxgpt_tokenizer": "byte"}) + "\n", "byte", 256)

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """The bytes of the text."""
        return np.frombuffer(to_bytes(text), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The bytes as text; ill-formed ones as U+FFFD."""
        return self._in_range(ids).astype(np.uint8).tobytes().decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The byte."""
        return bytes([token])


class StreamDecoder:
    """Turns ids into text one by one; what it returns adds up to `decode` of all ids.

    Bytes of an unfinished character are held back: U+FFFD stands only for bytes that can no longer
    become one.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True
        self._spaces_follow = getattr(tokenizer, "spaces_follow", False)
        self._space = b""  # behind the last word, if another one follows

    def push(self, token: int) -> str:
        """Takes the next id; returns the text that is now certain, possibly none."""
        content, alone = self._tokenizer.token_bytes(token), self._tokenizer.decode([token])
        if self._spaces_follow:
            shown, self._space = self._space + alone.encode(), b" " * content.endswith(b" ")
            return self._utf8.decode(shown)
        if not content:  # a special token shows as its text
            content = alone.encode()
        elif self._at_start and content.decode(errors="replace") != alone:
            content = content[1:]  # the one space that this tokenizer puts before a text
        self._at_start = False
        return self._utf8.decode(content)

    def flush(self) -> str:
        """Ends the text; returns U+FFFD if a character is unfinished. The next id begins anew."""
        self._at_start, self._space = True, b""
        return self._utf8.decode(b"", final=True)


def train_tokenizer(kind: str | Path, corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Makes the tokenizer of a corpus.

    Args:
      kind: `char`, `byte`, `bpe` (see `train_bpe`), or the path of a tokenizer to load instead
        (see `load_tokenizer`).
      corpus: The text.
      vocab_size: Ids of a `bpe`; the other kinds bring their own number.

    Raises:
      ConfigError: `vocab_size` too small for a `bpe`, or a path without a usable tokenizer.
    """
    match kind:
        case "char":
            return CharTokenizer("".join(set().union(*corpus.documents)))
        case "byte":
            return ByteTokenizer()
        case "bpe":
            return BPETokenizer(train_bpe(corpus.documents, vocab_size))
    return load_tokenizer(kind)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer that `save` wrote, any tokenizer.json, or a Hugging Face folder's.

    Where nothing of that name is here, `gpt2` is fetched from the hub (`hubtokenizer.py`).

    Raises:
      ConfigError: No such file, or not a usable tokenizer.
      ResourceError: The system, or the hub, refused to read it.
    """
    where = str(path)
    if Path(path).is_dir():
        return load_folder_tokenizer(path)
    if where in NAMED and not Path(path).exists():
        return fetch_tokenizer(where)
    try:
        text = Path(path).read_bytes().decode()
        match json.loads(text):
            case {"jaxgpt_tokenizer": "byte"}:
                return ByteTokenizer()
            case {"jaxgpt_tokenizer": "char", "chars": str(chars)} if chars == "".join(
                sorted(set(chars))
            ):
                return CharTokenizer(chars)
            case {"jaxgpt_tokenizer": "pretrained", "files": dict(files)} if (
                "tokenizer.json" in files and all(isinstance(one, str) for one in files.values())
            ):
                return PretrainedTokenizer(files)
            case {"jaxgpt_tokenizer": _}:
                raise ConfigError("not a table of characters sorted by code point")
        return BPETokenizer(text)
    except FileNotFoundError:
        raise ConfigError(
            f"no tokenizer at {where}", fix="--data.tokenizer=char, byte, bpe, gpt2 or a file"
        ) from None
    except OSError as error:
        raise ResourceError(f"cannot read {where}: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(error.what, where=where) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a tokenizer: {error}", where=where) from None


def byte_lengths(tokenizer: Tokenizer) -> Int32[np.ndarray, " V"]:
    """Bytes that each id stands for; 0 for special tokens. For bits per byte."""
    return np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)], np.int32)
