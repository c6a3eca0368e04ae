# SPDX-License-Identifier: Apache-2.0
"""The other end of `harness.Peer`: answers requests by lines of JSON. Needs nothing but Python."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any


def serve(start: Callable[[dict[str, Any]], tuple[dict[str, Any], Mapping[str, Callable]]]) -> None:
    """Run what is asked for until the asker closes the line.

    Args:
      start: From the settings to what is to be said of this peer, and functions by name. What
        they return becomes an answer. Whatever else is printed goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    facts, functions = start(json.loads(sys.argv[1]))

    def answer(what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    answer(facts)
    for line in sys.stdin:
        request = json.loads(line)
        answer(functions[request.pop("what")](**request))
