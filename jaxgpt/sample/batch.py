# SPDX-License-Identifier: Apache-2.0
"""A batch of rows from the host's side: what the device is told to do next, chunk by chunk.

First the prompts are fed, in pieces; then tokens are drawn over caches, which grow when they are
full; past the context, over the window that rolls. Nothing here waits for the device.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxgpt.model import ModelConfig
from jaxgpt.sample.filters import needs_counts
from jaxgpt.sample.slots import ROOM, cache_slots, can_grow, grow, prompt_widths
from jaxgpt.sample.steps import PAD_ID, Rows, draw_steps, feed_prompt
from jaxgpt.shapes import Params


class Batch:
    """The rows on the device, and how far they are.

    Args:
      cfg: The model.
      params: Its parameters.
      prompts: Token ids of each row.
      max_new_tokens: To be drawn for each row.
      chunk: Tokens of a `draw`.
      prefill_chunk: Tokens of a prompt that are fed at once.
      **options: Of `draw_steps`: keys_B, stops_V, sampling, filters, dtype.

    Attributes:
      ids: The new tokens of each row, written by whoever fetches what `draw` returns.
      drawn: Number of tokens that each row was told to draw.
      rows: Behind the last chunk; there is none before the first.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
        chunk: int,
        prefill_chunk: int,
        **options: Any,
    ):
        L, longest = cfg.context_length, max(map(len, prompts))
        self.ids: list[list[int]] = [[] for _ in prompts]
        self.drawn = 0
        self._cfg, self._params, self._prompts = cfg, params, prompts
        self._chunk, self._options, self._max = chunk, options, max_new_tokens
        self._widths = prompt_widths(longest, L, prefill_chunk)
        # Tokens that can be drawn before the window rolls; the last of them is not fed.
        self._cached = min(max_new_tokens, 1 + L - min(longest, L))
        self._slots = 0
        self.rows: Rows

    @property
    def done(self) -> bool:
        """Whether all tokens were drawn."""
        return self.drawn == self._max

    @property
    def rolls(self) -> bool:
        """Whether the next chunk begins the rolling window, which needs all `ids` so far."""
        return self.drawn == self._cached < self._max

    def finish(self, finished_B: Bool[np.ndarray, " B"]) -> None:
        """Let these rows draw no more."""
        self.rows = self.rows._replace(finished_B=jnp.asarray(finished_B))

    def draw(self) -> tuple[Array, ...]:
        """The next chunk, the first of one token: ids_BC, log_probs_BC, lengths_B, on their way."""
        if self.drawn == 0:
            self.drawn = 1
            return self._feed_prompts()
        end = self._cached if self.drawn < self._cached else self._max
        count = min(self._chunk, end - self.drawn)
        if self.rolls:
            window_BT = self._tokens(self._cfg.context_length)
            self.rows = self.rows._replace(tokens_BT=jnp.asarray(window_BT), caches=None)
        elif self.drawn < self._cached:
            self._make_room(sum(self._widths) + self.drawn - 1 + count)
        self.rows, *drawing = draw_steps(
            self._cfg,
            self._params,
            self.rows,
            first=self.drawn,
            count=count,
            chunk=self._chunk,
            **self._options,
        )
        self.drawn += count
        return tuple(drawing)

    def _feed_prompts(self) -> tuple[Array, ...]:
        """Feed the prompts, piece by piece, and draw the first tokens."""
        cfg, width = self._cfg, sum(self._widths)
        more = self._cached - 1
        room = width + (min(more, ROOM) if can_grow(cfg) else more)
        self._slots = cache_slots(room, cfg.context_length)
        tokens_BT, B = self._tokens(width), len(self._prompts)
        length_B = np.array([len(prompt) for prompt in self._prompts], np.int32)
        plain = min(length_B.min(), cfg.context_length) == width  # no padding in any row
        self.rows = Rows(
            jnp.full((B, 1), PAD_ID, jnp.int32),
            jnp.asarray(length_B),
            self._counts(),
            jnp.zeros(B, bool),
            caches=None,
        )
        drawing, begin = (), 0
        for piece in self._widths:
            end = begin + piece
            self.rows, *drawing = feed_prompt(
                cfg,
                self._params,
                self.rows,
                tokens_BT=jnp.asarray(tokens_BT[:, begin:end]),
                after=width - end,
                slots=None if begin else self._slots,
                plain=bool(plain and not begin),
                **self._options,
            )
            begin = end
        return tuple(drawing)

    def _make_room(self, needed: int) -> None:
        """Grow the caches if they have fewer slots."""
        if needed > self._slots:
            self._slots = cache_slots(needed, self._cfg.context_length)
            self.rows = self.rows._replace(caches=grow(self.rows.caches, self._slots))

    def _tokens(self, width: int) -> Int[np.ndarray, "B T"]:
        """The last tokens of each row that the model can see, left-padded to `width`."""
        tokens_BT = np.full((len(self.ids), width), PAD_ID, np.int32)
        for row, (prompt, new) in enumerate(zip(self._prompts, self.ids, strict=True)):
            tokens = (prompt + new)[-self._cfg.context_length :]
            tokens_BT[row, -len(tokens) :] = tokens
        return tokens_BT

    def _counts(self) -> Int[Array, "B V"] | None:
        """How often each token is in each prompt, if anybody asks."""
        if not needs_counts(self._options["sampling"], self._options["filters"]):
            return None
        counts_BV = np.zeros((len(self.ids), self._cfg.dims().padded_vocab_size), np.int32)
        for row, prompt in enumerate(self._prompts):
            np.add.at(counts_BV[row], prompt, 1)
        return jnp.asarray(counts_BV)
