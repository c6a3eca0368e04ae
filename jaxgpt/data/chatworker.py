# SPDX-License-Identifier: Apache-2.0
"""The process that renders chat templates; `chat.py` starts it.

A template is a program that somebody else wrote. Jinja's sandbox keeps it from Python, but not from
running for ever or from filling the memory, so it runs here, in a process of its own that imports
nothing of jaxgpt and that the system ends when it takes too much. It takes one JSON object on stdin
and writes JSON objects, one a line: `{"text": ..., "spans": [...]}` for each conversation, or
`{"error": ...}` for the one at which it stops.

The environment is that of transformers' `apply_chat_template` of 5.24:
`trim_blocks`, `lstrip_blocks`, `break` and `continue`, `raise_exception`, `strftime_now`, `tojson`
without escapes of HTML, and `{% generation %}` around answers.

Left out: named templates, and documents of retrieval.
"""

import datetime
import json
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

MEMORY_BYTES = 1 << 30  # address space of this process
MAX_CHARS = 1 << 24  # of one rendered text

Messages = list[dict[str, Any]]


class Refused(Exception):  # noqa: N818 - a reason, not a fault of ours
    """The conversation cannot be rendered."""


def compile_template(request: dict[str, Any]) -> tuple[Callable[[Messages, bool, Any], str], bool]:
    """Compiles a template.

    Args:
      request: `template`, `variables`, `today` (ISO date, or None for now) and `marks`: the two
        characters to put around what `{% generation %}` holds, or None.

    Returns:
      A function of messages, add_generation_prompt and tools that renders, and whether the
      template marks answers.

    Raises:
      Refused: When called: more than MAX_CHARS.
      jinja2.TemplateError: A mistake in the template, or one that it raises.
    """
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    marked = False

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja's own

        def parse(self, parser: Any) -> nodes.Node:
            nonlocal marked
            line, marked = next(parser.stream).lineno, True
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if request["marks"]:
                first, last = (
                    nodes.Output([nodes.TemplateData(mark)]) for mark in request["marks"]
                )
                body = [first, *body, last]
            return nodes.Scope(body, lineno=line)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = _to_json
    env.globals = {
        "range": env.globals["range"],
        "dict": lambda *args, **items: dict(*args, **items),
        "namespace": _namespace(jinja2),
        "raise_exception": _raise(jinja2),
        "strftime_now": lambda form: _day(request["today"]).strftime(form),
    }
    template = env.from_string(request["template"])

    def render(messages: Messages, add_generation_prompt: bool, tools: Any) -> str:
        parts, size = [], 0
        for part in template.generate(
            **request["variables"],
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        ):
            size += len(part)
            if size > MAX_CHARS:
                raise Refused(f"it writes more than {MAX_CHARS:,} characters")
            parts.append(part)
        return "".join(parts)

    return render, marked


def answers(render: Callable[[Messages, bool], str], messages: Messages) -> dict[str, Any]:
    """The text of a conversation, and where the assistant's turns are in it.

    A turn is what the conversation has more than the one that ends before it and asks for a turn.

    Raises:
      Refused: The text of a conversation does not begin with that of its beginning.
    """
    text, spans = render(messages, False), []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(messages[:number], True), render(messages[: number + 1], False)
            if not (after.startswith(before) and text.startswith(after)):
                raise Refused(
                    f"what it writes before the end of message {number + 1} depends on what comes "
                    "after, so that answers cannot be told apart (it has no {% generation %} marks)"
                )
            spans.append([len(before), len(after)])
    return {"text": text, "spans": spans}


def marked_answers(text: str, marks: str) -> dict[str, Any]:
    """The same of a text in which the template has marked them."""
    spans, clean, start, depth = [], "", 0, 0
    for part in re.split(f"([{marks}])", text):
        if part == marks[0]:
            start, depth = len(clean) if depth == 0 else start, depth + 1
        elif part == marks[1]:
            depth = max(depth - 1, 0)
            if depth == 0:
                spans.append([start, len(clean)])
        else:
            clean += part
    return {"text": clean, "spans": spans}


def run(request: dict[str, Any]) -> None:
    """Works a request off: each conversation's result, or the first error."""
    try:
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])  # its signal ends the process
        import jinja2
    except ImportError:
        say({"error": "jinja2 is not installed", "fix": "pip install 'jinja2>=3.1.6'"})
        return
    try:
        render, marked = compile_template(request)
        for conversation in request["conversations"]:
            signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
            messages, tools = conversation["messages"], conversation["tools"]
            if not request["answers"]:
                text = render(messages, request["add_generation_prompt"], tools)
                say({"text": text, "spans": []})
            elif marked:
                say(marked_answers(render(messages, False, tools), request["marks"]))
            else:
                say(answers(lambda some, ask, tools=tools: render(some, ask, tools), messages))
    except Refused as error:
        say({"error": str(error)})
    except jinja2.TemplateSyntaxError as error:
        say({"error": f"line {error.lineno}: {error.message}"})
    except jinja2.TemplateError as error:
        say({"error": str(error.message)})
    except MemoryError:
        say({"error": f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"})
    except RecursionError:
        say({"error": "it calls itself too deeply"})
    except Exception as error:  # any that a template can make of Python's operators
        say({"error": f"{type(error).__name__}: {error}"})


def say(message: dict[str, Any]) -> None:
    """One line on stdout."""
    print(json.dumps(message), flush=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _day(today: str | None) -> datetime.datetime:
    return datetime.datetime.fromisoformat(today) if today else datetime.datetime.now()


def _raise(jinja2: Any) -> Callable[[Any], None]:
    def raise_exception(message: Any) -> None:
        raise jinja2.TemplateError(str(message))

    return raise_exception


def _namespace(jinja2: Any) -> type:
    """Jinja's namespace without names that Python itself asks objects for."""

    class Namespace(jinja2.utils.Namespace):
        def __init__(*args: Any, **items: Any):
            self, *rest = args
            attributes = dict(*rest, **items)
            for name in attributes:
                _check(name)
            jinja2.utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name: Any, value: Any) -> None:
            _check(name)
            super().__setitem__(name, value)

    def _check(name: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.sandbox.SecurityError(f"a namespace cannot hold {name!r}")

    return Namespace


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    run(json.load(sys.stdin))
