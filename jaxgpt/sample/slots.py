# SPDX-License-Identifier: Apache-2.0
"""How many tokens of a prompt are fed at once, and how many slots its caches have.

Both are rounded to few sizes, for each of which code is compiled once.
"""

import functools
from typing import Any

import jax

from jaxgpt.model import ModelConfig

FIRST_SLOTS = 256
"""No cache is shorter, so that short samples need one size, unless the context is."""

ROOM = 128
"""New tokens that a first cache has slots for."""


def prompt_widths(longest: int, context_length: int, prefill_chunk: int) -> list[int]:
    """The widths of the pieces in which a prompt of `longest` tokens is fed.

    The first is what the others leave, rounded up, which is where the padding goes.
    """
    longest, piece = min(longest, context_length), min(prefill_chunk, context_length)
    others, rest = divmod(longest - 1, piece)
    return [min(_rounded(rest + 1), piece), *[piece] * others]


def cache_slots(needed: int, context_length: int) -> int:
    """The smallest cache with so many slots: the longest one, or half of it, or a quarter, ...

    The longest holds the whole context behind the padding of a prompt.
    """
    slots = _rounded(context_length) + _unit(context_length)
    while slots >= 2 * FIRST_SLOTS and (half := _rounded(-(-slots // 2))) >= needed:
        slots = half
    return max(slots, _rounded(needed))


def can_grow(cfg: ModelConfig) -> bool:
    """Whether each layer's cache has `grown`, which one of a box of one's own need not have."""
    answers = []

    def look() -> tuple:
        answers.extend(hasattr(cache, "grown") for cache in cfg.init_caches(1, 1))
        return ()

    jax.eval_shape(look)  # nothing is allocated
    return all(answers)


def grow(caches: tuple, slots: int) -> tuple:
    """Caches with so many slots in the place of `caches`, whose memory is given back.

    It is done layer by layer: no more than one of them is there twice.
    """
    return tuple(_grown_one(cache, slots) for cache in caches)


def _grown_one(cache: Any, slots: int) -> Any:
    new = _grown(cache, slots)
    for old, longer in zip(jax.tree.leaves(cache), jax.tree.leaves(new), strict=True):
        if old.shape != longer.shape:  # what did not change may be the same buffer
            old.delete()
    return new


@functools.partial(jax.jit, static_argnames="slots")
def _grown(cache: Any, slots: int) -> Any:
    return cache.grown(slots)


def _rounded(tokens: int) -> int:
    return -(-tokens // _unit(tokens)) * _unit(tokens)


def _unit(tokens: int) -> int:
    return 16 if tokens <= 64 else 64
