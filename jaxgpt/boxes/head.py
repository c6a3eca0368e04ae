# SPDX-License-Identifier: Apache-2.0
"""The readout: tied to the embedding, or a matrix of its own. Padding ids get -inf."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxgpt.boxes.base import Dims, HeadBox, check_positive
from jaxgpt.boxes.dense import Dense
from jaxgpt.taps import tap


@dataclasses.dataclass(frozen=True)
class Tied(HeadBox):
    """Logits are products with the rows of the token embedding.

    Source: Press & Wolf 2017, https://arxiv.org/abs/1608.05859; softcap: Gemma Team 2024,
      section 2, https://arxiv.org/abs/2408.00118
    """

    softcap: float | None = None  # logits are squashed into (-softcap, softcap); None: they are not

    def __post_init__(self) -> None:
        check_positive(softcap=self.softcap)

    def build(self, dims: Dims, embed: nn.Module, name: str | None = None) -> nn.Module:
        """The module; no parameters of its own."""
        return _Tied(self, dims, embed, name=name)


class _Tied(nn.Module):
    box: Tied
    dims: Dims
    embed: nn.Module

    @nn.compact
    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        logits_BTV = self.embed.attend(x_BTD)
        return tap(self, "logits", _finished(logits_BTV, self.dims, self.box.softcap))


@dataclasses.dataclass(frozen=True)
class Untied(HeadBox):
    """Logits are products with a matrix of its own."""

    use_bias: bool = False  # added to the logits
    softcap: float | None = None  # logits are squashed into (-softcap, softcap); None: they are not

    def __post_init__(self) -> None:
        check_positive(softcap=self.softcap)

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
        gain = dims.width_ratio**0.5  # muP: it starts as large as at the base, like a table
        out = Dense(
            dims.vocab_size, dims, self.box.use_bias, padding=padding, gain=gain, name="out"
        )
        return tap(self, "logits", _finished(out(x_BTD), dims, self.box.softcap))


def _finished(
    logits_BTV: Float[Array, "B T V"], dims: Dims, softcap: float | None
) -> Float[Array, "B T V"]:
    """Capped, and without the ids past the vocabulary: they are neither trained on nor drawn."""
    if softcap is not None:
        logits_BTV = softcap * jnp.tanh(logits_BTV / softcap)
    if dims.padded_vocab_size == dims.vocab_size:
        return logits_BTV
    real_V = jnp.arange(dims.padded_vocab_size) < dims.vocab_size
    return jnp.where(real_V[None, None], logits_BTV, -jnp.inf)
