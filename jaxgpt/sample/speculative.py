# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: a small model drafts tokens, and one pass of the large one judges them all.

What is drawn has the distribution of the large model's own steps, its filters included; greedy, it
is the same tokens. `rounds.py` says how. Here is the host's side: what a draft is, and a batch that
is drawn with one as far as both contexts reach, and then without.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxgpt.boxes.base import check_positive
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig
from jaxgpt.sample.batch import Batch
from jaxgpt.sample.rounds import draw_rounds
from jaxgpt.shapes import Params


@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """The small model; it must have been trained with the tokenizer of the large one.

    Raises:
      ConfigError: `tokens` is not positive.
    """

    cfg: ModelConfig
    params: Params
    tokens: int = 4  # drafted in a round

    def __post_init__(self) -> None:
        check_positive(draft_tokens=self.tokens)

    def check(self, cfg: ModelConfig) -> None:
        """See that it can draft for a model.

        Raises:
          ConfigError: Its vocabulary has another size, or caches of one of the two cannot grow or
            be rewound.
        """
        if self.cfg.vocab_size != cfg.vocab_size:
            raise ConfigError(
                f"the draft has a vocabulary of {self.cfg.vocab_size} tokens, the model one of "
                f"{cfg.vocab_size}",
                fix="a draft with the model's tokenizer",
            )
        for name, of in (("model", cfg), ("draft", self.cfg)):
            for layer in of.layers:
                cache = type(layer.attention).__name__
                missing = _missing(layer.attention, of, layer)
                if missing:
                    raise ConfigError(
                        f"the cache of the {name}'s {cache} has no method {missing[0]}, which a "
                        "draft needs",
                        fix="see jaxgpt.cache.KVCache, or no draft",
                    )


def _missing(attention: Any, cfg: ModelConfig, layer: Any) -> list[str]:
    """The methods that a cache should have and has not."""
    found = []

    def look() -> tuple:
        cache = attention.init_cache(cfg.dims(layer), 1, 1, jnp.float32)
        found.extend(name for name in ("rewound", "grown") if not hasattr(cache, name))
        return ()

    jax.eval_shape(look)  # nothing is allocated
    return found


class DraftBatch(Batch):
    """A batch that is drawn with a draft, as far as both contexts reach.

    Args:
      cfg: The model.
      params: Its parameters.
      prompts: Token ids of each row.
      draft: The draft.
      max_new_tokens: To be drawn for each row.
      chunk: Tokens of a `draw`, or those of one round where these are more.
      prefill_chunk: Tokens of a prompt that are fed at once.
      **options: As of `Batch`.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params,
        prompts: Sequence[list[int]],
        *,
        draft: Draft,
        max_new_tokens: int,
        chunk: int,
        prefill_chunk: int,
        **options: Any,
    ):
        sizes = dict(chunk=chunk, prefill_chunk=prefill_chunk)
        super().__init__(cfg, params, prompts, max_new_tokens=max_new_tokens, **sizes, **options)
        reach = min(cfg.context_length, draft.cfg.context_length) - max(map(len, prompts))
        self._draft, self._limit = draft, min(max_new_tokens, 1 + reach)
        self._drawn_B = jnp.ones(len(prompts), jnp.int32)
        self._drafting: Batch | None = None
        if self._limit > 1:  # the first token is drawn with the prompt
            # It only feeds the prompts; where the padding ends, tables may differ.
            stops_V = jnp.zeros(draft.cfg.dims().padded_vocab_size, bool)
            options = options | sizes | {"stops_V": stops_V, "max_new_tokens": self._limit}
            self._drafting = Batch(draft.cfg, draft.params, prompts, **options)

    def draw(self) -> tuple[Array, ...]:
        """The next chunk, with `rounds_B` as a fourth array where it was drafted.

        A drafted one is waited for: how far the rows have come decides what is next.
        """
        small = self._drafting
        if small is None:
            return super().draw()
        if self.drawn == 0:
            drawing = super().draw()
            small.draw()  # fills its caches; the token is not used
            for batch in (self, small):
                caches = tuple(_apart(cache, len(self.ids)) for cache in batch.rows.caches)
                batch.rows = batch.rows._replace(caches=caches)
            return drawing
        draft, T = self._draft, self._draft.tokens + 1
        rounds = max(1, self._chunk // T)
        for batch in (self, small):
            # Each round begins behind what is kept and writes T tokens.
            begins = min(int(self._drawn_B.max()) + (rounds - 1) * T, self._limit)
            batch._make_room(sum(batch._widths) - 1 + begins + T)
        self.rows, self._drawn_B, caches, drawn = draw_rounds(
            self._cfg,
            self._params,
            draft.cfg,
            draft.params,
            self.rows,
            self._drawn_B,
            small.rows.caches,
            self._limit,
            tokens=draft.tokens,
            rounds=rounds,
            **self._options,
        )
        small.rows = small.rows._replace(caches=caches)
        finished_B, drawn_B = jax.device_get((self.rows.finished_B, self._drawn_B))
        self.drawn = int(drawn_B[~finished_B].min(initial=self._limit))
        if self.drawn == self._limit:
            caches = tuple(_together(cache) for cache in self.rows.caches)
            self.rows = self.rows._replace(caches=caches)
            self._drafting = None  # with its caches
        return tuple(drawn)


def _apart(cache: Any, batch: int) -> Any:
    """The cache with an index for each row, which a single one has already."""
    if batch == 1:
        return cache
    return cache.replace(index=jnp.full(batch, cache.index))


def _together(cache: Any) -> Any:
    """The cache with one index again, behind the longest row."""
    return cache.replace(index=cache.index.max())
