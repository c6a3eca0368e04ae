# SPDX-License-Identifier: Apache-2.0
"""ALiBi: order by a penalty on the scores that grows with the distance."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxgpt.boxes.base import PositionBox
from jaxgpt.kernels import ScoreBias


@dataclasses.dataclass(frozen=True)
class ALiBi(PositionBox):
    """Scores of head n get -slope_n * |i - j|; queries, keys and embeddings stay as they are.

    The slopes of a power of two of heads are 2^(-8/n), 2^(-16/n), ..., 2^-8. Any other number of
    heads has those of the largest power below it, then every other one of twice that power.

    Source: Press et al. 2022, section 3, https://arxiv.org/abs/2108.12409; other numbers of heads:
      https://github.com/ofirpress/attention_with_linear_biases
    Differs from the paper: |i - j| where it has i - j, so that keys ahead, which only a prefix-LM
      sees, are penalised as well.
    """

    def bias(self, n_heads: int) -> ScoreBias:
        """The penalty as a function of positions, in float32.

        That of padding and of empty slots (position -1) is finite; visibility hides it.
        """
        slopes_1N11 = jnp.asarray(slopes(n_heads), jnp.float32)[None, :, None, None]

        def bias(
            q_pos_BT: Int[Array, "B T"], k_pos_BS: Int[Array, "B S"]
        ) -> Float[Array, "B N T S"]:
            distance_BTS = jnp.abs(q_pos_BT[:, :, None] - k_pos_BS[:, None, :])
            return -slopes_1N11 * distance_BTS[:, None].astype(jnp.float32)

        return bias


def slopes(n_heads: int) -> list[float]:
    """The slope of each head, per token; see `ALiBi`."""
    power = 2 ** (n_heads.bit_length() - 1)
    first = [2 ** (-8 * n / power) for n in range(1, power + 1)]
    between = [2 ** (-4 * n / power) for n in range(1, 2 * power, 2)]
    return first + between[: n_heads - power]
