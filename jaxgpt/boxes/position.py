# SPDX-License-Identifier: Apache-2.0
"""Positions: learned or sinusoidal vectors on the embedding, rotations of queries and keys."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxgpt.boxes.base import Dims, PositionBox, check_positive
from jaxgpt.errors import ConfigError
from jaxgpt.shapes import wide


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
        phase_BTI = phases(pos_BT, x_BTD.shape[-1], self.box.theta)
        waves_BTI2 = jnp.stack([jnp.sin(phase_BTI), jnp.cos(phase_BTI)], axis=-1)
        return x_BTD + waves_BTI2.reshape(*pos_BT.shape, -1).astype(x_BTD.dtype)


@dataclasses.dataclass(frozen=True)
class RoPE(PositionBox):
    """Rotate pairs (i, i + R/2) of the first R channels of each head by pos * theta^(-2i/R).

    Scores of rotated queries and keys depend on positions only through their difference.

    Source: Su et al. 2021, eq. 34, https://arxiv.org/abs/2104.09864; partial rotation: Black et al.
      2022 (GPT-NeoX), section 2.1.1, https://arxiv.org/abs/2204.06745
    Differs from the paper: halves are paired, as in Llama's public checkpoints, not neighbours
      (2i, 2i + 1); weights convert by a permutation of each head's channels.
    """

    theta: float = 10_000.0  # base of the wavelengths, dimensionless
    fraction: float = 1.0  # share of each head that is rotated; the rest passes through

    def __post_init__(self) -> None:
        check_positive(theta=self.theta, fraction=self.fraction)
        if self.fraction > 1:
            raise ConfigError(f"fraction={self.fraction} of a head cannot be rotated; at most 1")

    def check_head(self, head_dim: int) -> None:
        """The rotated width must be even and not zero."""
        if self._width(head_dim) % 2 or not self._width(head_dim):
            raise ConfigError(
                f"RoPE rotates pairs, but fraction={self.fraction} of head_dim={head_dim} is "
                f"{self._width(head_dim)} channels; it must be an even number"
            )

    def _width(self, head_dim: int) -> int:
        return int(head_dim * self.fraction)

    def rotate(
        self, x_BTNH: Float[Array, "B T N H"], pos_BT: Int[Array, "B T"]
    ) -> Float[Array, "B T N H"]:
        """Rotate queries or keys; phases and sines in float32, the result in the dtype of x.

        Padding (position -1) is rotated too; visibility hides it.
        """
        width = self._width(x_BTNH.shape[-1])
        phase_BT1I = phases(pos_BT, width, self.theta)[:, :, None]
        cos, sin = jnp.cos(phase_BT1I), jnp.sin(phase_BT1I)
        x32 = wide(x_BTNH[..., :width])
        a, b = jnp.split(x32, 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        return jnp.concatenate([rotated.astype(x_BTNH.dtype), x_BTNH[..., width:]], axis=-1)


def phases(pos_BT: Int[Array, "B T"], width: int, theta: float) -> Float[Array, "B T I"]:
    """Angles pos * theta^(-2i/width) for i < width/2, in radians.

    In float32: bfloat16 cannot tell position 256 from 257.
    """
    rate_I = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    return pos_BT[:, :, None].astype(jnp.float32) * rate_I[None, None]
