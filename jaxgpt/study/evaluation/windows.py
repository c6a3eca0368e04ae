# SPDX-License-Identifier: Apache-2.0
"""Windows over a text that is longer than a model's context: each id is scored once.

A window of at most `context` ids begins every `stride` ids, and scores what no window before it
has. With stride = context they do not overlap; a smaller stride costs context / stride times as
much, and then every id behind the first window has at least context - stride ids before it.

Source: https://huggingface.co/docs/transformers/perplexity
"""

from collections.abc import Iterator
from typing import NamedTuple

from jaxgpt.errors import ConfigError


class Window(NamedTuple):
    """Ids `begin` to `end`, of which those from `first` on are scored."""

    begin: int
    first: int
    end: int


def windows(length: int, context: int, stride: int) -> Iterator[Window]:
    """The windows of a text; `first` of them in a row cover it without a gap.

    Args:
      length: Of the text, in ids.
      context: Ids of a window.
      stride: From one beginning to the next, at most `context`.

    Raises:
      ConfigError: A stride that would leave ids out, or a size below 1.
    """
    if not 1 <= stride <= context:
        raise ConfigError(
            f"stride={stride} must be between 1 and the window of {context} tokens",
            fix=f"--stride={context}, or smaller",
        )
    return _windows(length, context, stride)


def _windows(length: int, context: int, stride: int) -> Iterator[Window]:
    first = 0
    for begin in range(0, length, stride):
        end = min(begin + context, length)
        yield Window(begin, first, end)
        if end == length:
            return
        first = end
