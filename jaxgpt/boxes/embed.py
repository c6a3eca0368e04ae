# SPDX-License-Identifier: Apache-2.0
"""The token embedding; a tied head reads the same table through `attend`."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxgpt.boxes.base import Dims, EmbedBox, check_positive
from jaxgpt.boxes.dense import Dense, padded
from jaxgpt.boxes.weights import Weight, parameter
from jaxgpt.errors import ConfigError
from jaxgpt.placing import flat
from jaxgpt.products import narrow_first
from jaxgpt.taps import tap


@dataclasses.dataclass(frozen=True)
class Embed(EmbedBox):
    """Rows of a [vocabulary, width] table, optionally times sqrt(d_model).

    A width that is not d_model is projected to it without bias, and back for a tied head.

    The table has `padded_vocab_size` rows; those past `vocab_size` are zero, are never looked up,
    and get neither gradient nor decay.

    Source: Vaswani et al. 2017, section 3.4 (the factor); the projections are those of OPT-350M:
      Zhang et al. 2022, https://arxiv.org/abs/2205.01068
    """

    scale: bool = False  # multiply by sqrt(d_model)
    width: int | None = None  # columns of the table; None: d_model

    def __post_init__(self) -> None:
        check_positive(width=self.width)

    def check(self, dims: Dims) -> None:
        """With muP the table is d_model wide and its rows are taken as they are."""
        if dims.width_ratio != 1 and (self.scale or self.width is not None):
            raise ConfigError(
                "there is no muP rule for embed.scale and embed.width",
                fix="--model.init.embedding_std for the scale, or --model.mup_base=null",
            )

    def build(self, dims: Dims, name: str | None = None) -> nn.Module:
        """The module; parameters `embedding` [padded vocabulary, width] and the projections."""
        return _Embed(self, dims, name=name)


class _Embed(nn.Module):
    box: Embed
    dims: Dims

    def setup(self) -> None:
        dims = self.dims
        init = padded(dims.init.embedding(), (dims.padded_vocab_size - dims.vocab_size, 0))
        width = self.box.width or dims.d_model
        shape = (dims.padded_vocab_size, width)
        self.embedding_VD = parameter(self, "embedding", init, shape)
        if width != dims.d_model:  # those that are not called have no parameters
            self.project_in = Dense(dims.d_model, dims, use_bias=False)
            self.project_out = Dense(width, dims, use_bias=False)

    def __call__(
        self, tokens_BT: Int[Array, "B T"], dtype: DTypeLike | None = None
    ) -> Float[Array, "B T D"]:
        """Look tokens up; an id outside the vocabulary gives NaN instead of a wrong row."""
        valid_BT1 = ((tokens_BT >= 0) & (tokens_BT < self.dims.vocab_size))[..., None]
        table = self.embedding_VD
        rows_BTD = table.rows(tokens_BT) if isinstance(table, Weight) else table[tokens_BT]
        x_BTD = jnp.where(valid_BT1, rows_BTD, jnp.nan).astype(dtype or table.dtype)
        if x_BTD.shape[-1] != self.dims.d_model:
            x_BTD = self.project_in(x_BTD)
        if self.box.scale:
            x_BTD *= jnp.asarray(self.dims.d_model**0.5, x_BTD.dtype)
        return tap(self, "out", x_BTD)

    def attend(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Products with every row of the table."""
        table = self.embedding_VD
        if self.box.width not in (None, self.dims.d_model):
            x_BTD = self.project_out(x_BTD)
        if isinstance(table, Weight):
            return table.product(x_BTD)
        logits = flat(x_BTD) @ narrow_first(table.astype(x_BTD.dtype)).T
        return logits.reshape(*x_BTD.shape[:-1], -1)
