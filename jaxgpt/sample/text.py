# SPDX-License-Identifier: Apache-2.0
"""Text in, text out: prompts to ids, ids to text as it becomes certain, stop strings.

Left out: where model and tokenizer come from, and what a terminal shows (the command line).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.data.base import Tokenizer, begin_ids, end_ids
from jaxgpt.data.tokenizer import StreamDecoder
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig
from jaxgpt.sample.generate import Chunk, stream
from jaxgpt.shapes import Params

MAX_SAMPLES = 65_536
"""Samples side by side; a number that no memory holds is a mistake, to be named as one."""


class Piece(NamedTuple):
    """The next text of one sample.

    Attributes:
      sample: Number of the sample.
      text: May be empty.
      last: Nothing comes after it.
    """

    sample: int
    text: str
    last: bool


def stream_text(
    cfg: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | np.ndarray,
    *,
    samples: int = 1,
    stop: Sequence[str] = (),
    watch: Callable[[Chunk], None] | None = None,
    **options: Any,
) -> Iterator[Piece]:
    """Continue a text, piece by piece; the prompt and the token that ends it are not in the pieces.

    Args:
      cfg: The model.
      params: Its parameters.
      tokenizer: The tokenizer that it was trained with.
      prompt: Where the text begins, behind what the tokenizer begins every text with (BOS); empty:
        see `start_ids`. Or ids, which are taken as they are: `tokenizer.chat(messages)`.
      samples: Different continuations, computed side by side.
      stop: A text ends before the first of these to be complete.
      watch: Called with each chunk of ids, before its text is handed on.
      **options: Further arguments of `jaxgpt.sample.generate.stream`.

    Raises:
      ConfigError: At the call: the prompt cannot be encoded, or an option cannot be.
    """
    if samples < 1:
        raise ConfigError(f"num_samples={samples} is too small", fix="--num-samples=1")
    if samples > MAX_SAMPLES:
        what = f"num_samples={samples} is more than {MAX_SAMPLES} side by side"
        raise ConfigError(what, fix="fewer at a time, each time with another --seed")
    given = [int(i) for i in (tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)]
    rows = [_Row(tokenizer, given, stop) for _ in range(samples)]
    start = [*begin_ids(tokenizer), *given] if isinstance(prompt, str) else given
    chunks = stream(
        cfg,
        params,
        [start if given else start_ids(tokenizer)] * samples,
        stop_ids=end_ids(tokenizer),
        until=lambda row, new: rows[row].take(new),
        **options,
    )
    return _pieces(rows, chunks, watch)


def _pieces(
    rows: Sequence["_Row"], chunks: Iterator[Chunk], watch: Callable[[Chunk], None] | None
) -> Iterator[Piece]:
    ids: list[list[int]] = [[] for _ in rows]
    ended = [False] * len(rows)
    for chunk in chunks:
        if watch is not None:
            watch(chunk)
        for sample, length in enumerate(chunk.lengths_B):
            ids[sample] += chunk.ids_BC[sample, :length].tolist()
            rows[sample].take(ids[sample])
            if not ended[sample]:
                ended[sample] = bool(chunk.finished_B[sample])
                yield rows[sample].piece(sample, ended[sample])
    for sample in range(len(rows)):
        if not ended[sample]:
            yield rows[sample].piece(sample, True)


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """What stands before an empty prompt.

    What the tokenizer begins every text with, else its BOS token, else end-of-text, else a newline,
    else the first token.
    """
    if begin := begin_ids(tokenizer):
        return list(begin)
    for token in (getattr(tokenizer, "bos_id", None), tokenizer.eot_id):
        if token is not None:
            return [token]
    try:
        return [int(i) for i in tokenizer.encode("\n")]
    except ConfigError:
        return [0]


class _Row:
    """The text of one sample so far: ids that were read, and what may be shown of them."""

    def __init__(self, tokenizer: Tokenizer, given: Sequence[int], stop: Sequence[str]):
        self._ends, self._stop = frozenset(end_ids(tokenizer)), StopStrings(stop)
        self._decoder = StreamDecoder(tokenizer)
        for token in given:  # the first new token continues the prompt's text
            self._decoder.push(token)
        self._read, self._text = 0, ""

    def take(self, ids: Sequence[int]) -> bool:
        """Read the ids that are new since the last call; True once a stop string is complete."""
        for token in ids[self._read :]:
            if token not in self._ends:
                self._text += self._stop.push(self._decoder.push(token))
        self._read = len(ids)
        return self._stop.found

    def piece(self, sample: int, last: bool) -> Piece:
        """What is new since the last call."""
        if last:
            self._text += self._stop.push(self._decoder.flush()) + self._stop.flush()
        text, self._text = self._text, ""
        return Piece(sample, text, last)


class StopStrings:
    """Passes a stream of text on up to the first stop string, wherever the text is cut into pieces.

    The first is the one that is complete first; of several, the longest.

    Args:
      stops: The strings.

    Attributes:
      found: A stop string is complete; nothing more is passed on.

    Raises:
      ConfigError: An empty one.
    """

    def __init__(self, stops: Sequence[str]):
        if "" in stops:
            raise ConfigError("an empty stop string", fix="leave --stop out")
        self._stops, self._held, self.found = tuple(stops), "", False

    def push(self, text: str) -> str:
        """Take the next text; returns what can no longer belong to a stop string."""
        if self.found:
            return ""
        held = self._held + text
        ends = [(i + len(s), i) for s in self._stops if (i := held.find(s)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return held[: min(ends)[1]]
        keep = max(
            (n for s in self._stops for n in range(1, len(s)) if held.endswith(s[:n])), default=0
        )
        cut = len(held) - keep
        self._held = held[cut:]
        return held[:cut]

    def flush(self) -> str:
        """The text is at its end: what was held back."""
        held, self._held = self._held, ""
        return held
