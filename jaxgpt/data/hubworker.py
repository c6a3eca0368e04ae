# SPDX-License-Identifier: Apache-2.0
"""The process that reads a data set of the Hugging Face hub; `hub.py` starts and watches it.

Calls into the hub's client can block for minutes, retry, and fall back to another revision without
a word, and a thread that blocks cannot be ended. So they are made here, in a process of their own
that imports nothing of jaxgpt. It takes one JSON object on stdin and writes JSON objects, one a
line: `{}` where bytes arrived or work was done, `{"rows": [...]}`, and at last `{"revision": ...}`
or `{"error": ..., "bad_input": ...}`. It ends when its stdin is closed: its parent is gone.

Left out: sets of several columns, pictures and sound.
"""

import itertools
import json
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

MESSAGE_CHARS = 1 << 20  # of rows that are sent together
BEAT_S = 0.5
WORKING_S = 0.02  # processor time within BEAT_S from which this process counts as at work


class Refused(Exception):
    """The set cannot be had: what is wrong, and whether another command would put it right."""

    def __init__(self, what: str, *, bad_input: bool):
        super().__init__(what)
        self.bad_input = bad_input


def rows(request: dict[str, Any]) -> Iterator[str | None]:
    """Texts of one column, row by row; then the revision that they are of, as StopIteration.value.

    Args:
      request: `repo`, `revision` (None: main), `subset`, `split`, `column`, `stream`, `timeout_s`.

    Raises:
      Refused: There is no such column.
    """
    import datasets

    repo, revision, split = request["repo"], request["revision"], request["split"]
    offline = datasets.config.HF_HUB_OFFLINE
    if not offline:  # one request that fails at once where `datasets` would retry
        revision = _resolved(repo, revision, request["timeout_s"])
    builder = datasets.load_dataset_builder(repo, request["subset"], revision=revision)
    if revision not in (None, builder.hash):  # `datasets` took what it had without saying so
        raise Refused(
            f"of {repo} only revision {builder.hash} is cached, not {revision}"
            if offline
            else f"the hub failed while {repo} at {revision} was looked up",
            bad_input=False,
        )
    if request["stream"]:
        found = builder.as_streaming_dataset(split=split)
    else:
        builder.download_and_prepare()
        found = builder.as_dataset(split=split)
    columns, column = found.column_names, request["column"]
    if columns is not None and column not in columns:
        raise Refused(
            f"{repo} has no column {column!r}; it has {', '.join(columns)}", bad_input=True
        )
    for row in found if columns is None else found.select_columns([column]):
        yield row.get(column)
    return builder.hash


def _resolved(repo: str, revision: str | None, timeout_s: float) -> str:
    """The commit that a branch or tag is at now; the errors of a gated set."""
    from huggingface_hub import HfApi

    api = HfApi()
    info = api.dataset_info(repo, revision=revision, timeout=timeout_s)
    if info.gated:
        api.auth_check(repo, repo_type="dataset")
    return info.sha or "main"


def reason(error: Exception, repo: str) -> Refused:
    """What went wrong, in words, without the client's page of advice."""
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
    from huggingface_hub import constants, errors

    if isinstance(error, Refused):
        return error
    if isinstance(error, DatasetGenerationError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    hub = constants.ENDPOINT
    line = " ".join(str(error).split())[:300]
    if isinstance(error, errors.GatedRepoError) or "is a gated dataset" in line:
        return Refused(
            f"{repo} is gated: ask for access at {hub}/datasets/{repo} and set HF_TOKEN",
            bad_input=True,
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return Refused(f"{repo} has no such revision", bad_input=True)
    if isinstance(error, errors.RepositoryNotFoundError | DatasetNotFoundError):
        return Refused(f"no data set {repo} on {hub}, or it is private", bad_input=True)
    if status == 401:
        return Refused(f"{hub} refuses the token in HF_TOKEN (401)", bad_input=True)
    if status == 429:
        return Refused(
            f"{hub} limits the rate of requests (429): wait, or set HF_TOKEN", bad_input=False
        )
    if status is not None:
        return Refused(f"{hub} answers {status} for {repo}", bad_input=False)
    if isinstance(error, ConnectionError) and "OfflineMode" in line or "offline mode" in line:
        return Refused(f"{repo} is not cached, and HF_HUB_OFFLINE is set", bad_input=False)
    if isinstance(error, OSError) and error.errno is not None:
        return Refused(f"cannot store {repo}: {error.strerror}", bad_input=False)
    if type(error).__name__ in ("ConnectError", "ConnectTimeout", "ReadTimeout"):
        return Refused(f"cannot reach {hub} for {repo}: {line}", bad_input=False)
    # Of `datasets`: an unknown subset or split, with those there are; a set that is a script.
    bad_input = isinstance(error, ValueError | RuntimeError)
    return Refused(f"cannot load {repo}: {line or type(error).__name__}", bad_input=bad_input)


def count_received(count: Callable[[], None]) -> None:
    """Have `count` called whenever a socket of this process has received something."""
    for owner, name in (
        (socket.socket, "recv"),
        (socket.socket, "recv_into"),
        (ssl.SSLSocket, "read"),
    ):

        def receive(*args: Any, inner: Callable = getattr(owner, name), **options: Any) -> Any:
            result = inner(*args, **options)
            if result:
                count()
            return result

        setattr(owner, name, receive)


def main() -> None:
    """Serve the one request on stdin."""
    request = json.loads(sys.stdin.readline())
    out, lock = os.fdopen(os.dup(1), "w"), threading.Lock()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing else may speak here

    def send(**message: Any) -> None:
        with lock:
            out.write(json.dumps(message) + "\n")
            out.flush()

    received = itertools.count(1)
    n_received = 0

    def count() -> None:
        nonlocal n_received
        n_received = next(received)

    def beat() -> None:
        known, used_s = 0, 0.0
        while True:
            time.sleep(BEAT_S)
            if n_received != known or time.process_time() - used_s > WORKING_S:
                send()
            known, used_s = n_received, time.process_time()

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(1)

    count_received(count)
    for watch in (beat, end_with_parent):
        threading.Thread(target=watch, daemon=True).start()
    try:
        _serve(request, send)
    except Exception as error:
        refused = reason(error, request["repo"])
        send(error=_without_token(str(refused)), bad_input=refused.bad_input)
    os._exit(0)  # threads of the client may still wait for something


def _serve(request: dict[str, Any], send: Callable[..., None]) -> None:
    source, left, revision = rows(request), request["max_chars"], None
    n_rows, batch, size = 0, [], 0
    while left is None or left > 0:
        try:
            text = next(source)
        except StopIteration as end:
            revision = end.value
            break
        if text is None:
            continue
        if not isinstance(text, str):
            kind = type(text).__name__
            raise Refused(f"column {request['column']!r} holds {kind}, not text", bad_input=True)
        batch.append(text)
        size, n_rows = size + len(text) + 1, n_rows + 1
        left = None if left is None else left - len(text)
        if size >= MESSAGE_CHARS:
            send(rows=batch)
            batch, size = [], 0
    send(rows=batch)
    send(revision=revision)


def _without_token(line: str) -> str:
    from huggingface_hub import get_token

    token = get_token()
    return line.replace(token, "***") if token else line


if __name__ == "__main__":
    main()
