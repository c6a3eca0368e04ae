# SPDX-License-Identifier: Apache-2.0
"""Dense feed-forward boxes: two matrices with an activation, or three with a gate."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxgpt.boxes.base import Dims, FFNBox, check_positive
from jaxgpt.boxes.dense import Dense
from jaxgpt.boxes.weights import joined
from jaxgpt.shapes import Key, Params, wide
from jaxgpt.taps import tap

Activation = Literal["gelu_tanh", "gelu", "gelu_sigmoid", "relu", "relu_squared", "silu"]


@jax.custom_jvp
def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GPT-2's "gelu_new", with a derivative written out: training keeps one array of it.

    Source: Hendrycks & Gimpel 2016, section 2, https://arxiv.org/abs/1606.08415
    """
    return jax.nn.gelu(x, approximate=True)


@gelu_tanh.defjvp
def _gelu_tanh_slope(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    c, squared = math.sqrt(2 / math.pi), x * x
    t = jnp.tanh(c * x * (1 + 0.044715 * squared))
    slope = 0.5 * (1 + t) + 0.5 * c * x * (1 - t * t) * (1 + 3 * 0.044715 * squared)
    return 0.5 * x * (1 + t), slope * dx


@jax.custom_jvp
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Each x times the normal distribution's share below it, by erf as in PyTorch: within 1.1e-6.

    In float32 whatever x is. It takes half of the time of erfc, which would be exact in the tail;
    training keeps one array of it.

    Source: Hendrycks & Gimpel 2016, section 2, https://arxiv.org/abs/1606.08415
    """
    return (wide(x) * _below(wide(x))).astype(x.dtype)


def _below(x: Array) -> Array:
    return 0.5 * (1 + jax.lax.erf(math.sqrt(0.5) * x))


@gelu.defjvp
def _gelu_slope(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,), h = primals, tangents, wide(primals[0])
    density = math.sqrt(0.5 / math.pi) * jnp.exp(-0.5 * h * h)
    return gelu(x), (_below(h) + h * density).astype(x.dtype) * dx


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu_tanh": gelu_tanh,
    "gelu": gelu,
    "gelu_sigmoid": lambda x: x * jax.nn.sigmoid(1.702 * x),  # Hendrycks & Gimpel 2016, section 2
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021, Primer
    "silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class MLP(FFNBox):
    """`W2 activation(W1 x)`.

    Source: Vaswani et al. 2017, eq. 2; GELU: Hendrycks & Gimpel 2016,
      https://arxiv.org/abs/1606.08415; squared ReLU: So et al. 2021, https://arxiv.org/abs/2109.08668
    """

    d_ff: int | None = None  # hidden width; None: 4 * d_model
    activation: Activation = "gelu_tanh"  # between the matrices
    use_bias: bool = True  # on both matrices

    def __post_init__(self) -> None:
        check_positive(d_ff=self.d_ff)

    def width(self, dims: Dims) -> int:
        """F, with None resolved."""
        return self.d_ff or 4 * dims.d_model

    def build(self, dims: Dims, name: str | None = None) -> nn.Module:
        """The module; parameters `up` and `down`."""
        return _MLP(self, dims, name=name)


class _MLP(nn.Module):
    box: MLP
    dims: Dims

    @nn.compact
    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        valid_BT: Bool[Array, "B T"],
        dropout_key: Key | None = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        box, d_ff = self.box, self.box.width(self.dims)
        h_BTF = Dense(d_ff, self.dims, box.use_bias, name="up")(x_BTD)
        h_BTF = tap(self, "hidden", ACTIVATIONS[box.activation](h_BTF))
        down = Dense(x_BTD.shape[-1], self.dims, box.use_bias, residual=True, name="down")
        return tap(self, "out", down(h_BTF)), {}


@dataclasses.dataclass(frozen=True)
class GatedMLP(FFNBox):
    """`W_down (activation(W_gate x) * W_up x)`: SwiGLU with "silu", GeGLU with "gelu_tanh".

    Source: Shazeer 2020, eq. 6, https://arxiv.org/abs/2002.05202; limit and offset: OpenAI 2025
      (gpt-oss), https://arxiv.org/abs/2508.10925
    """

    d_ff: int | None = None  # hidden width; None: 8/3 d_model rounded up to a multiple of 32
    activation: Activation = "silu"  # of the gate
    use_bias: bool = False  # on all three matrices
    limit: float | None = None  # gate is clipped to at most it, up to within plus and minus it
    up_offset: float = 0.0  # added to up

    def __post_init__(self) -> None:
        check_positive(d_ff=self.d_ff, limit=self.limit)

    def width(self, dims: Dims) -> int:
        """F, with None resolved."""
        return self.d_ff or -(-8 * dims.d_model // 96) * 32

    def hidden(
        self, gate: Float[Array, "... F"], up: Float[Array, "... F"]
    ) -> Float[Array, "... F"]:
        """What `down` is applied to."""
        if self.limit is not None:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return ACTIVATIONS[self.activation](gate) * (up + self.up_offset)

    def build(self, dims: Dims, name: str | None = None) -> nn.Module:
        """The module; parameters `gate`, `up` and `down`."""
        return _GatedMLP(self, dims, name=name)

    def joined(self, params: Params) -> Params:
        """With `gate_up` in the place of two, unless a subclass builds another module."""
        known = type(self).build is GatedMLP.build
        return joined(params, "gate_up", ("gate", "up")) if known else params


class _GatedMLP(nn.Module):
    box: GatedMLP
    dims: Dims

    @nn.compact
    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        valid_BT: Bool[Array, "B T"],
        dropout_key: Key | None = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        box, d_ff = self.box, self.box.width(self.dims)
        if self.has_variable("params", "gate_up"):
            both = Dense(2 * d_ff, self.dims, box.use_bias, name="gate_up")(x_BTD)
            gate_BTF, up_BTF = jnp.split(both, 2, -1)
        else:
            gate_BTF = Dense(d_ff, self.dims, box.use_bias, name="gate")(x_BTD)
            up_BTF = Dense(d_ff, self.dims, box.use_bias, name="up")(x_BTD)
        h_BTF = tap(self, "hidden", box.hidden(gate_BTF, up_BTF))
        down = Dense(x_BTD.shape[-1], self.dims, box.use_bias, residual=True, name="down")
        return tap(self, "out", down(h_BTF)), {}
