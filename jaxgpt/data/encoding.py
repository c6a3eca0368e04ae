# SPDX-License-Identifier: Apache-2.0
"""A stream of pieces to ids: the tokenizer of a stream, and the threads that use it.

Threads are enough: the `tokenizers` library and numpy work without the interpreter's lock. At any
time there are at most `2 * workers + 1` groups of about `GROUP_CHARS` characters.

Left out: where pieces come from (`documents.py`) and where ids go (`shardwriter.py`).
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from jaxgpt.data.base import Tokenizer
from jaxgpt.data.bpe import BPETokenizer, train_bpe
from jaxgpt.data.config import DataConfig
from jaxgpt.data.documents import Piece, Place, Source
from jaxgpt.data.tokenizer import ByteTokenizer, CharTokenizer, load_tokenizer
from jaxgpt.data.tokens import token_dtype
from jaxgpt.errors import ConfigError

GROUP_CHARS = 1 << 18
GROUP_PIECES = 1 << 10


class Encoded(NamedTuple):
    """A piece as ids.

    Attributes:
      ids: In the type that they are stored in.
      number: Of the piece, as for `Piece`.
      held_out: Likewise.
      fresh: Likewise.
      place: Likewise.
      n_chars: Characters of its text.
      n_bytes: The same in UTF-8.
    """

    ids: np.ndarray
    number: int
    held_out: bool
    fresh: bool
    place: Place
    n_chars: int
    n_bytes: int


def encode_pieces(
    pieces: Iterator[Piece], tokenizer: Tokenizer, workers: int
) -> Generator[Encoded]:
    """Encodes pieces in threads, in their order.

    Args:
      pieces: Read by the caller's thread.
      tokenizer: What makes the ids; used by several threads at once.
      workers: How many.

    Raises:
      ConfigError: A text that cannot be encoded whole, or an id outside the vocabulary.
    """
    goes_on = _goes_on(tokenizer)
    waiting: deque[Future[list[Encoded]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="encode") as pool:
        try:
            for group in _groups(pieces):
                waiting.append(pool.submit(_encode, group, tokenizer, goes_on))
                if len(waiting) > 2 * workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _groups(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    n_chars = 0
    for piece in pieces:
        group.append(piece)
        n_chars += len(piece.text)
        if n_chars >= GROUP_CHARS or len(group) == GROUP_PIECES:
            yield group
            group, n_chars = [], 0
    if group:
        yield group


def _encode(
    group: list[Piece], tokenizer: Tokenizer, goes_on: Callable[[str], np.ndarray]
) -> list[Encoded]:
    dtype, encoded = token_dtype(tokenizer.vocab_size), []
    for text, number, held_out, fresh, place in group:
        try:
            n_bytes = len(text) if text.isascii() else len(text.encode())
            ids = (tokenizer.encode if fresh else goes_on)(text)
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"piece {number} of the text holds the lone surrogate "
                f"U+{ord(text[error.start]):04X}",
                fix="--data.errors=replace",
            ) from None
        except ConfigError as error:
            raise ConfigError(error.what, where=f"piece {number}", fix=error.fix) from None
        if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            raise ConfigError(
                f"the {tokenizer.kind} tokenizer made the ids {ids.min()} to {ids.max()}; its "
                f"vocabulary has {tokenizer.vocab_size}",
                where=f"piece {number}",
            )
        found = (ids.astype(dtype), number, held_out, fresh, place, len(text), n_bytes)
        encoded.append(Encoded(*found))
    return encoded


def _goes_on(tokenizer: Tokenizer) -> Callable[[str], np.ndarray]:
    """How a text is encoded that goes on where another ended: without a space put before it."""
    encode_on = getattr(tokenizer, "encode_on", None)
    if encode_on is None:
        return tokenizer.encode
    try:  # what puts no space before a text is encoded by all threads
        same = np.array_equal(tokenizer.encode("a"), encode_on("a"))
    except ConfigError:
        same = False
    return tokenizer.encode if same else encode_on


def make_tokenizer(
    data: DataConfig, source: Source, bpe_sample: int, check: Callable[[], None]
) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names, trained on the stream where it has to be.

    Args:
      data: `tokenizer`, and `vocab_size` of a bpe.
      source: The stream: `char` needs all of it.
      bpe_sample: Bytes from its beginning that a `bpe` is trained on, up to a whole piece.
      check: Called for every piece; may raise.

    Raises:
      ConfigError: No such tokenizer, or a text that cannot be read.
      ResourceError: The system or the hub refused.
    """
    if data.tokenizer == "byte":
        return ByteTokenizer()
    if data.tokenizer == "char":
        seen: set[str] = set()
        for piece in source.pieces():
            check()
            seen.update(piece.text)
        return CharTokenizer("".join(seen))
    if data.tokenizer == "bpe":
        sample: list[str] = []
        n_bytes = 0
        for piece in source.pieces():
            check()
            sample.append(piece.text)
            n_bytes += len(piece.text.encode(errors="replace"))
            if n_bytes >= bpe_sample:
                break
        return BPETokenizer(train_bpe(sample, data.vocab_size))
    return load_tokenizer(data.tokenizer)
