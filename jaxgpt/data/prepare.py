# SPDX-License-Identifier: Apache-2.0
"""Text of any size to a folder of token files (`shards.py`), in bounded memory, restartable.

The text is read as a stream of pieces (`documents.py`), encoded by threads (`encoding.py`), and
written in its order (`shardwriter.py`), so that the bytes depend neither on the number of threads
nor on interruptions.

Before each document but the first of its part stands the `eot_id` of the tokenizer; without one a
newline, and nothing if it cannot encode that either; then what it puts before every text (BOS). A
piece whose predecessor is in the other part begins like a document.

Left out: rows with answers: weights of ids are in `tokens.py`.
"""

import os
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.data.base import Tokenizer, begin_ids
from jaxgpt.data.config import BPE_SAMPLE_BYTES, SHARD_TOKENS, DataConfig
from jaxgpt.data.documents import Place, Source, open_source
from jaxgpt.data.encoding import encode_pieces, make_tokenizer
from jaxgpt.data.preparation import Prepared, begun, digest_of, finished, request_of, told, wipe
from jaxgpt.data.shards import TOKENIZER
from jaxgpt.data.shardwriter import ShardWriter, damaged, write_progress
from jaxgpt.data.tokenizer import load_tokenizer
from jaxgpt.errors import ConfigError, ResourceError

SAVE_S, SAY_S = 30.0, 5.0


def prepare(
    folder: str | Path,
    data: DataConfig,
    *,
    shard_tokens: int = SHARD_TOKENS,
    workers: int | None = None,
    bpe_sample: int = BPE_SAMPLE_BYTES,
    check: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
) -> Prepared:
    """Makes a folder of prepared tokens, or goes on with one; a finished one is left as it is.

    Args:
      folder: To be made; empty, or begun by the same call.
      data: The text, its tokenizer, and the share that is held out.
      shard_tokens: The most ids of a file, unless a single piece of text has more.
      workers: Threads that encode; None: one for each core.
      bpe_sample: Bytes at the beginning of the text that a `bpe` is trained on.
      check: Called often; what it raises ends the work, which is saved before.
      say: Called with a line every few seconds.

    Raises:
      ConfigError: Options that do not fit, a text that cannot be read or encoded, too small a one,
        or another folder under this name.
      ResourceError: The system or the hub refused.
    """
    folder = Path(folder)
    for name, value in (("shard_tokens", shard_tokens), ("bpe_sample", bpe_sample)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    workers = (os.cpu_count() or 1) if workers is None else workers
    if workers < 1:
        raise ConfigError(f"workers={workers} must be at least 1")
    _check_data(data)
    source = open_source(data, check)
    request = request_of(data, source, shard_tokens, bpe_sample)
    if done := finished(folder, request):
        return done
    progress = begun(folder, request)
    source.revision = progress.get("revision")
    tokenizer = _tokenizer(folder, data, source, progress, bpe_sample, check)
    writer = ShardWriter(folder, tokenizer.vocab_size, shard_tokens)
    with closing(writer):
        _write(writer, source, tokenizer, progress, workers, check, say)
        _check_parts(writer, data, progress)
        facts = {
            "tokenizer": tokenizer.fingerprint,
            "tokenizer_kind": tokenizer.kind,
            "eot_id": tokenizer.eot_id,
            "val_fraction": data.val_fraction,
        }
        writer.commit(facts, digest_of(request))
    return told(folder, new=True)


def _write(
    writer: ShardWriter,
    source: Source,
    tokenizer: Tokenizer,
    progress: dict[str, Any],
    workers: int,
    check: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Encodes the stream from where the progress is, and writes it."""
    if "parts" in progress:
        writer.resume(progress)
    pieces = source.pieces(Place(*progress["place"]), progress["piece"])
    separator, begin = _separator(tokenizer), np.array(begin_ids(tokenizer), np.int32)
    began = saved = said = time.monotonic()
    before = writer.total("bytes")
    try:
        with closing(pieces), closing(encode_pieces(pieces, tokenizer, workers)) as encoded:
            for piece in encoded:
                part = writer.parts[piece.held_out]
                front = [begin] if part.is_empty else [separator, begin]
                ids = np.concatenate([*front, piece.ids]) if piece.fresh else piece.ids
                full = writer.add(piece.held_out, ids, piece.n_chars, piece.n_bytes)
                progress |= {"place": piece.place, "piece": piece.number + 1}
                check()
                now = time.monotonic()
                if full or now - saved > SAVE_S:
                    writer.save(progress | {"revision": source.revision})
                    saved = now
                if now - said > SAY_S:
                    n_bytes, said = writer.total("bytes"), now
                    speed = (n_bytes - before) / 1e6 / (now - began)
                    say(
                        f"{n_bytes / 1e6:,.0f} MB, {writer.total('tokens'):,} tokens, "
                        f"{sum(len(part.done) for part in writer.parts)} shards, {speed:.1f} MB/s"
                    )
    except BaseException:
        with suppress(ResourceError):
            writer.save(progress | {"revision": source.revision})
        raise


def _separator(tokenizer: Tokenizer) -> np.ndarray:
    if tokenizer.eot_id is not None:
        return np.array([tokenizer.eot_id], np.int32)
    try:
        return tokenizer.encode("\n")
    except ConfigError:
        return np.zeros(0, np.int32)


def _check_data(data: DataConfig) -> None:
    if data.format != "text":
        raise ConfigError(
            f"format={data.format} has weights, which prepared tokens have not",
            fix="train on the rows themselves: python train.py --data.path=FILE",
        )
    if data.mixture is not None or data.mask_documents:
        raise ConfigError(
            "mixture and mask_documents say how prepared tokens are read",
            fix="give them to train.py",
        )


def _check_parts(writer: ShardWriter, data: DataConfig, progress: dict[str, Any]) -> None:
    """Refuses a text so short that a part of it is empty; nothing of it is kept."""
    empty = [part.name for part in writer.parts if part.is_empty]
    if not empty:
        return
    n_pieces = progress["piece"]
    wipe(writer.folder)
    if not n_pieces:
        raise ConfigError("there is no text", fix="--data.path=FILE with text in it")
    raise ConfigError(
        f"the text has {n_pieces} pieces, and with val_fraction={data.val_fraction} none is for "
        + ("training" if "train" in empty else "validation"),
        fix="--data.val_fraction=0.5, --data.rows=documents where it has rows, or "
        "python train.py --data.path=... for a text as short as this",
    )


def _tokenizer(
    folder: Path,
    data: DataConfig,
    source: Source,
    progress: dict[str, Any],
    bpe_sample: int,
    check: Callable[[], None],
) -> Tokenizer:
    """The folder's tokenizer: made at the first start, the same ever after."""
    path = folder / TOKENIZER
    if "tokenizer" in progress:
        tokenizer = load_tokenizer(path)
        if tokenizer.fingerprint != progress["tokenizer"]:
            raise damaged(folder, f"{TOKENIZER} is another one")
        return tokenizer
    tokenizer = make_tokenizer(data, source, bpe_sample, check)
    tokenizer.save(path)
    progress["tokenizer"] = tokenizer.fingerprint
    write_progress(folder, progress | {"revision": source.revision})
    return tokenizer
