# SPDX-License-Identifier: Apache-2.0
"""Positions as vectors on the embedding, learned or sinusoidal, and no positions at all.

Rotations of queries and keys are in `rope.py`, biases of the scores in `alibi.py`.
"""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxgpt.boxes.base import Dims, PositionBox, check_positive
from jaxgpt.boxes.rope import phases, rates
from jaxgpt.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class NoPosition(PositionBox):
    """No position anywhere: only the causal mask tells the order."""


@dataclasses.dataclass(frozen=True)
class Learned(PositionBox):
    """A trained vector for each of `context_length` positions, added to the embedding.

    Source: Radford et al. 2018 (GPT), section 3.1; Gehring et al. 2017, section 3.1,
      https://arxiv.org/abs/1705.03122; the offset is OPT's, whose first two rows stand for padding:
      Zhang et al. 2022, https://arxiv.org/abs/2205.01068
    """

    offset: int = 0  # rows in front of that of position 0

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise ConfigError(f"offset={self.offset} is negative")

    def build(self, dims: Dims, name: str | None = None) -> nn.Module:
        """The module; parameter `embedding` [offset + context_length, d_model]."""
        return _Learned(self, dims, name=name)


class _Learned(nn.Module):
    box: Learned
    dims: Dims

    @nn.compact
    def __call__(
        self, x_BTD: Float[Array, "B T D"], pos_BT: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        length, offset = self.dims.context_length, self.box.offset
        if x_BTD.shape[1] > length:
            raise ValueError(f"{x_BTD.shape[1]} tokens exceed context_length={length}")
        table_SD = self.param(
            "embedding", self.dims.init.embedding(), (offset + length, x_BTD.shape[-1]), jnp.float32
        )
        # A position past the table would otherwise be clamped to the last one in silence.
        rows_BTD = jnp.take(
            table_SD, jnp.maximum(pos_BT, 0) + offset, axis=0, mode="fill", fill_value=jnp.nan
        )
        return x_BTD + rows_BTD.astype(x_BTD.dtype)


@dataclasses.dataclass(frozen=True)
class Sinusoidal(PositionBox):
    """PE(p, 2i) = sin(p / theta^(2i/D)), PE(p, 2i+1) = cos of the same, added to the embedding.

    Source: Vaswani et al. 2017, section 3.5, https://arxiv.org/abs/1706.03762
    """

    theta: float = 10_000.0  # base of the wavelengths, dimensionless

    def __post_init__(self) -> None:
        check_positive(theta=self.theta)

    def check(self, dims: Dims) -> None:
        """d_model must be even."""
        if dims.d_model % 2:
            raise ConfigError(f"d_model={dims.d_model} is odd; sinusoidal positions come in pairs")

    def build(self, dims: Dims, name: str | None = None) -> nn.Module:
        """The module; no parameters."""
        return _Sinusoidal(self, name=name)


class _Sinusoidal(nn.Module):
    box: Sinusoidal

    @nn.compact
    def __call__(
        self, x_BTD: Float[Array, "B T D"], pos_BT: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        phase_BTI = phases(pos_BT, rates(x_BTD.shape[-1], self.box.theta))
        waves_BTI2 = jnp.stack([jnp.sin(phase_BTI), jnp.cos(phase_BTI)], axis=-1)
        return x_BTD + waves_BTI2.reshape(*pos_BT.shape, -1).astype(x_BTD.dtype)
