# SPDX-License-Identifier: Apache-2.0
"""Rows of a data set of the hub, by the `datasets` library, in the process of `hubworker.py`.

Left out: pictures and sound.
"""

from collections.abc import Callable, Iterator
from typing import Any

from jaxgpt.data.hubreasons import Refused, resolved

ROWS = 256  # that are sent together


def send_rows(request: dict[str, Any], say: Callable[..., None]) -> dict[str, Any]:
    """Send the `commit`, then a column as `rows`, in groups, up to `max_chars` characters.

    Where `column` is None whole rows are sent, by the names of their columns, and all of them.

    Args:
      request: As for `open_rows`, and `max_chars`, which may be None.
      say: Called with the commit, and with each group.

    Returns:
      The `revision` that they are of.

    Raises:
      Refused: The column holds something other than text, or as for `open_rows`.
    """
    revision, groups = open_rows(request)
    say(commit=revision)
    left = request["max_chars"]
    for group in groups:
        if request["column"] is None:
            say(rows=group)
            continue
        texts = [text for text in group if text is not None]
        for text in texts:
            if not isinstance(text, str):
                kind = type(text).__name__
                raise Refused(
                    f"column {request['column']!r} holds {kind}, not text",
                    fix="--data.column=NAME",
                    bad_input=True,
                )
        say(rows=texts)
        left = None if left is None else left - sum(map(len, texts))
        if left is not None and left <= 0:
            break
    return {"revision": revision}


def open_rows(request: dict[str, Any]) -> tuple[str, Iterator[list[Any]]]:
    """A data set's revision, and the values of one column, or whole rows, in groups of rows.

    Args:
      request: `repo`, `revision` (None: main), `subset`, `split`, `column`, `stream`, `timeout_s`.

    Raises:
      Refused: There is no such column, or not this revision.
    """
    from datasets import config, load_dataset_builder

    repo, revision, split = request["repo"], request["revision"], request["split"]
    offline = config.HF_HUB_OFFLINE
    if not offline:  # one request that fails at once where `datasets` would retry
        revision = resolved(request).sha
    builder: Any = load_dataset_builder(repo, request["subset"], revision=revision)
    if revision not in (None, builder.hash):  # `datasets` took what it had without saying so
        raise Refused(
            f"of {repo} only revision {builder.hash} is cached, not {revision}"
            if offline
            else f"the hub failed while {repo} at {revision} was looked up"
        )
    if request["stream"]:
        found = builder.as_streaming_dataset(split=split)
    else:
        builder.download_and_prepare()
        found = builder.as_dataset(split=split)
    column = request["column"]
    if column is None:
        return builder.hash, (_transposed(group) for group in found.iter(ROWS))
    columns = found.column_names or list(next(iter(found), {}))
    if column not in columns:
        raise Refused(
            f"{repo} has no column {column!r} but {', '.join(columns)}",
            fix="--data.column=NAME",
            bad_input=True,
        )
    return builder.hash, (group[column] for group in found.select_columns([column]).iter(ROWS))


def _transposed(group: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(group, values, strict=True)) for values in zip(*group.values(), strict=True)]
