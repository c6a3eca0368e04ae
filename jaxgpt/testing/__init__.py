# SPDX-License-Identifier: Apache-2.0
"""The contract suite: put a box into a tiny model and assert what `boxes/base.py` promises of it.

    from jaxgpt.testing import check_box

    def test_my_attention():
        check_box(MyAttention(scale=0.5))
        check_box(MyAttention(scale=0.5), position=RoPE())  # with other boxes around it

All of our boxes pass it. A broken promise is an AssertionError that says which one and where. Left
out: whether the box computes what its paper says; that takes a reference to compare with.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from jaxgpt.boxes import base
from jaxgpt.model import ModelConfig
from jaxgpt.testing.contracts import (
    check_cache,
    check_causality,
    check_packing,
    check_padding,
    check_precision,
    check_rows,
    check_types,
    check_value,
)
from jaxgpt.testing.gradients import check_training, jit_loss, zero_gradients
from jaxgpt.testing.layers import check_groups, check_position, check_tokenwise, check_window
from jaxgpt.testing.sites import check_sites, jit_put_back
from jaxgpt.testing.tools import jit_forward, jit_init, quick_jit, tiny, worn

__all__ = [
    "check_box",
    "check_model",
    "check_value",
    "jit_forward",
    "jit_init",
    "quick_jit",
    "tiny",
    "worn",
    "zero_gradients",
]


def check_box(box: base.Box, *, zero: Mapping[str, str] | None = None, **boxes: Any) -> None:
    """Check every contract for a box of any kind.

    Args:
      box: The box; put into each field of `tiny` that takes its kind.
      zero: As for `check_model`.
      **boxes: Other fields of the model around it.

    Raises:
      AssertionError: A contract is broken.
      TypeError: `box` is of no kind of `jaxgpt.boxes.base`.
    """
    kinds = {f.name: f.type for f in dataclasses.fields(ModelConfig) if isinstance(f.type, type)}
    fields = [name for name, kind in kinds.items() if isinstance(box, kind)]
    if not fields:
        raise TypeError(f"{type(box).__name__} subclasses no kind of box of jaxgpt.boxes.base")
    check_value(box)
    check_model(tiny(**(dict.fromkeys(fields, box) | boxes)), zero=zero)


def check_model(cfg: ModelConfig, *, zero: Mapping[str, str] | None = None) -> None:
    """Check every contract for the boxes of a model: context 14, vocabulary 30 or more.

    Args:
      cfg: The model.
      zero: Patterns of paths of parameters that get no gradient, "block_*/ffn/counts", each with
        the reason; those of our own boxes are known.

    Raises:
      AssertionError: A contract is broken.
    """
    check_value(cfg)
    check_types(cfg)
    for check in (check_window, check_groups, check_tokenwise):
        check(cfg)
    params = worn(cfg)
    for check in (
        check_causality,
        check_rows,
        check_padding,
        check_packing,
        check_position,
        check_cache,
        check_precision,
        check_sites,
    ):
        check(cfg, params)
    check_training(cfg, params, zero)
    # Many models would hold gigabytes.
    for jitted in (jit_init, jit_forward, jit_loss, jit_put_back):
        cast(Any, jitted).clear_cache()
