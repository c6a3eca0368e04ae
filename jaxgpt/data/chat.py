# SPDX-License-Identifier: Apache-2.0
"""Chat templates: conversations to text, where only the template itself can write control tokens.

The template runs in a process of its own (`chatworker.py`), in Jinja's sandbox, with limits of
time, memory and size. Messages are marked before (`controls.py`), so that `<|im_end|>` in a message
is ten characters and ends no turn. Where no message holds such a text, the ids are those of
transformers' `apply_chat_template`.

Left out: messages that are no text, and templates by name.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.data.controls import ANSWER, END_ANSWER, Controls, unmarked
from jaxgpt.errors import ConfigError, ResourceError

CHUNK_CHARS = 1 << 22  # of conversations that one process renders
CPU_S = 5.0  # of one conversation
FIX = "another chat_template.jinja beside tokenizer.json"


class Conversation(NamedTuple):
    """What a template gets.

    Attributes:
      messages: Dicts with `role`, and `content` or `tool_calls`.
      tools: Descriptions of functions, as the template wants them; None without.
      where: Where it was read, for errors.
    """

    messages: Sequence[Any]
    tools: Sequence[Any] | None = None
    where: str | None = None


class Rendered(NamedTuple):
    """What a template has made of a conversation.

    Attributes:
      text: With the marks of `controls.py`.
      answers: Where the assistant's turns are in it, first and last position + 1.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


def render(
    template: str,
    conversations: Sequence[Conversation],
    controls: Controls,
    *,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = False,
    answers: bool = False,
    today: str | None = None,
) -> Iterator[Rendered]:
    """Renders conversations.

    Args:
      template: Jinja.
      conversations: In the order of the result.
      controls: The control tokens that messages must not form.
      variables: What the template may use besides: `bos_token`, or options of its own.
      add_generation_prompt: Ends the text where the assistant's next turn begins.
      answers: Finds the assistant's turns: by `{% generation %}` marks, or where the template has
        none, by what each turn adds to the conversation before it.
      today: ISO date that `strftime_now` tells; None: the true time.

    Raises:
      ConfigError: A message without what the template needs; a template that is wrong, refuses the
        conversation, does not end, writes too much, or reaches for Python; with `answers`, one that
        rewrites what was before.
      ResourceError: The process cannot be started, or was ended by somebody else.
    """
    request = {
        "template": template,
        "variables": dict(variables or {}),
        "add_generation_prompt": add_generation_prompt,
        "answers": answers,
        "marks": ANSWER + END_ANSWER if answers else None,
        "today": today,
        "cpu_s": CPU_S,
    }
    for chunk in _chunks(conversations):
        marked = [
            {
                "messages": controls.mark(check_messages(one.messages, one.where)),
                "tools": controls.mark(one.tools),
            }
            for one in chunk
        ]
        for line in _ask(request | {"conversations": marked}, chunk):
            spans = tuple((first, last) for first, last in line["spans"])
            yield Rendered(line["text"], spans)


def answer_ends(rendered: Rendered, controls: Controls) -> list[tuple[int, int]]:
    """Positions of the answers in the text without marks.

    An answer ends with its last control token where only white space is behind that: the newline
    after an end-of-turn token is the template's, and no model gets to write it.
    """
    pieces = controls.pieces(rendered.text)
    text = "".join(piece.text for piece in pieces)
    found = []
    for first, last in rendered.answers:
        first, last = unmarked(rendered.text, first), unmarked(rendered.text, last)
        for start, name, token in reversed(pieces):
            end = start + len(name)
            if token is not None and first <= start < end <= last and not text[end:last].strip():
                last = end
                break
        found.append((first, last))
    return found


def check_messages(messages: Sequence[Any], where: str | None = None) -> list[dict[str, Any]]:
    """The messages without values that are null: templates ask whether something is there.

    Raises:
      ConfigError: None at all, or one without a role, or with neither content nor tool calls.
    """
    if not messages:
        raise ConfigError("a conversation without messages", where=where)
    found = []
    for number, message in enumerate(messages, 1):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not role.isidentifier():
            raise ConfigError(
                f"message {number} has no role",
                where=where,
                fix='{"role": "user", "content": "..."}',
            )
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise ConfigError(f"message {number} has no content that is text", where=where)
        found.append({key: value for key, value in message.items() if value is not None})
    return found


def _chunks(conversations: Sequence[Conversation]) -> Iterator[list[Conversation]]:
    chunk: list[Conversation] = []
    size = 0
    for one in conversations:
        chunk.append(one)
        size += sum(len(str(message)) for message in one.messages)
        if size > CHUNK_CHARS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _ask(request: dict[str, Any], chunk: Sequence[Conversation]) -> list[dict[str, Any]]:
    """One line of the worker for each conversation."""
    try:
        done = subprocess.run(
            # -P: the worker's folder holds modules with the names of others.
            [sys.executable, "-P", str(Path(__file__).with_name("chatworker.py"))],
            input=_json(request),
            capture_output=True,
            start_new_session=True,  # Ctrl-C is ours
        )
    except OSError as error:
        raise ResourceError(f"cannot start {sys.executable}: {error.strerror}") from error
    lines = [json.loads(line) for line in done.stdout.split(b"\n")[:-1]]
    failed = lines.pop() if lines and "error" in lines[-1] else None
    if failed is None and len(lines) == len(chunk):
        return lines
    where = chunk[min(len(lines), len(chunk) - 1)].where
    if failed:
        what = " ".join(failed["error"].split())[:500]
        raise ConfigError(f"the chat template: {what}", where=where, fix=failed.get("fix", FIX))
    if done.returncode == -signal.SIGPROF:
        raise ConfigError(f"the chat template takes more than {CPU_S:g} s", where=where, fix=FIX)
    raise ResourceError(
        f"the process that renders chat templates ended with {done.returncode}", where=where
    )


def _json(request: dict[str, Any]) -> bytes:
    try:
        return json.dumps(request).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"a conversation is no JSON: {error}") from None
