# SPDX-License-Identifier: Apache-2.0
"""The process that talks to the Hugging Face hub; `hub.py` starts and watches it.

Calls into the hub's client can block for minutes, retry, and fall back to another revision without
a word, and a thread that blocks cannot be ended. So they are made here, in a process of their own
that imports of jaxgpt only what needs neither jax nor numpy. It takes one JSON object on stdin, of
`type` dataset (`hubrows.py`) or model (`hubfiles.py`), and writes JSON objects, one a line: `{}`
where bytes arrived or work was done, `{"commit": ...}`, `{"rows": [...]}` or
`{"fetching": ..., "n_bytes": ...}`, and at last `{"revision": ..., ...}` or `{"error": ...,
"fix": ..., "bad_input": ...}`. It ends when its stdin is closed: its parent is gone.
"""

import json
import os
import socket
import ssl
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

BEAT_S = 0.5
WORKING_S = 0.02  # processor time within BEAT_S from which this process counts as at work


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
    _serve(request, send)
    os._exit(0)  # threads of the client may still wait for something


def _serve(request: dict[str, Any], send: Callable[..., None]) -> None:
    from jaxgpt.data.hubfiles import fetch_files
    from jaxgpt.data.hubreasons import reason
    from jaxgpt.data.hubrows import send_rows

    serve = {"dataset": send_rows, "model": fetch_files}[request["type"]]
    try:
        send(**serve(request, send))
    except Exception as error:
        refused = reason(error, request)
        send(error=_without_token(str(refused)), fix=refused.fix, bad_input=refused.bad_input)


def _without_token(line: str) -> str:
    from huggingface_hub import get_token

    token = get_token()
    return line.replace(token, "***") if token else line


def _leave_out_init() -> None:
    """Have modules of jaxgpt found without its `__init__.py`, which imports jax."""
    package = types.ModuleType("jaxgpt")
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    sys.modules["jaxgpt"] = package


if __name__ == "__main__":
    _leave_out_init()
    main()
