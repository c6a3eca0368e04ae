# SPDX-License-Identifier: Apache-2.0
"""A folder of prepared tokens, as `prepare.py` writes it and a run reads it; nanoGPT's as well.

    DIR/  tokens.json  tokenizer.json  train_00000.bin  train_00001.bin  ...  val_00000.bin  ...

The `.bin` files hold ids and nothing else: little-endian, in the smallest of uint8, uint16 and
uint32 that the vocabulary fits, the files of a part one after the other. `tokens.json` lists them
and is written last: without it the folder is not finished. Having no headers, nanoGPT's `train.bin`
and `val.bin` (uint16) are read by the same code; they do not say what their ids mean, so the caller
names the tokenizer. `meta.pkl` is never read: a pickle can run any code.

Ids outside the vocabulary are refused: up to `CHECKED_IDS` of a folder when it is opened, in larger
ones whenever some are read. The `sha256` of each file is for those who copy folders; opening
compares sizes only.

Left out: writing (`prepare.py`), and weights of single ids (`tokens.py`).
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.data.base import Tokenizer
from jaxgpt.data.shardedids import AGAIN, ShardedIds, mapped_ids
from jaxgpt.data.tokenizer import load_tokenizer
from jaxgpt.data.tokens import token_dtype
from jaxgpt.errors import ConfigError, ResourceError

FORMAT = 1
MANIFEST, PROGRESS, TOKENIZER = "tokens.json", ".progress.json", "tokenizer.json"
NANOGPT = ("train.bin", "val.bin")
FILE_NAME = re.compile(r"(train|val)_[0-9]{5,}\.bin", re.ASCII)
FIELDS = {"format": int, "dtype": str, "vocab_size": int, "tokenizer": str, "tokenizer_kind": str}
FIELDS |= {"source": str, "train": list, "val": list}
ENTRY_FIELDS = {"file": str, "tokens": int, "chars": int, "bytes": int, "sha256": str}
CHECKED_IDS = 1 << 26


@dataclass(frozen=True, eq=False)
class TokenFolder:
    """An open folder of prepared tokens.

    Attributes:
      path: Where it is.
      tokenizer: What made the ids.
      train: Training ids: a read-only map of the file, or `ShardedIds`.
      val: Validation ids, likewise; may be empty.
      vocab_size: Of the tokenizer.
      source: Fingerprint of all ids and of what made them.
      train_chars: Characters of the training text; None where the folder does not say.
      val_chars: The same of the validation text.
      val_bytes: Bytes of the validation text in UTF-8, or None.
      eot_id: The id that stands between documents, or None.
    """

    path: Path
    tokenizer: Tokenizer
    train: np.ndarray | ShardedIds
    val: np.ndarray | ShardedIds
    vocab_size: int
    source: str
    train_chars: int | None
    val_chars: int | None
    val_bytes: int | None
    eot_id: int | None


def is_token_folder(path: str | Path | None) -> bool:
    """Whether a path is a folder of prepared tokens, finished or not, or one of nanoGPT's."""
    names = (MANIFEST, PROGRESS, NANOGPT[0]) if path else ()
    try:
        return any((Path(str(path)) / name).is_file() for name in names)
    except OSError:  # not to be entered, or no possible name
        return False


