# SPDX-License-Identifier: Apache-2.0
"""Norms of the last axis: LayerNorm, RMSNorm, and none. Statistics are in float32."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxgpt.boxes.base import NormBox, check_positive
from jaxgpt.shapes import wide
from jaxgpt.taps import tap_of


@dataclasses.dataclass(frozen=True)
class LayerNorm(NormBox):
    """`scale * (x - mean) / sqrt(variance + eps) + bias`.

    Source: Ba et al. 2016, eq. 4, https://arxiv.org/abs/1607.06450
    """

    eps: float = 1e-5  # added to the variance
    use_bias: bool = True  # whether there is a bias beside the scale

    def __post_init__(self) -> None:
        check_positive(eps=self.eps)

    def build(self, name: str | None = None) -> nn.Module:
        """The module `x -> x`; parameters `scale` and `bias`."""
        return _LayerNorm(self, name=name)


class _LayerNorm(nn.Module):
    box: LayerNorm

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        x32 = wide(x)
        y = _scaled(self, x32 - x32.mean(-1, keepdims=True), self.box.eps)
        y = y * _vector(self, "scale", nn.initializers.ones, x)
        if self.box.use_bias:
            y = y + _vector(self, "bias", nn.initializers.zeros, x)
        return y.astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class RMSNorm(NormBox):
    """`scale * x / sqrt(mean(x^2) + eps)`; normalised in float32, cast, then multiplied.

    With `one_plus` the factor is `1 + scale`, multiplied in float32 before the cast, and the scale
    starts at zero, so that weight decay would pull the factor towards one.

    Source: Zhang & Sennrich 2019, eq. 4, https://arxiv.org/abs/1910.07467; the orders of cast and
      multiplication are Llama's and Gemma's (https://arxiv.org/abs/2403.08295).
    """

    eps: float = 1e-5  # added to the mean square
    one_plus: bool = False  # multiply by 1 + scale

    def __post_init__(self) -> None:
        check_positive(eps=self.eps)

    def build(self, name: str | None = None) -> nn.Module:
        """The module `x -> x`; parameter `scale`."""
        return _RMSNorm(self, name=name)


class _RMSNorm(nn.Module):
    box: RMSNorm

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        y = _scaled(self, wide(x), self.box.eps)
        if self.box.one_plus:
            return (y * (1.0 + _vector(self, "scale", nn.initializers.zeros, x))).astype(x.dtype)
        return y.astype(x.dtype) * _vector(self, "scale", nn.initializers.ones, x).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class NoNorm(NormBox):
    """No norm: the final norm of a post-norm model, whose blocks end in one."""

    def build(self, name: str | None = None) -> nn.Module:
        """The identity."""
        return _NoNorm(name=name)


class _NoNorm(nn.Module):
    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return x


def _scaled(module: nn.Module, x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """`_normalised`, with a site for what x is multiplied by: patched, a norm is linear."""
    site = tap_of(module, "rate")
    return _normalised(x, eps) if site is None else x * site("rate", _rate(x, eps))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _normalised(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """`x / sqrt(mean(x^2) + eps)`, with a derivative that needs the result alone."""
    return x * _rate(x, eps)


@_normalised.defjvp
def _slope(eps: float, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    y, rate = _normalised(x, eps), _rate(x, eps)
    return y, rate * (dx - y * (y * dx).mean(-1, keepdims=True))


def _rate(x: Array, eps: float) -> Array:
    return jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps)


def _vector(module: nn.Module, name: str, init: nn.initializers.Initializer, x: Array) -> Array:
    """A parameter of the width of x, with as many axes as x."""
    vector_D = module.param(name, init, (x.shape[-1],), jnp.float32)
    return vector_D.reshape((1,) * (x.ndim - 1) + (-1,))
