# SPDX-License-Identifier: Apache-2.0
"""The process that reads a data set of the Hugging Face hub; `hub.py` starts and watches it.

Calls into the hub's client can block for minutes, retry, and fall back to another revision without
a word, and a thread that blocks cannot be ended. So they are made here, in a process of their own
that imports nothing of jaxgpt. It takes one JSON object on stdin and writes JSON objects, one a
line: `{}` where bytes arrived or work was done, `{"rows": [...]}`, and at last `{"revision": ...}`
or `{"error": ..., "fix": ..., "bad_input": ...}`. It ends when its stdin is closed: its parent is
gone.

Left out: sets of several columns, pictures and sound.
"""

import errno
import json
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

ROWS = 256  # that are sent together
STORAGE = {errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EPERM, errno.EROFS}
BEAT_S = 0.5
WORKING_S = 0.02  # processor time within BEAT_S from which this process counts as at work


class Refused(Exception):  # noqa: N818 - a reason, not a fault of ours
    """The set cannot be had.

    Args:
      what: What is wrong.
      fix: What to do.
      bad_input: Whether another command is needed, rather than another hour.
    """

    def __init__(self, what: str, *, fix: str | None = None, bad_input: bool = False):
        super().__init__(what)
        self.fix, self.bad_input = fix, bad_input


def open_rows(request: dict[str, Any]) -> tuple[str, Iterator[list[Any]]]:
    """A data set's revision, and the values of one column in groups of rows.

    Args:
      request: `repo`, `revision` (None: main), `subset`, `split`, `column`, `stream`, `timeout_s`.

    Raises:
      Refused: There is no such column, or not this revision.
    """
    from datasets import config, load_dataset_builder

    repo, revision, split = request["repo"], request["revision"], request["split"]
    offline = config.HF_HUB_OFFLINE
    if not offline:  # one request that fails at once where `datasets` would retry
        revision = _resolved(repo, revision, request["timeout_s"])
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
    columns = found.column_names or list(next(iter(found), {}))
    if column not in columns:
        raise Refused(
            f"{repo} has no column {column!r} but {', '.join(columns)}",
            fix="--data.column=NAME",
            bad_input=True,
        )
    return builder.hash, (group[column] for group in found.select_columns([column]).iter(ROWS))


def _resolved(repo: str, revision: str | None, timeout_s: float) -> str | None:
    """The commit that a branch or tag is at now; the errors of a gated set."""
    from huggingface_hub import HfApi

    api = HfApi()
    info = api.dataset_info(repo, revision=revision, timeout=timeout_s)
    if info.gated:
        api.auth_check(repo, repo_type="dataset")
    return info.sha


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
    line = " ".join(str(error).split())[:300].rstrip(".")
    if isinstance(error, errors.GatedRepoError) or "is a gated dataset" in line:
        fix = f"ask for access at {hub}/datasets/{repo}, and set HF_TOKEN"
        return Refused(f"{repo} is gated", fix=fix, bad_input=True)
    if isinstance(error, errors.RevisionNotFoundError):
        fix = f"--data.path=hf://{repo}"
        return Refused(f"{repo} has no such revision", fix=fix, bad_input=True)
    if isinstance(error, errors.RepositoryNotFoundError | DatasetNotFoundError):
        fix = "--data.path=hf://OWNER/NAME; HF_TOKEN opens private sets"
        return Refused(f"no data set {repo} on {hub}, or it is private", fix=fix, bad_input=True)
    if status == 401:
        fix = "a token of yours, or none"
        return Refused(f"{hub} refuses the token in HF_TOKEN (401)", fix=fix, bad_input=True)
    if status == 429:
        return Refused(
            f"{hub} limits the rate of requests (429)",
            fix="wait, set HF_TOKEN, or --data.path=FILE",
        )
    if status is not None:
        return Refused(f"{hub} answers {status} for {repo}")
    if "OfflineMode" in line or "offline mode" in line:
        return Refused(f"{repo} is not cached, and HF_HUB_OFFLINE is set")
    if isinstance(error, OSError) and error.errno in STORAGE:
        return Refused(f"cannot store {repo}: {error.strerror}", fix="HF_HOME=FOLDER with space")
    if type(error).__name__ in ("ConnectError", "ConnectTimeout", "ReadTimeout"):
        return Refused(f"cannot reach {hub} for {repo}: {line}")
    # Of `datasets`: an unknown subset or split, with those there are; a set that is a script.
    bad_input = isinstance(error, ValueError | RuntimeError)
    fix = (
        "--data.split=NAME"
        if "split" in line
        else "--data.subset=NAME"
        if "onfig" in line
        else None
    )
    return Refused(
        f"cannot load {repo}: {line or type(error).__name__}", fix=fix, bad_input=bad_input
    )


def count_received(count: Callable[[], None]) -> None:
    """Have `count` called whenever a socket of this process has received something."""

    def counting(receive: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            result = receive(*args, **options)
            if result:
                count()
            return result

        return wrapper

    for owner, name in (
        (socket.socket, "recv"),
        (socket.socket, "recv_into"),
        (ssl.SSLSocket, "read"),
    ):
        setattr(owner, name, counting(getattr(owner, name)))


def main() -> None:
    """Serve the one request on stdin."""
    request = json.loads(sys.stdin.readline())
    out, lock = os.fdopen(os.dup(1), "w"), threading.Lock()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing else may speak here

    def send(**message: Any) -> None:
        with lock:
            out.write(json.dumps(message) + "\n")
            out.flush()

    received = [0]

    def count() -> None:
        received[0] += 1

    def beat() -> None:
        known, used_s = 0, 0.0
        while True:
            time.sleep(BEAT_S)
            if received[0] != known or time.process_time() - used_s > WORKING_S:
                send()
            known, used_s = received[0], time.process_time()

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
        send(error=_without_token(str(refused)), fix=refused.fix, bad_input=refused.bad_input)
    os._exit(0)  # threads of the client may still wait for something


def _serve(request: dict[str, Any], send: Callable[..., None]) -> None:
    revision, groups = open_rows(request)
    left = request["max_chars"]
    for group in groups:
        texts = [text for text in group if text is not None]
        for text in texts:
            if not isinstance(text, str):
                kind = type(text).__name__
                raise Refused(
                    f"column {request['column']!r} holds {kind}, not text",
                    fix="--data.column=NAME",
                    bad_input=True,
                )
        send(rows=texts)
        left = None if left is None else left - sum(map(len, texts))
        if left is not None and left <= 0:
            break
    send(revision=revision)


def _without_token(line: str) -> str:
    from huggingface_hub import get_token

    token = get_token()
    return line.replace(token, "***") if token else line


if __name__ == "__main__":
    main()
