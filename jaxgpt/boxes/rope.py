# SPDX-License-Identifier: Apache-2.0
"""Rotary positions, and the phases that they share with the sinusoidal ones.

Scalings for contexts longer than the trained ones are in `scaling.py`.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxgpt.boxes.base import PositionBox, RopeScaling, check_positive
from jaxgpt.errors import ConfigError
from jaxgpt.shapes import wide


@dataclasses.dataclass(frozen=True)
class RoPE(PositionBox):
    """Rotate pairs of the first R channels of each head, pair i by pos * theta^(-2i/R).

    Scores of rotated queries and keys depend on positions only through their difference. A pair is
    (i, i + R/2), as in the public checkpoints of Llama, or the neighbours (2i, 2i + 1), as in the
    paper: one is the other after a permutation of each head's channels.

    Source: Su et al. 2021, eq. 34, https://arxiv.org/abs/2104.09864; partial rotation: Black et al.
      2022 (GPT-NeoX), section 2.1.1, https://arxiv.org/abs/2204.06745
    """

    theta: float = 10_000.0  # base of the wavelengths, dimensionless
    fraction: float = 1.0  # share of each head that is rotated; the rest passes through
    layout: Literal["halves", "neighbours"] = "halves"  # which channels are a pair
    scaling: RopeScaling | None = None  # for contexts longer than those trained on

    def __post_init__(self) -> None:
        check_positive(fraction=self.fraction)
        if not self.theta > 1:
            raise ConfigError(f"theta={self.theta} must exceed 1")
        if self.fraction > 1:
            raise ConfigError(f"fraction={self.fraction} of a head cannot be rotated; at most 1")
        if self.layout not in ("halves", "neighbours"):
            raise ConfigError(f"layout={self.layout!r}", fix="halves or neighbours")

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
        width, magnitude = self._width(x_BTNH.shape[-1]), 1.0
        rate_I = rates(width, self.theta)
        if self.scaling is not None:
            rate_I = self.scaling.rates(rate_I, self.theta)
            magnitude = self.scaling.magnitude()
        phase_BT1I = phases(pos_BT, rate_I)[:, :, None]
        cos, sin = magnitude * jnp.cos(phase_BT1I), magnitude * jnp.sin(phase_BT1I)
        x32 = wide(x_BTNH[..., :width])
        if self.layout == "halves":
            a, b = jnp.split(x32, 2, axis=-1)
            rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        else:
            a, b = x32[..., 0::2], x32[..., 1::2]
            rotated = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x32.shape)
        return jnp.concatenate([rotated.astype(x_BTNH.dtype), x_BTNH[..., width:]], axis=-1)

    def score_scale(self) -> float:
        """That of the scaling."""
        return 1.0 if self.scaling is None else self.scaling.score_scale()

    def at(self, length: int) -> "RoPE":
        """This box for a call that declares its longest position; only dynamic scalings differ."""
        if self.scaling is None:
            return self
        return dataclasses.replace(self, scaling=self.scaling.at(length))


def rates(width: int, theta: float) -> Float[Array, " I"]:
    """theta^(-2i/width) for i < width/2, in radians per token, as float32.

    On the host, whose powers are right to the last bit: at position 8,191 an error is multiplied
    by as much.
    """
    return jnp.asarray(theta ** (-np.arange(0, width, 2) / width), jnp.float32)


def phases(pos_BT: Int[Array, "B T"], rate_I: Float[Array, " I"]) -> Float[Array, "B T I"]:
    """Angles pos * rate, in radians.

    In float32: bfloat16 cannot tell position 256 from 257.
    """
    return pos_BT[:, :, None].astype(jnp.float32) * rate_I[None, None]
