# SPDX-License-Identifier: Apache-2.0
"""The readout: tied to the embedding, or a matrix of its own. Padding ids get -inf."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxgpt.boxes.base import Dims, HeadBox, tap
from jaxgpt.boxes.dense import Dense


@dataclasses.dataclass(frozen=True)
class Tied(HeadBox):
    """Logits are products with the rows of the token embedding.

    Source: Press & Wolf 2017, https://arxiv.org/abs/1608.05859
    """

    def build(self, dims: Dims, embed: nn.Module, name: str | None = None) -> nn.Module:
        """The module; no parameters of its own."""
        return _Tied(dims, embed, name=name)


class _Tied(nn.Module):
    dims: Dims
    embed: nn.Module

    @nn.compact
    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        return tap(self, "logits", _without_padding(self.dims, self.embed.attend(x_BTD)))


@dataclasses.dataclass(frozen=True)
class Untied(HeadBox):
    """Logits are products with a matrix of its own."""

    use_bias: bool = False  # added to the logits

    def build(self, dims: Dims, embed: nn.Module, name: str | None = None) -> nn.Module:
        """The module; parameter `out` [d_model, padded vocabulary]."""
        return _Untied(self, dims, name=name)


class _Untied(nn.Module):
    box: Untied
    dims: Dims

    @nn.compact
    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        dims = self.dims
        padding = dims.padded_vocab_size - dims.vocab_size
        out = Dense(dims.vocab_size, dims, self.box.use_bias, padding=padding, name="out")
        return tap(self, "logits", _without_padding(dims, out(x_BTD)))


def _without_padding(dims: Dims, logits_BTV: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
    """Ids past the vocabulary can be neither trained on nor drawn."""
    if dims.padded_vocab_size == dims.vocab_size:
        return logits_BTV
    real_V = jnp.arange(dims.padded_vocab_size) < dims.vocab_size
    return jnp.where(real_V[None, None], logits_BTV, -jnp.inf)
