# SPDX-License-Identifier: Apache-2.0
"""Texts of the Hugging Face hub: one column of a data set, by the `datasets` library.

The library works in a process of its own (`hubworker.py`), which is ended when it makes no progress
for `data.hub_timeout` seconds, that is receives nothing and computes nothing. A long download that
goes on is never cut off. What was fetched is cached as the library always does it, below HF_HOME;
with HF_HUB_OFFLINE=1 the cache is all that is used. `ask` is that process for models as well
(`interop/hub.py`).

Left out: several sets at once, and files of the hub by their own address.
"""

import contextlib
import json
import math
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from jaxgpt.data.config import DataConfig
from jaxgpt.data.corpus import Corpus, arrange
from jaxgpt.errors import ConfigError, ResourceError

SHORT_NAMES = {
    "wikitext-2": ("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-raw-v1"),
}
SCHEME = "hf://"
POLL_S = 0.2
WORDS = {  # of messages: what is wanted, how it is named, what to do without the hub, who waits
    "noun": "data set",
    "named": "--data.path=hf://OWNER/NAME",
    "local": "--data.path=FILE",
    "patience": "--data.hub_timeout",
}


def is_hub(path: str | Path | None) -> bool:
    """Whether a path names a set of the hub: `hf://OWNER/NAME`, or a short name.

    A file or folder of that short name comes first.
    """
    text = str(path)
    return text.startswith(SCHEME) or (text in SHORT_NAMES and not Path(text).exists())


def read_hub(
    data: DataConfig, *, revision: str | None = None, check: Callable[[], None] = lambda: None
) -> tuple[Corpus, str]:
    """Reads one column of one split, and says of which commit it is.

    Args:
      data: `path` as `is_hub` knows it, optionally with `@REVISION` behind; `subset`, `split`,
        `column`, `rows`, `max_chars`, `stream` and `hub_timeout`.
      revision: A commit that comes before the one in the path and before the newest.
      check: Called several times a second; what it raises ends the reading.

    Returns:
      The text and the commit's hash.

    Raises:
      ConfigError: No such set, subset, split or column; a gated set.
      ResourceError: The hub cannot be reached, stalls, breaks off, or refuses for now.
    """
    request = hub_request(data, revision)
    texts: list[str] = []
    message: dict[str, Any] = {}
    for message in ask(request, data.hub_timeout, check):
        texts += message.get("rows", ())
    documents = arrange(texts, rows=data.rows, max_chars=data.max_chars)
    return Corpus.of(documents, name=request["repo"]), message["revision"]


def hub_request(data: DataConfig, revision: str | None = None) -> dict[str, Any]:
    """What the worker is asked for: see `read_hub`.

    Raises:
      ConfigError: The path names no set.
    """
    repo, subset, named = _parse(str(data.path))
    return WORDS | {
        "type": "dataset",
        "repo": repo,
        "revision": revision or named,
        "subset": data.subset or subset,
        "split": data.split,
        "column": data.column,
        "stream": data.stream,
        "max_chars": data.max_chars,
    }


def _parse(path: str) -> tuple[str, str | None, str | None]:
    """Repository, subset and revision of a path."""
    if path in SHORT_NAMES:
        return *SHORT_NAMES[path], None
    pattern = r"(?:datasets/)?([\w.-]+(?:/[\w.-]+)?)(?:@([\w./-]+))?/?"
    match = re.fullmatch(pattern, path.removeprefix(SCHEME), re.ASCII)
    if not match:
        raise ConfigError(
            f"{path!r} names no data set of the hub", fix="--data.path=hf://OWNER/NAME"
        )
    return match[1], None, match[2]


def ask(
    request: dict[str, Any], timeout_s: float, check: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    """What the worker says, as long as it makes progress; afterwards it is gone.

    Args:
      request: `repo`, `type` and what that type needs (`hubworker.py`), and the words of `WORDS`.
      timeout_s: Seconds without progress until the hub is given up.
      check: Called several times a second; what it raises ends the waiting.

    Yields:
      Its messages, the one with the `revision` last.

    Raises:
      ConfigError: What is asked for is not there, or not for everybody.
      ResourceError: The hub cannot be reached, stalls, breaks off, or refuses for now.
    """
    with contextlib.closing(_messages(request | {"timeout_s": timeout_s}, check)) as messages:
        for message in messages:
            if "error" in message:
                raise _error(request, message)
            yield message
            if "revision" in message:
                return
    raise ResourceError(
        f"the process that reads {request['repo']} ended early",
        fix=f"try again, or {request['local']}",
    )


def _messages(request: dict[str, Any], check: Callable[[], None]) -> Generator[dict[str, Any]]:
    timeout_s = request["timeout_s"]
    worker = subprocess.Popen(
        # -P: the worker's folder holds modules with the names of others.
        [sys.executable, "-P", str(Path(__file__).with_name("hubworker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",  # a folder OWNER/NAME here would be taken for the set
        env=_environment(timeout_s),
        start_new_session=True,  # Ctrl-C is ours
    )
    assert worker.stdin and worker.stdout
    try:
        with contextlib.suppress(BrokenPipeError):  # it is dead; its output ends below
            worker.stdin.write(json.dumps(request).encode() + b"\n")
            worker.stdin.flush()
        rest, heard = b"", time.monotonic()
        while True:
            check()
            if select.select([worker.stdout], [], [], POLL_S)[0]:
                chunk, heard = os.read(worker.stdout.fileno(), 1 << 20), time.monotonic()
                if not chunk:
                    return
                *lines, rest = (rest + chunk).split(b"\n")
                yield from map(json.loads, lines)
            elif time.monotonic() - heard > timeout_s:
                patience = f"raise {request['patience']}, " if request["patience"] else ""
                raise ResourceError(
                    f"the hub has sent nothing of {request['repo']} for {timeout_s:g} s",
                    fix=f"try again, {patience}or {request['local']}",
                )
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.close()


def _environment(timeout_s: float) -> dict[str, str]:
    """Of the worker: its own folder changes, and all bytes come by sockets that it can count."""
    env = dict(os.environ)
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_TOKEN_PATH"):
        if env.get(name):
            env[name] = os.path.abspath(os.path.expanduser(env[name]))
    env["HF_HUB_DISABLE_XET"] = "1"
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        env.setdefault(name, str(math.ceil(timeout_s)))
    return env


def _error(request: dict[str, Any], message: dict[str, Any]) -> ConfigError | ResourceError:
    local = request["local"]
    if message["bad_input"]:
        return ConfigError(message["error"], fix=message["fix"] or local)
    cached = "" if os.environ.get("HF_HUB_OFFLINE") else ", or HF_HUB_OFFLINE=1 for what is cached"
    return ResourceError(message["error"], fix=message["fix"] or local + cached)
