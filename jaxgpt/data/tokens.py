# SPDX-License-Identifier: Apache-2.0
"""Ids on disk: one file, prepared once, mapped into memory ever after.

Layout: 16 bytes of magic, a JSON header padded with spaces to byte 4096, then the training ids and
the validation ids, little-endian, in the smallest of uint8, uint16 and uint32 that the vocabulary
fits; of rows with answers, last, one byte for each id in the same order: 1 where it is trained,
0 where it is only read. The header carries the fingerprints of tokenizer and text, so that ids are
never read with another tokenizer and are made again when the text changes.

Left out: texts larger than memory, which are prepared in shards (`prepare.py`).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.data.answers import encode_examples, split_examples
from jaxgpt.data.base import Tokenizer, begin_ids, write_atomically
from jaxgpt.data.corpus import Corpus
from jaxgpt.errors import ConfigError, ResourceError

MAGIC = b"jaxgpt tokens\r\n\n"
HEADER_BYTES = 4096
FORMAT = 2
REBUILD = "delete the file; it is made again from the text"


@dataclass(frozen=True, eq=False)
class TokenFile:
    """An open token file.

    Attributes:
      path: Where it is.
      train: Training ids, a read-only map of the file.
      val: Validation ids, likewise; may be empty.
      train_weights: 1 for each training id that is trained, 0 for the others; None: all are.
      val_weights: The same of the validation ids.
      vocab_size: Of the tokenizer.
      train_chars: Characters of the training text.
      val_chars: Characters of the validation text.
      val_bytes: Bytes of the validation text in UTF-8: the denominator of bits per byte.
      val_fraction: Share of the characters held out.
      tokenizer: Fingerprint of the tokenizer.
      tokenizer_kind: Its kind, for messages.
      source: Fingerprint of the corpus.
    """

    path: Path
    train: np.ndarray
    val: np.ndarray
    train_weights: np.ndarray | None
    val_weights: np.ndarray | None
    vocab_size: int
    train_chars: int
    val_chars: int
    val_bytes: int
    val_fraction: float
    tokenizer: str
    tokenizer_kind: str
    source: str


FIELDS = {f.name: f.type for f in fields(TokenFile) if f.type in (int, float, str)}
FIELDS |= {"format": int, "dtype": str, "n_train": int, "n_val": int, "weighted": bool}


def prepare_tokens(
    corpus: Corpus, tokenizer: Tokenizer, path: Path, *, val_fraction: float = 0.1
) -> TokenFile:
    """Encodes a corpus into a token file, or reuses the file where it is already that.

    The first `int((1 - val_fraction) * n)` of the n characters train and the rest validate; a
    document that the boundary cuts goes on in the validation part. Between documents stands the
    tokenizer's `eot_id`, without one a newline, and nothing if it cannot encode that either. A
    tokenizer that puts something before every text (BOS) has it before each document. Examples are
    never cut (`split_examples`), and nothing stands between them (`encode_examples`).

    Args:
      corpus: The text.
      tokenizer: Makes the ids.
      path: The file to write; its folder is made.
      val_fraction: Share of the characters to hold out, 0 <= f < 1.

    Raises:
      ConfigError: A bad `val_fraction`, a text that the tokenizer cannot encode, or another kind of
        file under `path`.
      ResourceError: The system refused to read or write.
    """
    if not 0 <= val_fraction < 1:
        raise ConfigError(
            f"val_fraction={val_fraction} is not in [0, 1)", fix="--data.val_fraction=0.1"
        )
    if path.exists():
        if _head(path)[: len(MAGIC)] not in (MAGIC, b""):
            raise ConfigError(f"{path} exists and is not a token file", fix="another path for it")
        try:
            found = open_tokens(path, tokenizer=tokenizer)
            if (found.source, found.val_fraction) == (corpus.fingerprint, val_fraction):
                return found
        except ConfigError:
            pass  # stale or damaged: it is replaced as a whole

    parts, texts = _parts(corpus, tokenizer, val_fraction)
    dtype = token_dtype(tokenizer.vocab_size)
    with write_atomically(path) as file:
        file.write(bytes(HEADER_BYTES))
        counts, weights = [], []
        for part in parts:
            counts.append(0)
            for ids, weight in part:
                _check_range(ids, tokenizer.vocab_size, where=f"{tokenizer.kind} tokenizer")
                counts[-1] += len(ids)
                file.write(ids.astype(dtype).tobytes())
                weights += [] if weight is None else [weight.astype(np.uint8).tobytes()]
        file.writelines(weights)
        train, val = texts
        header = {
            "format": FORMAT,
            "dtype": dtype.name,
            "n_train": counts[0],
            "n_val": counts[1],
            "weighted": bool(corpus.examples),
            "vocab_size": tokenizer.vocab_size,
            "train_chars": sum(map(len, train)),
            "val_chars": sum(map(len, val)),
            "val_bytes": sum(len(document.encode()) for document in val),
            "val_fraction": float(val_fraction),
            "tokenizer": tokenizer.fingerprint,
            "tokenizer_kind": tokenizer.kind,
            "source": corpus.fingerprint,
        }
        file.seek(0)
        file.write((MAGIC + json.dumps(header).encode()).ljust(HEADER_BYTES))
    return open_tokens(path, tokenizer=tokenizer)


def open_tokens(path: Path, *, tokenizer: Tokenizer) -> TokenFile:
    """Maps a token file into memory after checking all of it.

    Args:
      path: A file that `prepare_tokens` wrote.
      tokenizer: The one to be used with it.

    Raises:
      ConfigError: Not a token file, cut short, made with another tokenizer, or with ids outside the
        vocabulary.
      ResourceError: The system refused to read it.
    """
    header = _header(path)
    if header["tokenizer"] != tokenizer.fingerprint:
        raise ConfigError(
            f"{path} was made with the {header['tokenizer_kind']} tokenizer "
            f"{header['tokenizer'][:12]}, not the {tokenizer.kind} tokenizer "
            f"{tokenizer.fingerprint[:12]}",
            fix=REBUILD,
        )
    dtype = token_dtype(header["vocab_size"])
    n_train, n_val, weighted = header["n_train"], header["n_val"], header["weighted"]
    content = np.memmap(path, np.uint8, "r")
    ids_end = HEADER_BYTES + (n_train + n_val) * dtype.itemsize
    expected = ids_end + (n_train + n_val) * weighted
    if len(content) != expected or min(n_train, n_val) < 0:
        raise ConfigError(
            f"{path} has {len(content)} bytes, but {n_train} + {n_val} ids of {dtype.name} "
            f"{'with weights ' * weighted}need {expected}",
            fix=REBUILD,
        )
    ids, weights = content[HEADER_BYTES:ids_end].view(dtype), content[ids_end:]
    if header["vocab_size"] <= np.iinfo(dtype).max:  # else every value is a valid id
        _check_range(ids, header["vocab_size"], where=str(path), fix=REBUILD)
    if weights.size and weights.max() > 1:
        raise ConfigError(f"a weight of {weights.max()}", where=str(path), fix=REBUILD)
    known = {name: header[name] for name in FIELDS if name in TokenFile.__annotations__}
    return TokenFile(
        path=path,
        train=ids[:n_train],
        val=ids[n_train:],
        train_weights=weights[:n_train] if weighted else None,
        val_weights=weights[n_train:] if weighted else None,
        **known,
    )


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest little-endian unsigned type for ids 0..vocab_size-1."""
    return np.dtype("<u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def check_not_shrunk(tokens: np.ndarray) -> None:
    """Refuses a map whose file was cut short since it was opened: reading it is a bus error.

    Raises:
      ConfigError: The file is now shorter than its map.
    """
    mapped = getattr(tokens, "_mmap", None)  # of the whole file: see open_tokens
    if mapped is not None and mapped.size() < len(mapped):
        raise ConfigError(
            f"the token file shrank from {len(mapped)} to {mapped.size()} bytes while it was open",
            where=str(getattr(tokens, "filename", "")),
            fix=REBUILD,
        )


def _parts(
    corpus: Corpus, tokenizer: Tokenizer, val_fraction: float
) -> tuple[list[Iterator[tuple[np.ndarray, np.ndarray | None]]], list[list[str]]]:
    """Of training and validation: ids with their weights, still to be computed, and the texts."""
    if corpus.examples:
        examples = split_examples(corpus.examples, val_fraction)
        texts = [[one.text for one in some] for some in examples]
        return [encode_examples(some, tokenizer) for some in examples], texts
    n_chars = sum(map(len, corpus.documents))
    texts = list(_split(corpus.documents, int((1 - val_fraction) * n_chars)))
    return [((ids, None) for ids in _encoded(some, tokenizer)) for some in texts], texts


def _split(documents: tuple[str, ...], cut: int) -> tuple[list[str], list[str]]:
    train, val, seen = [], [], 0
    for document in documents:
        here = min(max(cut - seen, 0), len(document))
        train += [document[:here]] if here else []
        val += [document[here:]] if here < len(document) else []
        seen += len(document)
    return train, val


def _encoded(documents: Sequence[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    begin = np.array(begin_ids(tokenizer), np.int32)
    if tokenizer.eot_id is not None:
        separator = np.array([tokenizer.eot_id], np.int32)
    else:
        try:
            separator = tokenizer.encode("\n")
        except ConfigError:
            separator = np.zeros(0, np.int32)
    for number, document in enumerate(documents):
        if number:
            yield separator
        yield begin
        yield tokenizer.encode(document)


def _check_range(ids: np.ndarray, vocab_size: int, *, where: str, fix: str | None = None) -> None:
    for start in range(0, len(ids), 1 << 24):
        block = ids[start : start + (1 << 24)]
        bad = np.flatnonzero((block < 0) | (block >= vocab_size))
        if bad.size:
            raise ConfigError(
                f"id {block[bad[0]]} at position {start + bad[0]} is outside the vocabulary of "
                f"{vocab_size}",
                where=where,
                fix=fix,
            )


def _head(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(HEADER_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"no token file at {path}", fix="prepare it from the text") from None
    except OSError as error:
        raise ResourceError(f"cannot read {path}: {error.strerror}") from error


def _header(path: Path) -> dict[str, Any]:
    head = _head(path)
    if len(head) < HEADER_BYTES or not head.startswith(MAGIC):
        raise ConfigError(f"{path} is not a token file ({len(head)} bytes read)", fix=REBUILD)
    try:
        header = json.loads(head[len(MAGIC) :])
    except (ValueError, RecursionError):
        raise ConfigError(f"the header of {path} is damaged", fix=REBUILD) from None
    wrong = [k for k, kind in FIELDS.items() if type(header.get(k)) is not kind]
    if wrong or header["format"] != FORMAT or len(header) != len(FIELDS):
        raise ConfigError(
            f"the header of {path} is damaged or of another version: {wrong or header['format']}",
            fix=REBUILD,
        )
    return header
