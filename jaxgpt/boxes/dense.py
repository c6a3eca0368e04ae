# SPDX-License-Identifier: Apache-2.0
"""The dense layer: the one place that multiplies activations by a weight matrix."""

from collections.abc import Sequence
from typing import Any, cast

import flax.linen as nn
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jaxtyping import Array, Float

from jaxgpt.boxes.base import Dims
from jaxgpt.boxes.weights import Weight, parameter
from jaxgpt.placing import flat
from jaxgpt.products import narrow_first
from jaxgpt.shapes import Key


class Dense(nn.Module):
    """`y = x W + b`, W stored [in, out] in float32 and cast to the dtype of x, or a `Weight`.

    Leading axes are flattened around the product: XLA's CPU back end then writes the weight
    gradient as one plain matrix product (1.5 to 1.8 times as fast for a small model); elsewhere it
    is free.

    Attributes:
      features: Width of y.
      dims: Gives the initialisers.
      use_bias: Whether b is there.
      residual: Whether y is added to the residual stream, which some initialisers scale down.
      padding: Zero columns behind the features (vocabulary padding); they stay zero.
      gain: On the kernel's first values.
    """

    features: int
    dims: Dims
    use_bias: bool = True
    residual: bool = False
    padding: int = 0
    gain: float = 1.0

    @nn.compact
    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """Multiply the last axis by the kernel."""
        fan_in, init = x.shape[-1], self.dims.init
        kernel_init = init.kernel(self.dims, residual=self.residual)
        kernel_init = padded(times(self.gain, kernel_init), (0, self.padding))
        shape = (fan_in, self.features + self.padding)
        kernel_IO = parameter(self, "kernel", kernel_init, shape)
        if isinstance(kernel_IO, Weight):
            y = kernel_IO.product(flat(x))
        else:
            y = flat(x) @ narrow_first(kernel_IO.astype(x.dtype))
        if self.use_bias:
            bias_init = padded(init.bias(self.dims.fan_at_base(fan_in)), (self.padding,))
            bias_O = self.param("bias", bias_init, shape[1:], jnp.float32)
            y = y + bias_O.astype(x.dtype)[None]
        return y.reshape(*x.shape[:-1], -1)


def times(gain: float, init: Initializer) -> Initializer:
    """`init` with all values multiplied."""
    if gain == 1.0:
        return init
    return cast(Initializer, lambda *args, **more: gain * init(*args, **more))


def padded(init: Initializer, padding: tuple[int, ...]) -> Initializer:
    """`init` on the true shape, with zeros behind it: `padding` counts them for each axis."""
    if not any(padding):
        return init

    def padded_init(key: Key, shape: Sequence[int], dtype: Any = jnp.float32, **_: Any) -> Array:
        true = tuple(n - extra for n, extra in zip(shape, padding, strict=True))
        return jnp.pad(init(key, true, dtype), tuple((0, extra) for extra in padding))

    return cast(Initializer, padded_init)
