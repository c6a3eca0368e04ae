# SPDX-License-Identifier: Apache-2.0
"""What a tokenizer is: the Protocol, its decoding rule, and what our own tokenizers share.

One rule holds for every tokenizer: `decode(ids)` is the bytes of the ids in a row, read as UTF-8,
with special tokens as their text and ill-formed bytes as U+FFFD; a sentencepiece-style tokenizer
drops the one space that it puts before a text. So decoding cleans nothing up, and text can be
streamed id by id. What is encoded is always plain text: `<|endoftext|>` in a prompt is 13
characters, not the control token, and nothing is put in front (no BOS). What belongs in front, and
what ends a text, is asked of `begin_ids` and `end_ids`.

Left out: the tokenizers (`tokenizer.py`, `bpe.py`, `pretrained.py`).
"""

import hashlib
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from jaxgpt.errors import ConfigError, ResourceError


@runtime_checkable
class Tokenizer(Protocol):
    """What the library asks of a tokenizer; any class with these members will do.

    Attributes:
      kind: `char`, `byte`, `bpe`, or a name of one's own.
      vocab_size: Number of ids, special tokens included.
      eot_id: The id that stands between documents, or None.
      fingerprint: sha256 of everything that decides ids.
    """

    kind: str
    vocab_size: int
    eot_id: int | None
    fingerprint: str

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Ids of a text; ConfigError where it cannot be encoded whole."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ids, by the rule above; ConfigError on an unknown id."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Bytes that one id stands for; none for a special token."""
        ...

    def save(self, path: Path) -> None:
        """Writes one JSON file, atomically, for `load_tokenizer`."""
        ...


def begin_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that every text begins with (BOS): its attribute of that name, else none."""
    return tuple(getattr(tokenizer, "begin_ids", ()))


def end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end what a model writes: its attribute of that name, else its end-of-text."""
    ends = getattr(tokenizer, "end_ids", None)
    if ends is not None:
        return tuple(ends)
    return () if tokenizer.eot_id is None else (tokenizer.eot_id,)


class Stored:
    """A tokenizer that one JSON text, `content`, describes in full; the base of ours."""

    eot_id: int | None = None
    template: str | None = None

    def __init__(self, content: str, kind: str, vocab_size: int):
        self.content, self.kind, self.vocab_size = content, kind, vocab_size
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Writes the JSON, atomically; ResourceError where the system refuses."""
        with write_atomically(path) as file:
            file.write(self.content.encode())

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> np.ndarray:
        """Ids of a conversation.

        Raises:
          ConfigError: There is no chat template.
        """
        raise no_template(self.kind)

    def _in_range(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        array = np.asarray(ids, np.int64)
        wrong = array[(array < 0) | (array >= self.vocab_size)]
        if wrong.size:
            raise ConfigError(f"id {wrong[0]} is outside the vocabulary of {self.vocab_size}")
        return array


def no_template(kind: str) -> ConfigError:
    """The error of a tokenizer that cannot write conversations."""
    return ConfigError(
        f"this {kind} tokenizer has no chat template",
        fix="take the tokenizer of a chat model's folder, put a chat_template.jinja beside its "
        "tokenizer.json, or --data.format=prompt-completion",
    )


def to_bytes(text: str, encoding: str = "utf-8") -> bytes:
    """Encodes a text; ConfigError on lone surrogates (a command line's stray bytes)."""
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"prompt is not valid UTF-8: lone surrogate U+{ord(text[error.start]):04X} "
            f"at character {error.start}",
            fix="pass it in UTF-8",
        ) from None


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
