# SPDX-License-Identifier: Apache-2.0
"""What `data.path` names, wherever it is: here (`corpus.py`) or on the hub (`hub.py`)."""

from collections.abc import Callable

from jaxgpt.data.config import DataConfig
from jaxgpt.data.corpus import Corpus, read_corpus, read_examples
from jaxgpt.data.hub import is_hub, read_hub
from jaxgpt.errors import ConfigError

__all__ = ["is_hub", "read_source"]


def read_source(
    data: DataConfig, *, revision: str | None = None, check: Callable[[], None] = lambda: None
) -> tuple[Corpus, str | None]:
    """Reads the text of a run.

    Args:
      data: Says which.
      revision: Of a hub set: the commit to read, rather than the newest.
      check: Called several times a second while the hub is waited for; may raise.

    Returns:
      The text, and the commit that it is of where it is of the hub.

    Raises:
      ConfigError: Nothing there, not text, or options that are for the hub with a local text.
      ResourceError: The system or the hub refused.
    """
    if is_hub(data.path) and data.format != "text":
        raise ConfigError(
            f"format={data.format} is read from files, and {data.path} is of the hub",
            fix="save its rows as jsonl: datasets.load_dataset(...).to_json('FILE.jsonl')",
        )
    if is_hub(data.path):
        return read_hub(data, revision=revision, check=check)
    if (data.subset, data.split, data.stream) != (None, "train", False):
        raise ConfigError(
            f"subset, split and stream are for sets of the hub, and path={data.path} is none",
            fix="--data.path=hf://OWNER/NAME, or leave them out",
        )
    if data.format != "text":
        examples = read_examples(
            data.path,
            data.format,
            encoding=data.encoding,
            errors=data.errors,
            max_chars=data.max_chars,
        )
        return examples, None
    corpus = read_corpus(
        data.path,
        encoding=data.encoding,
        errors=data.errors,
        column=data.column,
        rows=data.rows,
        max_chars=data.max_chars,
    )
    return corpus, None