def open_token_folder(path: str | Path, tokenizer: Tokenizer | None = None) -> TokenFolder:
    """Maps a folder's ids into memory, after a check of what it says of them.

    Args:
      path: The folder.
      tokenizer: The one to be used with it; None: the folder's own. nanoGPT's folders have none.

    Raises:
      ConfigError: Not such a folder, not finished, damaged, made with another tokenizer, or with
        ids outside the vocabulary.
      ResourceError: The system refused to read.
    """
    folder = Path(path)
    try:
        if (folder / MANIFEST).is_file():
            return _open_ours(folder, tokenizer)
        if (folder / PROGRESS).is_file():
            raise ConfigError(
                f"{folder} is not finished", fix="the same `jaxgpt prepare` command goes on with it"
            )
        if (folder / NANOGPT[0]).is_file():
            return _open_nanogpt(folder, tokenizer)
    except OSError as error:
        if isinstance(error, ResourceError):
            raise
        raise ResourceError(f"cannot read {error.filename or folder}: {error.strerror}") from error
    raise ConfigError(f"{folder} holds no prepared tokens", fix=f"jaxgpt prepare {folder} ...")


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `tokens.json` says, every field of the right type.

    Raises:
      ConfigError: It is damaged or of another version.
      OSError: It cannot be read.
    """
    where = folder / MANIFEST
    try:
        found = json.loads(where.read_bytes())
    except (ValueError, RecursionError):
        found = None
    entries: list[Any] = []
    if isinstance(found, dict) and all(type(found.get(k)) is t for k, t in FIELDS.items()):
        entries = [*found["train"], *found["val"]]
    whole = all(
        isinstance(entry, dict)
        and all(type(entry.get(k)) is t for k, t in ENTRY_FIELDS.items())
        and FILE_NAME.fullmatch(entry["file"])
        and entry["tokens"] > 0
        for entry in entries
    )
    if not isinstance(found, dict) or not (entries and whole) or found["format"] != FORMAT:
        raise ConfigError(f"{where} is damaged or of another version", fix=AGAIN)
    eot_id, vocab_size = found.get("eot_id"), found["vocab_size"]
    if found["dtype"] != token_dtype(vocab_size).name or not (
        eot_id is None or (type(eot_id) is int and 0 <= eot_id < vocab_size)
    ):
        raise ConfigError(
            f"{where} is damaged: {found['dtype']}, vocab_size={vocab_size}, eot_id={eot_id!r}",
            fix=AGAIN,
        )
    return found


def _open_ours(folder: Path, tokenizer: Tokenizer | None) -> TokenFolder:
    found = read_manifest(folder)
    own = load_tokenizer(folder / TOKENIZER) if tokenizer is None else tokenizer
    if (found["tokenizer"], found["vocab_size"]) != (own.fingerprint, own.vocab_size):
        raise ConfigError(
            f"{folder} was made with the {found['tokenizer_kind']} tokenizer "
            f"{found['tokenizer'][:12]}, not the {own.kind} tokenizer {own.fingerprint[:12]}",
            fix=AGAIN if tokenizer is None else f"--data.tokenizer={folder / TOKENIZER}",
        )
    dtype = token_dtype(own.vocab_size)
    n_ids = sum(entry["tokens"] for part in ("train", "val") for entry in found[part])
    ids, totals = {}, {}
    for part in ("train", "val"):
        files = [(folder / entry["file"], entry["tokens"]) for entry in found[part]]
        ids[part] = mapped_ids(files, dtype, own.vocab_size, at_once=n_ids <= CHECKED_IDS)
        totals[part] = {k: sum(entry[k] for entry in found[part]) for k in ("chars", "bytes")}
    return TokenFolder(
        path=folder,
        tokenizer=own,
        **ids,
        vocab_size=own.vocab_size,
        source=found["source"],
        train_chars=totals["train"]["chars"],
        val_chars=totals["val"]["chars"],
        val_bytes=totals["val"]["bytes"],
        eot_id=found["eot_id"],
    )


def _open_nanogpt(folder: Path, tokenizer: Tokenizer | None) -> TokenFolder:
    if tokenizer is None:
        pickled = ", and meta.pkl is a pickle, which is not read" * (folder / "meta.pkl").exists()
        raise ConfigError(
            f"{folder} has nanoGPT's train.bin, which does not say what its ids mean{pickled}",
            fix="name what made them: --data.tokenizer=gpt2, or a tokenizer.json",
        )
    dtype = np.dtype("<u2")
    if token_dtype(tokenizer.vocab_size).itemsize > dtype.itemsize:
        raise ConfigError(
            f"nanoGPT's files hold {dtype.name}; the {tokenizer.kind} tokenizer has "
            f"{tokenizer.vocab_size} ids",
            where=str(folder),
            fix="--data.tokenizer=gpt2, or what made the files",
        )
    sizes = {name: (folder / name).stat().st_size for name in NANOGPT if (folder / name).exists()}
    ids = {}
    for name in NANOGPT:
        if odd := sizes.get(name, 0) % dtype.itemsize:
            raise ConfigError(
                f"{folder / name} has {odd} byte too many for {dtype.name}", fix=AGAIN
            )
        files = [(folder / name, sizes[name] // dtype.itemsize)] if sizes.get(name) else []
        at_once = sum(sizes.values()) <= CHECKED_IDS * dtype.itemsize
        ids[Path(name).stem] = mapped_ids(files, dtype, tokenizer.vocab_size, at_once=at_once)
    return TokenFolder(
        path=folder,
        tokenizer=tokenizer,
        **ids,
        vocab_size=tokenizer.vocab_size,
        source=_sampled_fingerprint(folder, sizes),
        train_chars=None,
        val_chars=None,
        val_bytes=None,
        eot_id=tokenizer.eot_id,
    )


def _sampled_fingerprint(folder: Path, sizes: dict[str, int]) -> str:
    """sha256 of the files' sizes and of 64 blocks of each: large files are not read for it."""
    digest = hashlib.sha256(json.dumps(sizes).encode())
    for name, n_bytes in sizes.items():
        with open(folder / name, "rb") as file:
            for i in range(64):
                file.seek(max(n_bytes - (1 << 16), 0) * i // 63)
                digest.update(file.read(1 << 16))
    return digest.hexdigest()
