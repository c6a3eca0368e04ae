# SPDX-License-Identifier: Apache-2.0
"""The token embedding; a tied head reads the same table through `attend`."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxgpt.boxes.base import Dims, EmbedBox, tap
from jaxgpt.boxes.dense import padded


@dataclasses.dataclass(frozen=True)
class Embed(EmbedBox):
    """Rows of a [vocabulary, d_model] table, optionally times sqrt(d_model).

    The table has `padded_vocab_size` rows; those past `vocab_size` are zero, are never looked up,
    and get neither gradient nor decay.

    Source: Vaswani et al. 2017, section 3.4 (the factor)
    """

    scale: bool = False  # multiply by sqrt(d_model)

    def build(self, dims: Dims, name: str | None = None) -> nn.Module:
        """The module; parameter `embedding` [padded vocabulary, d_model]."""
        return _Embed(self, dims, name=name)


class _Embed(nn.Module):
    box: Embed
    dims: Dims

    def setup(self) -> None:
        dims = self.dims
        init = padded(dims.init.embedding(), (dims.padded_vocab_size - dims.vocab_size, 0))
        shape = (dims.padded_vocab_size, dims.d_model)
        self.embedding_VD = self.param("embedding", init, shape, jnp.float32)

    def __call__(
        self, tokens_BT: Int[Array, "B T"], dtype: DTypeLike | None = None
    ) -> Float[Array, "B T D"]:
        """Look tokens up; an id outside the vocabulary gives NaN instead of a wrong row."""
        valid_BT1 = ((tokens_BT >= 0) & (tokens_BT < self.dims.vocab_size))[..., None]
        x_BTD = jnp.where(valid_BT1, self.embedding_VD[tokens_BT], jnp.nan)
        x_BTD = x_BTD.astype(dtype or self.embedding_VD.dtype)
        if self.box.scale:
            x_BTD *= jnp.asarray(self.dims.d_model**0.5, x_BTD.dtype)
        return tap(self, "out", x_BTD)

    def attend(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Products with every row of the table."""
        table_VD = self.embedding_VD.astype(x_BTD.dtype)
        logits = x_BTD.reshape(-1, x_BTD.shape[-1]) @ table_VD.T
        return logits.reshape(*x_BTD.shape[:-1], -1)
