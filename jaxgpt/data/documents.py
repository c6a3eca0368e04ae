# SPDX-License-Identifier: Apache-2.0
"""What `data.path` names as a stream of numbered pieces, of which any part can be read again.

The stream is files in their order, or one set of the hub, and the same whenever it is read: the
number of a piece says what it is. To go on at a piece, its file is read from the beginning and what
comes before it is dropped.

Left out: rows with answers, which have weights (`tokens.py`).
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.data.config import DataConfig
from jaxgpt.data.corpus import decoding_name, language_reference, text_files, unreadable
from jaxgpt.data.hub import ask, hub_request, is_hub
from jaxgpt.data.pieces import HoldOut, pieces
from jaxgpt.data.streams import arranged, stream_documents
from jaxgpt.errors import ConfigError, ResourceError


class Place(NamedTuple):
    """Where a file begins in the stream.

    Attributes:
      file: Its number.
      piece: The number of its first piece.
      chars: Characters before it.
    """

    file: int = 0
    piece: int = 0
    chars: int = 0


START = Place()


class Piece(NamedTuple):
    """A text that is encoded on its own.

    Attributes:
      text: It; not empty.
      number: Counted from 0 over the whole stream.
      held_out: Whether it is for validation.
      fresh: Whether it does not go on where the piece before it in its part ended.
      place: Of its file.
    """

    text: str
    number: int
    held_out: bool
    fresh: bool
    place: Place


@dataclass
class Source:
    """A stream of documents.

    Attributes:
      names: Of its files, for messages.
      inventory: What it must have been made of to be the same stream; plain data.
      open: The documents of a file by its number, each an iterator of blocks of text.
      max_chars: What is taken of it, from its beginning; None: all.
      hold_out: Which pieces are for validation.
      revision: Of a hub set: the commit to read; what it was read at, once that is known.
    """

    names: list[str]
    inventory: Any
    open: Callable[[int], Iterator[Iterator[str]]]
    max_chars: int | None
    hold_out: HoldOut
    revision: str | None = None

    def pieces(self, begin: Place = START, skip: int = 0) -> Generator[Piece]:
        """The pieces of the stream.

        Args:
          begin: Of the file to begin with.
          skip: The first piece that is wanted.

        Raises:
          ConfigError: Not text, or damaged; it names the file.
          ResourceError: The system or the hub refused.
        """
        number, chars = begin.piece, begin.chars
        for file in range(begin.file, len(self.names)):
            place = Place(file, number, chars)
            try:
                for document in self.open(file):
                    for count, text in enumerate(pieces(document)):
                        if self.max_chars is not None:
                            text = text[: self.max_chars - chars]
                            if not text:
                                return
                        if number >= skip:
                            held_out = self.hold_out(number)
                            fresh = count == 0 or held_out != self.hold_out(number - 1)
                            yield Piece(text, number, held_out, fresh, place)
                        number, chars = number + 1, chars + len(text)
            except OSError as error:
                if isinstance(error, ResourceError):
                    raise
                raise unreadable(self.names[file], error) from error


def open_source(data: DataConfig, check: Callable[[], None] = lambda: None) -> Source:
    """Finds what `data.path` names; nothing of it is read yet.

    Args:
      data: Says which, and how it is read.
      check: Called several times a second while the hub is waited for; may raise.

    Raises:
      ConfigError: Nothing there, or options that do not fit.
      ResourceError: The system refused.
    """
    decoding_name(data.encoding, data.errors)
    max_chars, hold_out = data.max_chars, HoldOut(data.val_fraction)
    if is_hub(data.path):
        request = hub_request(data)
        inventory = [request[key] for key in ("repo", "revision", "subset", "split")]
        source = Source([request["repo"]], inventory, lambda _: iter(()), max_chars, hold_out)
        source.open = lambda _: _hub_documents(data, source, check)
        return source
    if (data.subset, data.split, data.stream) != (None, "train", False):
        raise ConfigError(
            f"subset, split and stream are for sets of the hub, and path={data.path} is none",
            fix="--data.path=hf://OWNER/NAME, or leave them out",
        )
    if data.path is None:
        names = ["python-reference"]
        return Source(names, names, lambda _: iter([_reference()]), max_chars, hold_out)
    if data.path == "":  # as of an unset shell variable; to Path it is the current folder
        raise ConfigError("the path of the text is empty", fix="--data.path=FILE")
    try:
        files = text_files(Path(data.path))
        facts = [(str(file), file.stat()) for file in files]
    except OSError as error:
        raise unreadable(data.path, error) from error
    return Source(
        names=[str(file) for file in files],
        inventory=[[name, stat.st_size, stat.st_mtime_ns] for name, stat in facts],
        open=lambda number: stream_documents(
            files[number],
            encoding=data.encoding,
            errors=data.errors,
            column=data.column,
            rows=data.rows,
        ),
        max_chars=max_chars,
        hold_out=hold_out,
    )


def _reference() -> Iterator[str]:
    yield language_reference()


def _hub_documents(
    data: DataConfig, source: Source, check: Callable[[], None]
) -> Iterator[Iterator[str]]:
    """The rows of a hub set, as `data.rows` says; the source learns the commit."""

    def texts() -> Iterator[str]:
        for message in ask(hub_request(data, source.revision), data.hub_timeout, check):
            source.revision = message.get("commit", source.revision)
            yield from message.get("rows", ())

    yield from arranged(texts(), data.rows)
