# SPDX-License-Identifier: Apache-2.0
"""Rows with answers in them: what they must hold, and their ids with a weight for each.

`format=chat`: `{"messages": [{"role": ..., "content": ...}, ...]}`, by the tokenizer's chat
template; the assistant's turns weigh 1, each with its end-of-turn token.
`format=prompt-completion`: `{"prompt": ..., "completion": ...}`; the completion weighs 1, and so
does what ends it: the end-of-text token, or a newline of a tokenizer without one. Everything else
weighs 0: a model reads it, and is not trained to write it.

Left out: preferences, and rows without an answer.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxgpt.data import chat
from jaxgpt.data.base import Tokenizer, begin_ids, no_template
from jaxgpt.errors import ConfigError

# What a template may print as the date: of all days the same one, so that ids do not change. It is
# the day that Llama 3.2's template prints where it cannot ask.
TODAY = "2024-07-26"


@dataclass(frozen=True)
class Example:
    """One row.

    Attributes:
      where: Its line and file, for errors.
      row: Of `chat` the messages and, where there are any, the tools; of `prompt-completion` both
        texts.
      content: The row as JSON, which a fingerprint can be made of.
    """

    where: str
    row: Mapping[str, Any]
    content: str

    @property
    def text(self) -> str:
        """All that it says, for tokenizers that are made of the text and for counting."""
        if "messages" not in self.row:
            return f"{self.row['prompt']}{self.row['completion']}\n"
        contents = (message.get("content") for message in self.row["messages"])
        return "\n".join(c if isinstance(c, str) else json.dumps(c) for c in contents if c) + "\n"


def example(format: str, row: Mapping[str, Any], where: str) -> Example:
    """Checks a row.

    Args:
      format: `chat` or `prompt-completion`.
      row: As it was read; columns that the format does not name are left out.
      where: Its line and file.

    Raises:
      ConfigError: A column that is missing or of another type, or no answer.
    """
    if format == "prompt-completion":
        for name in ("prompt", "completion"):
            if not isinstance(row.get(name), str):
                raise _wrong(row, name, "a text", where)
        if not row["completion"]:
            raise ConfigError("the completion is empty", where=where, fix="leave the row out")
        return _example(where, {name: row[name] for name in ("prompt", "completion")})
    messages, tools = row.get("messages"), row.get("tools")
    if not isinstance(messages, list):
        raise _wrong(row, "messages", "a list", where)
    chat.check_messages(messages, where)
    if not any(message["role"] == "assistant" and _says(message) for message in messages):
        raise ConfigError("no message of the assistant", where=where, fix="leave the row out")
    return _example(where, {"messages": messages} | ({"tools": tools} if tools else {}))


def encode_examples(
    examples: Sequence[Example], tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ids of each row, and 1 (uint8) for each that belongs to an answer.

    Nothing stands between rows but what they end with and begin with themselves.

    Args:
      examples: Of one format.
      tokenizer: For conversations one with a chat template.

    Raises:
      ConfigError: No chat template, a template that cannot render a row (see `chat.render`), or a
        text that cannot be encoded.
    """
    if examples and "messages" in examples[0].row:
        yield from _conversations(examples, tokenizer)
        return
    begin = np.array(begin_ids(tokenizer), np.int32)
    encode_on = getattr(tokenizer, "encode_on", tokenizer.encode)
    if tokenizer.eot_id is not None:
        end = np.array([tokenizer.eot_id], np.int32)
    else:
        try:
            end = encode_on("\n")
        except ConfigError:
            end = np.zeros(0, np.int32)
    for one in examples:
        prompt, completion = one.row["prompt"], one.row["completion"]
        read = np.concatenate([begin, tokenizer.encode(prompt)])
        written = (encode_on if prompt else tokenizer.encode)(completion)
        written = np.concatenate([written, end])
        weights = np.repeat(np.array([0, 1], np.uint8), [len(read), len(written)])
        yield np.concatenate([read, written]), weights


def _conversations(
    examples: Sequence[Example], tokenizer: Any
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    if getattr(tokenizer, "template", None) is None:
        raise no_template(tokenizer.kind)
    controls = tokenizer.controls
    rendered = chat.render(
        tokenizer.template,
        [chat.Conversation(e.row["messages"], e.row.get("tools"), e.where) for e in examples],
        controls,
        variables=tokenizer.variables,
        answers=True,
        today=TODAY,
    )
    for one, made in zip(examples, rendered, strict=True):
        ids, starts = tokenizer.encode_pieces(controls.pieces(made.text))
        weights = np.zeros(len(ids), np.uint8)
        for first, last in chat.answer_ends(made, controls):
            weights[(first <= starts) & (starts < last)] = 1
        if not weights.any():
            raise ConfigError(
                "the chat template writes nothing of the assistant's", where=one.where, fix=chat.FIX
            )
        yield ids, weights


def split_examples(
    examples: Sequence[Example], val_fraction: float
) -> tuple[list[Example], list[Example]]:
    """Whole rows for training and for validation, in their order.

    Those train that lie within the first `1 - val_fraction` of the characters, but at least one;
    the last one validates where there are two and a part is held out at all.
    """
    sizes = [len(one.text) for one in examples]
    cut = int((1 - val_fraction) * sum(sizes))
    n = sum(end <= cut for end in itertools.accumulate(sizes))
    n = min(max(n, 1), len(examples) - (val_fraction > 0 and len(examples) > 1))
    return list(examples[:n]), list(examples[n:])


def _example(where: str, row: dict[str, Any]) -> Example:
    try:
        content = json.dumps(row, ensure_ascii=False)
        content.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(error.object[error.start]):04X}"
        raise ConfigError(f"the lone surrogate {code}", where=where, fix="leave it out") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"no JSON: {error}", where=where) from None
    return Example(where, row, content)


def _says(message: Mapping[str, Any]) -> bool:
    return bool(message.get("content") or message.get("tool_calls"))


def _wrong(row: Mapping[str, Any], name: str, kind: str, where: str) -> ConfigError:
    if name in row:
        what = f"{name} holds {type(row[name]).__name__}, not {kind}"
    else:
        what = f"no {name}, but {', '.join(map(str, row)) or 'nothing'}"
    return ConfigError(what, where=where, fix="docs/data.md shows the rows of each --data.format")
