# SPDX-License-Identifier: Apache-2.0
"""Text in: a file, a folder, or the language reference that CPython carries.

Text is kept exactly as it is stored: no newline translation (CRLF stays CRLF), a byte order mark
stays as U+FEFF (`encoding="utf-8-sig"` drops it), nothing is stripped or normalised.

In a folder every `*.txt` file below it is one document; where there is none, every file is. Names
that begin with a dot are skipped, links to folders are not followed, and documents are in the order
of their relative paths. A file that cannot be read as text is an error, never skipped. Rows and
compression are read by `files.py`; the rows of a file are joined with newlines into one document,
or are a document each, or are examples with answers (`answers.py`).

Left out: the hub (`hub.py`).
"""

import codecs
import dataclasses
import difflib
import hashlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxgpt.data.answers import Example, example
from jaxgpt.data.files import read_rows, read_texts
from jaxgpt.errors import ConfigError, ResourceError


@dataclass(frozen=True)
class Corpus:
    """Documents and what identifies them.

    Attributes:
      name: For people: the file's or folder's name.
      documents: The texts, in order.
      fingerprint: sha256 of the documents, their boundaries and how they were decoded.
      examples: Where the text is rows with answers: they, in order; the documents are their texts.
    """

    name: str
    documents: tuple[str, ...]
    fingerprint: str
    examples: tuple[Example, ...] = ()

    @classmethod
    def of(cls, documents: Sequence[str], *, name: str = "text", decoding: str = "") -> "Corpus":
        """Builds a corpus of texts already in memory.

        Args:
          documents: The texts.
          name: For people.
          decoding: How the texts were made of bytes; part of the fingerprint.

        Raises:
          ConfigError: There is no text, or a document holds lone surrogates.
        """
        if not any(documents):
            raise ConfigError(f"{name} is empty", fix="--data.path=FILE with text in it")
        digest = hashlib.sha256(decoding.encode())
        for number, document in enumerate(documents):
            try:
                content = document.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f"document {number} of {name} holds the lone surrogate "
                    f"U+{ord(document[error.start]):04X} at character {error.start}",
                    fix="--data.errors=replace",
                ) from None
            digest.update(len(content).to_bytes(8, "little") + content)
        return cls(name=name, documents=tuple(documents), fingerprint=digest.hexdigest())


def read_corpus(
    path: str | Path | None,
    *,
    encoding: str = "utf-8",
    errors: str = "strict",
    column: str = "text",
    rows: str = "lines",
    max_chars: int | None = None,
) -> Corpus:
    """Reads a text corpus.

    Args:
      path: A file, or a folder (see the module's rule). None: `pydoc_data.topics`, the language
        reference that CPython carries, about 465,000 characters, one document.
      encoding: How bytes become text; any text codec of Python.
      errors: What happens to bytes that do not decode, as in `bytes.decode`.
      column: Of files with rows: where their text is.
      rows: Of files with rows: `lines` of one document, or `documents`.
      max_chars: How much of the text is taken, from its beginning; None: all.

    Raises:
      ConfigError: Nothing there, nothing in it, not text, or not in this encoding.
      ResourceError: The system refused to read it.
    """
    decoding = decoding_name(encoding, errors)
    if path is None:
        documents = arrange([language_reference()], max_chars=max_chars)
        return Corpus.of(documents, name="python-reference", decoding=decoding)
    if path == "":  # as of an unset shell variable; to Path it is the current folder
        raise ConfigError("the path of the text is empty", fix="--data.path=FILE")
    path = Path(path)
    try:
        documents = []
        for file in text_files(path):
            texts, are_rows = read_texts(file, encoding=encoding, errors=errors, column=column)
            documents += arrange(texts, rows=rows) if are_rows else texts
    except OSError as error:
        raise unreadable(path, error) from error
    documents = arrange(documents, max_chars=max_chars)
    return Corpus.of(documents, name=path.name, decoding=decoding)


