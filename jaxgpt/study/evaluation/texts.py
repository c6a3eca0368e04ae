# SPDX-License-Identifier: Apache-2.0
"""Perplexity, bits per byte and bits per character of texts, in windows that stay in a document.

The first id of a document has nothing before it. Where the tokenizer puts a BOS before every text,
each window begins with it, for these models break without; then every id is scored. Else a document
begins behind the `prefix`, if there is one, and without one its first id is not scored (and where
windows do not overlap neither is the first of each).

Left out: where texts come from (`reading.py`), and which belong to a task (`tasks.py`).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import DTypeLike

from jaxgpt.data.base import Tokenizer, begin_ids
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig
from jaxgpt.shapes import Params
from jaxgpt.study.evaluation.likelihood import Pair, loglikelihoods
from jaxgpt.study.evaluation.pairs import encode
from jaxgpt.study.evaluation.statistics import Estimate, ratio
from jaxgpt.study.evaluation.windows import windows

LONGEST = 2048  # tokens, of windows that nobody has set


class Part(NamedTuple):
    """What was scored of a window, or of several: nats, and how much text they are of."""

    nats: float
    n_tokens: int
    n_chars: int
    n_bytes: int


@dataclasses.dataclass(frozen=True)
class TextScore:
    """The score of a text or of several.

    Attributes:
      parts: Of each document; of each window where there is one document.
      n_documents: Documents.
      n_windows: Windows.
      n_unscored: Tokens that nothing stood before.
      n_words: Words of the text as its data set counts them; None where none does.
    """

    parts: tuple[Part, ...]
    n_documents: int
    n_windows: int
    n_unscored: int
    n_words: int | None = None

    @property
    def total(self) -> Part:
        """Of all parts."""
        return _sum(self.parts)

    def metrics(self) -> dict[str, Estimate]:
        """All forms of the score by their full names; those of no character are left out."""
        nats, tokens, chars, bytes_ = (np.array(each) for each in zip(*self.parts, strict=True))
        found = {"token_perplexity": ratio(nats, tokens).exponential()}
        found["nats_per_token"] = ratio(nats, tokens)
        if bytes_.sum() and chars.sum():
            found["bits_per_byte"] = ratio(nats, bytes_).scaled(1 / math.log(2))
            found["bits_per_char"] = ratio(nats, chars).scaled(1 / math.log(2))
            if self.n_words:
                a_word = ratio(nats, bytes_).scaled(float(bytes_.sum()) / self.n_words)
                found["word_perplexity"] = a_word.exponential()
        return found


def evaluate_text(
    cfg: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    documents: Iterable[str | np.ndarray],
    *,
    context: int | None = None,
    stride: int | None = None,
    prefix: Sequence[int] = (),
    n_words: int | None = None,
    batch_size: int | None = None,
    dtype: DTypeLike | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TextScore:
    """Score texts.

    Args:
      cfg: The model.
      params: Its parameters.
      tokenizer: The tokenizer that it was trained with.
      documents: Texts, or the ids of some.
      context: Tokens of a window; None: `context_length`, at most 2,048.
      stride: Tokens from one window to the next; None: `context`, that is no overlap.
      prefix: Ids before each document, which are not scored; for tokenizers without a BOS.
      n_words: Words of the text, for `word_perplexity`.
      batch_size: As for `loglikelihoods`.
      dtype: Of the computation; None: that of the embedding.
      progress: Called with the windows done, and all there are.

    Raises:
      ConfigError: A context that the model has not, a stride beyond it, a text that cannot be
        encoded, or nothing to score.
      DivergedError: The model's logits are not finite.
    """
    begin, context = list(begin_ids(tokenizer)), window_size(cfg, context)
    room, lengths = context - len(begin), _Lengths(tokenizer)
    stride = room if stride in (None, context) else stride
    pairs: list[Pair] = []
    sizes: list[tuple[int, ...]] = []
    document_of: list[int] = []
    n_documents = n_unscored = 0
    for document in documents:
        found = _document(tokenizer, lengths, document, [] if begin else list(prefix))
        for window in windows(len(found.ids), room, stride):
            first = max(window.first, found.skip)
            first = first if begin else max(first, window.begin + 1)
            n_unscored += max(0, min(first, window.end) - max(window.first, found.skip))
            if first < window.end:
                scored = slice(first, window.end)
                pairs.append((begin + found.ids[window.begin : first], found.ids[scored]))
                sizes.append((window.end - first, *(int(n[scored].sum()) for n in found.sizes)))
                document_of.append(n_documents)
        n_documents += 1
    if not pairs:
        raise ConfigError("the text has no token to score", fix="a text of at least 2 tokens")
    found = loglikelihoods(
        *(cfg, params, pairs),
        batch_size=batch_size,
        dtype=dtype,
        progress=lambda done: progress(done, len(pairs)),
    )
    parts = [Part(float(-x), *size) for x, size in zip(found.log_probs, sizes, strict=True)]
    if n_documents > 1:
        grouped: dict[int, list[Part]] = {}
        for number, part in zip(document_of, parts, strict=True):
            grouped.setdefault(number, []).append(part)
        parts = [_sum(each) for each in grouped.values()]
    return TextScore(tuple(parts), n_documents, len(pairs), n_unscored, n_words)


def window_size(cfg: ModelConfig, context: int | None) -> int:
    """The tokens of a window; ConfigError where the model has no such context."""
    if context is None:
        return min(cfg.context_length, LONGEST)
    if not 2 <= context <= cfg.context_length:
        raise ConfigError(
            f"context={context} must be between 2 and the model's {cfg.context_length} tokens",
            fix=f"--context={min(cfg.context_length, LONGEST)}",
        )
    return context


class _Document(NamedTuple):
    """Ids, of which the first `skip` are no text, and characters and bytes of each."""

    ids: list[int]
    sizes: tuple[np.ndarray, np.ndarray]
    skip: int


def _document(
    tokenizer: Tokenizer, lengths: "_Lengths", document: str | np.ndarray, prefix: list[int]
) -> _Document:
    text = document if isinstance(document, str) else None
    ids = encode(tokenizer, document) if isinstance(document, str) else [int(i) for i in document]
    begin = list(begin_ids(tokenizer))
    if text is None and ids[: len(begin)] == begin:
        ids = ids[len(begin) :]  # each window has its own
    chars, n_bytes = lengths.of(ids, text)
    zeros = np.zeros(len(prefix), np.int64)
    sizes = np.concatenate([zeros, chars]), np.concatenate([zeros, n_bytes])
    return _Document([*prefix, *ids], sizes, len(prefix))


class _Lengths:
    """Characters and bytes that ids stand for."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[tuple[int, bool], tuple[int, int]] = {}

    def of(self, ids: list[int], text: str | None) -> tuple[np.ndarray, np.ndarray]:
        """Of each id; together exactly those of the text, where there is one.

        The first id bears the difference of a tokenizer that puts a space before a text.
        """
        keys = [(token, text is not None) for token in ids]
        for token, in_text in set(keys) - self._known.keys():
            content = self._tokenizer.token_bytes(token)
            if in_text and not content:  # the name of a control token stands in the text
                content = self._tokenizer.decode([token]).encode()
            n_chars = sum(byte & 0xC0 != 0x80 for byte in content)
            self._known[token, in_text] = n_chars, len(content)
        sizes = np.array([self._known[key] for key in keys], np.int64).reshape(-1, 2)
        if text is not None and ids:
            sizes[0] += [len(text), len(text.encode())] - sizes.sum(0)
        return sizes[:, 0], sizes[:, 1]


def _sum(parts: Iterable[Part]) -> Part:
    return Part(*(sum(each) for each in zip(*parts, strict=True)))
