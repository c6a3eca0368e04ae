# SPDX-License-Identifier: Apache-2.0
"""What there is to score: texts and documents, and the data sets of tasks, local or of the hub.

Left out: which sets there are (`tasks.py`).
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.data.base import Tokenizer
from jaxgpt.data.corpus import read_corpus, unreadable
from jaxgpt.data.files import read_rows
from jaxgpt.data.hub import WORDS, ask
from jaxgpt.data.packing import Boundary
from jaxgpt.data.shards import is_token_folder, open_token_folder
from jaxgpt.errors import ConfigError

HUB_TIMEOUT_S = 10.0  # without progress


@dataclasses.dataclass(frozen=True)
class HubSet:
    """A data set of the hub.

    Attributes:
      repo: OWNER/NAME.
      subset: Its configuration.
      split: Its part.
      column: The one that is read; None: whole rows.
      revision: A branch, tag or commit; None: the newest.
    """

    repo: str
    subset: str | None = None
    split: str = "test"
    column: str | None = "text"
    revision: str | None = None


def read_documents(
    path: str | Path, tokenizer: Tokenizer, limit: int | None = None
) -> tuple[Sequence[str | np.ndarray], dict[str, str]]:
    """The documents that a path names.

    A file of rows (.jsonl, .parquet) has one in each, in the column `text`; any other file is one;
    a folder has one in each file. A folder of prepared tokens has its validation ids, else those of
    training, cut where a document begins.

    Args:
      path: A file or a folder.
      tokenizer: The model's.
      limit: So many documents from the beginning; of a text that is one document, lines.

    Returns:
      Texts or ids, and what tells them from others.

    Raises:
      ConfigError: Nothing there, no text, or tokens that another tokenizer has made.
      ResourceError: The system refused to read.
    """
    if is_token_folder(path):
        folder = open_token_folder(path, tokenizer)
        ids = folder.val if len(folder.val) else folder.train
        return [*_split(ids[0 : len(ids)], tokenizer)][:limit], {"sha256": folder.source}
    corpus = read_corpus(path, rows="documents")
    texts = [text for text in corpus.documents if text]
    texts = [first_lines(texts[0], limit)] if len(texts) == 1 else texts[:limit]
    return [*texts], {"sha256": corpus.fingerprint}


def first_lines(text: str, limit: int | None) -> str:
    """The first lines of a text, their ends included; None: all."""
    return text if limit is None else "".join(text.splitlines(keepends=True)[:limit])


def _split(ids: np.ndarray, tokenizer: Tokenizer) -> list[np.ndarray]:
    try:
        begins = Boundary.of(tokenizer).begins(ids[None])[0]
    except ConfigError:  # nothing marks a document: there is one
        return [ids]
    return np.split(ids, np.flatnonzero(begins)[1:])


def set_text(task: str, hub: HubSet | None, path: str | Path | None) -> tuple[str, dict[str, str]]:
    """The lines of a task's text, each with its end.

    Args:
      task: Its name, for messages.
      hub: Where the hub has it.
      path: A local file instead.

    Raises:
      ConfigError: No such file, or no text.
      ResourceError: The hub cannot be reached, or the system refused to read.
    """
    if path is not None:
        _check_file(task, Path(path))
        corpus = read_corpus(path)
        return corpus.documents[0], {"file": str(path), "sha256": corpus.fingerprint}
    rows, facts = _hub_rows(task, hub)
    return "".join(row.rstrip("\n") + "\n" for row in rows), facts


def set_rows(
    task: str,
    hub: HubSet | None,
    path: str | Path | None,
    parse: Callable[[str], list[dict[str, Any]]] | None = None,
) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, str]]:
    """The rows of a task, each with where it is for messages.

    Args:
      task: Its name, for messages.
      hub: Where the hub has it.
      path: A local file of rows instead, or of text that `parse` knows.
      parse: What makes rows of a text.

    Raises:
      ConfigError: No such file, or not of this form.
      ResourceError: The hub cannot be reached, or the system refused to read.
    """
    if path is None:
        rows, facts = _hub_rows(task, hub)
        return [(f"row {number} of {facts['repo']}", row) for number, row in enumerate(rows)], facts
    file = Path(path)
    try:
        _check_file(task, file)
        facts = {"file": str(path), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        if parse is not None and file.suffix == ".txt":
            text = read_corpus(file).documents[0]
            made = enumerate(parse(text), 1)
            return [(f"question {number} of {file}", row) for number, row in made], facts
        return read_rows(file, encoding="utf-8", errors="strict"), facts
    except OSError as error:
        raise unreadable(file, error) from error


def _check_file(task: str, file: Path) -> None:
    if not file.is_file():
        raise ConfigError(f"there is no file {file}", fix=f"--tasks {task}=FILE")


def _hub_rows(task: str, hub: HubSet | None) -> tuple[list[Any], dict[str, str]]:
    if hub is None:
        raise ConfigError(
            f"{task} is no set of the hub that can be read", fix=f"--tasks {task}=FILE"
        )
    words = {"local": f"--tasks {task}=FILE", "patience": None, "named": f"--tasks {task}=FILE"}
    asked = dataclasses.asdict(hub) | {"type": "dataset", "stream": False, "max_chars": None}
    rows: list[Any] = []
    message: dict[str, Any] = {}
    for message in ask(WORDS | words | asked, HUB_TIMEOUT_S, lambda: None):
        rows += message.get("rows", ())
    return rows, {"repo": hub.repo, "commit": message["revision"]}


def field(where: str, row: dict[str, Any], name: str, kind: type) -> Any:
    """One column of a row.

    Raises:
      ConfigError: It is not there, or of another type.
    """
    value = row.get(name)
    if isinstance(value, kind):
        return value
    found: Sequence[str] = sorted(row)
    what = f"{where} has no {kind.__name__} {name!r}, but {', '.join(found) or 'nothing'}"
    raise ConfigError(what, fix="a file with the columns that docs/evaluation.md names")
