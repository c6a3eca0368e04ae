# SPDX-License-Identifier: Apache-2.0
"""From what the last norm gives to logits: all at once, or a piece of each row at a time."""

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from jaxgpt.placing import place
from jaxgpt.shapes import Params


def read_out(cfg: Any, embed: nn.Module, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Logits of all tokens; called inside a module that has the head's parameters.

    Args:
      cfg: The model.
      embed: Its embedding, whose table a tied head reads.
      x_BTD: Behind the final norm.
    """
    dims = cfg.dims()
    head = cfg.head.build(dims, embed, name="head")
    return place(head(x_BTD / dims.width_ratio), "BTV")  # muP; else the ratio is 1


class Readout(nn.Module):
    """The same as a module of its own, for a function of the model's parameters."""

    cfg: Any

    @nn.compact
    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of any tokens."""
        return read_out(self.cfg, self.cfg.embed.build(self.cfg.dims(), name="embed"), x_BTD)


def logits_of(cfg: Any, params: Params, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Logits of some tokens, of what `forward(..., headless=True)` gives for them.

    Args:
      cfg: The model.
      params: Its parameters, as they are computed with (`jaxgpt.placing.use`).
      x_BTD: Behind the final norm.
    """
    return Readout(cfg).apply({"params": params}, x_BTD)  # type: ignore[return-value]
