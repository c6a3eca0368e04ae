# SPDX-License-Identifier: Apache-2.0
"""What a folder of prepared tokens was asked for, and how far it is: nothing, begun, or finished.

Left out: the work itself (`prepare.py`), and the files (`shardwriter.py`).
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.data.config import DataConfig
from jaxgpt.data.documents import START, Source
from jaxgpt.data.shards import MANIFEST, PROGRESS, TOKENIZER, read_manifest
from jaxgpt.data.shardwriter import read_progress, write_progress
from jaxgpt.errors import ConfigError, ResourceError

NOT_OURS = ("mixture", "mask_documents", "format", "vocab_size", "stream", "hub_timeout")
"""Fields of DataConfig that do not decide the bytes; `vocab_size` does where a bpe is trained."""


class Prepared(NamedTuple):
    """What a folder holds.

    Attributes:
      tokens: Ids of both parts.
      val_tokens: Those for validation.
      bytes: Of the text in UTF-8.
      shards: Files.
      new: Whether anything was done.
    """

    tokens: int
    val_tokens: int
    bytes: int
    shards: int
    new: bool


def request_of(data: DataConfig, source: Source, shard_tokens: int, sample: int) -> dict[str, Any]:
    """All that decides the bytes of the folder, but for the tokenizer's own, as plain data."""
    asked = {name: value for name, value in vars(data).items() if name not in NOT_OURS}
    if data.tokenizer == "bpe":
        asked |= {"vocab_size": data.vocab_size, "bpe_sample": sample}
    asked |= {"shard_tokens": shard_tokens, "files": source.inventory}
    return json.loads(json.dumps(asked))


def digest_of(request: dict[str, Any]) -> str:
    """sha256 of a request, for `tokens.json`."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def finished(folder: Path, request: dict[str, Any]) -> Prepared | None:
    """What is in a finished folder; None where it is not finished; ConfigError for another one."""
    try:
        if not (folder / MANIFEST).is_file():
            return None
        found = read_manifest(folder)
    except OSError as error:
        raise ResourceError(f"cannot read {folder}: {error.strerror}") from error
    if found.get("request") != digest_of(request):
        raise ConfigError(
            f"{folder} holds tokens that were made of another text or with other options",
            fix="another folder, or delete this one",
        )
    return told(folder, new=False)


def told(folder: Path, *, new: bool) -> Prepared:
    """What `tokens.json` says."""
    found = read_manifest(folder)
    shards = [*found["train"], *found["val"]]
    tokens, n_bytes = (sum(shard[key] for shard in shards) for key in ("tokens", "bytes"))
    val_tokens = sum(shard["tokens"] for shard in found["val"])
    return Prepared(tokens, val_tokens, n_bytes, len(shards), new)


def begun(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """How far a folder is; a new one is made, and says from now on what it is for.

    A folder without a finished file has nothing to lose, and may be asked for something else.

    Raises:
      ConfigError: It is something else, or was begun with another request.
      ResourceError: The system refused to write.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        strangers = [file.name for file in folder.iterdir() if file.name != ".lock"]
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"no folder can be at {folder}", fix="another name for it") from None
    except OSError as error:
        raise ResourceError(f"cannot write {folder}: {error.strerror}") from error
    progress = read_progress(folder, _is_whole)
    if progress is None and strangers:
        raise ConfigError(
            f"{folder} is not empty: it has {', '.join(sorted(strangers)[:5])}",
            fix="another folder for the tokens",
        )
    if progress is not None and progress["request"] != request:
        old = progress["request"]
        if any(part["done"] for part in progress.get("parts", {}).values()):
            changed = [
                "the text's files" if key == "files" else f"{key}: {old.get(key)} -> {value}"
                for key, value in request.items()
                if old.get(key) != value
            ]
            raise ConfigError(
                f"the folder was begun with other values: {', '.join(changed) or 'more options'}",
                where=str(folder),
                fix="the same as before, or delete the folder",
            )
        wipe(folder)
        progress = None
    if progress is None:
        progress = {"request": request, "place": list(START), "piece": 0}
        write_progress(folder, progress)
    return progress


def _is_whole(progress: Any) -> bool:
    parts = progress.get("parts", {}).values()
    numbers = [*progress["place"], progress["piece"]]
    numbers += [part[key] for part in parts for key in ("tokens", "chars", "bytes")]
    return (
        isinstance(progress["request"], dict)
        and len(progress["place"]) == 3
        and all(type(number) is int and number >= 0 for number in numbers)
        and all({"file", "tokens"} <= shard.keys() for part in parts for shard in part["done"])
    )


def wipe(folder: Path) -> None:
    """Removes what an earlier start wrote."""
    for pattern in ("*.bin", ".*.bin.part", TOKENIZER, PROGRESS):
        for file in folder.glob(pattern):
            file.unlink()
