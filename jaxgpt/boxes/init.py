# SPDX-License-Identifier: Apache-2.0
"""Initialisers as a box: what the other boxes fill their parameters with.

Norm scales are ones and norm biases zeros everywhere, so they are not asked for here.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax.nn import initializers
from jax.nn.initializers import Initializer
from jaxtyping import Array

from jaxgpt.boxes.base import Dims, InitBox, check_positive
from jaxgpt.shapes import Key


@dataclasses.dataclass(frozen=True)
class Normal(InitBox):
    """Normal kernels and tables, zero biases: GPT-2's by default.

    Source: Radford et al. 2019, section 2.3 (residual weights scaled by 1/sqrt(N), N residual
      layers, two a block); std 0.02 from Radford et al. 2018, section 4.1.
      `zero` residual projections: Zhang et al. 2019, Fixup, https://arxiv.org/abs/1901.09321
    """

    std: float | None = 0.02  # None: 1/sqrt(inputs of the kernel)
    embedding_std: float = 0.02
    residual: Literal["scaled", "same", "zero"] = "scaled"  # kernels that write to the stream

    def __post_init__(self) -> None:
        check_positive(std=self.std, embedding_std=self.embedding_std)

    def kernel(self, dims: Dims, *, residual: bool) -> Initializer:
        """N(0, std / sqrt(width_ratio)), scaled or zeroed if it writes to the residual stream."""
        if residual and self.residual == "zero":
            return initializers.zeros
        shrink = (2 * dims.n_layers) ** -0.5 if residual and self.residual == "scaled" else 1.0
        if self.std is not None:
            return initializers.normal(self.std * shrink / dims.width_ratio**0.5)
        return initializers.variance_scaling(shrink**2, "fan_in", "normal")

    def bias(self, fan_in: int) -> Initializer:
        """Zeros."""
        return initializers.zeros

    def embedding(self) -> Initializer:
        """N(0, embedding_std)."""
        return initializers.normal(self.embedding_std)


@dataclasses.dataclass(frozen=True)
class TorchDefault(InitBox):
    """PyTorch's defaults: U(-a, a) with a = 1/sqrt(inputs) for kernels and biases, N(0, 1) tables.

    Source: `torch.nn.Linear` and `torch.nn.Embedding`, https://docs.pytorch.org/docs/stable/nn.html
    """

    def kernel(self, dims: Dims, *, residual: bool) -> Initializer:
        """U(-1/sqrt(inputs), 1/sqrt(inputs))."""
        return initializers.variance_scaling(1 / 3, "fan_in", "uniform")

    def bias(self, fan_in: int) -> Initializer:
        """U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
        bound = fan_in**-0.5

        def uniform(key: Key, shape: Sequence[int], dtype: Any = jnp.float32, **_: Any) -> Array:
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        return cast(Initializer, uniform)

    def embedding(self) -> Initializer:
        """N(0, 1)."""
        return initializers.normal(1.0)