def read_examples(
    path: str | Path | None,
    format: str,
    *,
    encoding: str = "utf-8",
    errors: str = "strict",
    max_chars: int | None = None,
) -> Corpus:
    """Reads rows with answers.

    Args:
      path: A file with rows, or a folder of such files, all of which are read.
      format: `chat` or `prompt-completion`.
      encoding: How bytes become text.
      errors: What happens to bytes that do not decode.
      max_chars: Whole rows from the beginning that have no more characters than this; None: all.

    Raises:
      ConfigError: Nothing there, no rows, or a row that is not of this format; it names the row.
      ResourceError: The system refused to read it.
    """
    if path is None or path == "":
        raise ConfigError(f"format={format} needs rows", fix="--data.path=FILE.jsonl")
    path, decoding = Path(path), decoding_name(encoding, errors)
    try:
        examples = [
            example(format, row, where)
            for file in text_files(path, prefer=None)
            for where, row in read_rows(file, encoding=encoding, errors=errors)
        ]
    except OSError as error:
        raise unreadable(path, error) from error
    if max_chars is not None:
        sizes = itertools.accumulate(len(one.text) for one in examples)
        examples = [one for one, end in zip(examples, sizes, strict=True) if end <= max_chars]
        if not examples:
            raise ConfigError(f"the first row has more than max_chars={max_chars} characters")
    contents = [one.content for one in examples]
    made = Corpus.of(contents, name=path.name, decoding=f"{decoding} {format}")
    texts = tuple(one.text for one in examples)
    return dataclasses.replace(made, documents=texts, examples=tuple(examples))


def arrange(
    texts: list[str], *, rows: str = "documents", max_chars: int | None = None
) -> list[str]:
    """Makes documents of texts: joined with newlines for `rows="lines"`, then cut to `max_chars`.

    Newlines that join count as characters; what stands between documents does not.
    """
    documents = ["\n".join(texts)] if rows == "lines" else texts
    if max_chars is None:
        return documents
    kept, left = [], max_chars
    for document in documents:
        if left <= 0:
            break
        kept.append(document[:left])
        left -= len(document)
    return kept


def decoding_name(encoding: str, errors: str) -> str:
    """How bytes become text, in words that a fingerprint can be made of."""
    try:
        codecs.lookup_error(errors)
        b"a".decode(encoding, "ignore")  # `hex` and its like are codecs, but not of text
        return f"{codecs.lookup(encoding).name} {errors}"
    except LookupError as error:
        raise ConfigError(str(error), fix="--data.encoding=utf-8 --data.errors=strict") from None


def unreadable(path: Path | str, error: OSError) -> ResourceError:
    """The error of a file that the system refuses to read."""
    return ResourceError(
        f"cannot read {error.filename or path}: {error.strerror}",
        fix="make it readable, or --data.path=FILE",
    )


def language_reference() -> str:
    """`pydoc_data.topics`, sorted by name; ConfigError where this Python lacks it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError(
            "this Python has no built-in text (pydoc_data.topics)", fix="--data.path=FILE"
        ) from None
    return "\n".join(topics[name] for name in sorted(topics))


def text_files(path: Path, prefer: str | None = ".txt") -> list[Path]:
    """The files of a path, by the module's rule; OSError where the system refuses."""
    if path.is_file():
        return [path]
    if not path.exists():
        raise _missing(path)
    if not path.is_dir():
        raise ConfigError(f"{path} is neither a file nor a folder", fix="--data.path=FILE")

    def refuse(error: OSError) -> None:  # os.walk would skip what it cannot list
        raise error

    found: list[Path] = []
    for folder, subfolders, names in os.walk(path, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    found = sorted((file for file in found if file.is_file()), key=lambda f: f.relative_to(path))
    if not found:
        raise ConfigError(f"{path} is empty: no file in this folder", fix="--data.path=FILE")
    return [file for file in found if file.suffix == prefer] or found


def _missing(path: Path) -> ConfigError:
    parent = path.absolute().parent
    if not parent.is_dir():
        return ConfigError(f"no text at {path}: no folder {parent}", fix="--data.path=FILE")
    names = sorted(os.listdir(parent))
    near = difflib.get_close_matches(path.name, names, n=1)
    found = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return ConfigError(
        f"no text at {path}; {parent} holds {found or 'nothing'}",
        fix=f"--data.path={path.with_name(near[0])}"
        if near
        else "--data.path=FILE, or a folder of `jaxgpt prepare`",
    )
