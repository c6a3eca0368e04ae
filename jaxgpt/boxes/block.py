# SPDX-License-Identifier: Apache-2.0
"""Block placement: how attention, FFN and their norms are wired to the residual stream."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from jaxgpt.boxes.base import BlockBox, Dims
from jaxgpt.kernels import dropout
from jaxgpt.masks import Visibility
from jaxgpt.shapes import Key, rounded
from jaxgpt.taps import tap

BlockOut = tuple[Float[Array, "B T D"], Any, dict[str, Array]]


@dataclasses.dataclass(frozen=True)
class PreNorm(BlockBox):
    """x = x + attention(norm(x)); x = x + ffn(norm(x)).

    Source: Radford et al. 2019 (GPT-2), section 2.3; Xiong et al. 2020,
      https://arxiv.org/abs/2002.04745
    """

    def build(self, dims: Dims, layer: Any, name: str | None = None) -> nn.Module:
        """The module; parameters `attention_norm`, `attention`, `ffn_norm`, `ffn`."""
        return _PreNorm(dims, layer, name=name)


@dataclasses.dataclass(frozen=True)
class PostNorm(BlockBox):
    """x = norm(x + attention(x)); x = norm(x + ffn(x)).

    Source: Vaswani et al. 2017, section 3.1; Radford et al. 2018 (GPT)
    """

    def build(self, dims: Dims, layer: Any, name: str | None = None) -> nn.Module:
        """The module; parameters `attention`, `attention_norm`, `ffn`, `ffn_norm`."""
        return _PostNorm(dims, layer, name=name)


@dataclasses.dataclass(frozen=True)
class Sandwich(BlockBox):
    """x = x + norm(attention(norm(x))); x = x + norm(ffn(norm(x))).

    Source: Ding et al. 2021 (CogView), section 2.4, https://arxiv.org/abs/2105.13290; Gemma Team
      2024 (Gemma 2), section 2, https://arxiv.org/abs/2408.00118
    """

    def build(self, dims: Dims, layer: Any, name: str | None = None) -> nn.Module:
        """The module; as PreNorm, and `attention_out_norm`, `ffn_out_norm`."""
        return _PreNorm(dims, layer, out_norms=True, name=name)


@dataclasses.dataclass(frozen=True)
class OutputNorm(BlockBox):
    """x = x + norm(attention(x)); x = x + norm(ffn(x)).

    Source: Liu et al. 2021 (Swin V2), section 3.2, https://arxiv.org/abs/2111.09883; Team OLMo 2024
      (OLMo 2), section 2.1, https://arxiv.org/abs/2501.00656
    """

    def build(self, dims: Dims, layer: Any, name: str | None = None) -> nn.Module:
        """The module; parameters `attention`, `attention_out_norm`, `ffn`, `ffn_out_norm`."""
        return _PreNorm(dims, layer, in_norms=False, out_norms=True, name=name)


@dataclasses.dataclass(frozen=True)
class Parallel(BlockBox):
    """x = x + attention(norm(x)) + ffn(norm(x)), both branches from the same x.

    Source: Black et al. 2022 (GPT-NeoX), section 2.1.2, https://arxiv.org/abs/2204.06745; with one
      norm: Wang & Komatsuzaki 2021 (GPT-J), https://github.com/kingoflolz/mesh-transformer-jax
    """

    one_norm: bool = False  # one norm feeds both branches

    def build(self, dims: Dims, layer: Any, name: str | None = None) -> nn.Module:
        """The module; parameters `attention_norm`, `attention`, `ffn`, perhaps `ffn_norm`."""
        return _Parallel(dims, layer, one_norm=self.one_norm, name=name)


class _Block(nn.Module):
    """The two sub-layers with their dropout; a placement only says where the norms stand."""

    dims: Dims
    layer: Any  # model.Layer: the boxes of this layer
    out_norms: bool = False  # norms behind attention and FFN, before the sum

    def attend(
        self, x_BTD: Array, visibility: Visibility, cache: Any, dropout_key: Key | None
    ) -> tuple[Array, Any]:
        """Attention and its dropout."""
        attention = self.layer.attention.build(self.dims, name="attention")
        y_BTD, cache = attention(x_BTD, visibility, cache, _site(dropout_key, 0))
        if self.out_norms:
            y_BTD = self.norm("attention_out_norm", y_BTD, added=True)
        return dropout(y_BTD, self.dims.dropout, _site(dropout_key, 1)), cache

    def feed(
        self, x_BTD: Array, visibility: Visibility, dropout_key: Key | None
    ) -> tuple[Array, dict[str, Array]]:
        """FFN and its dropout."""
        ffn = self.layer.ffn.build(self.dims, name="ffn")
        y_BTD, aux = ffn(x_BTD, visibility.valid_BT, _site(dropout_key, 2))
        if self.out_norms:
            y_BTD = self.norm("ffn_out_norm", y_BTD, added=True)
        return dropout(y_BTD, self.dims.dropout, _site(dropout_key, 3)), aux

    def norm(self, name: str, x_BTD: Array, *, added: bool = False) -> Array:
        """One of the block's norms; `added`: the block adds what it gives to something."""
        y_BTD = self.layer.norm.build(name=name)(x_BTD)
        return tap(self, f"{name}/out", rounded(y_BTD) if added else y_BTD)


class _PreNorm(_Block):
    in_norms: bool = True

    @nn.compact
    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        visibility: Visibility,
        cache: Any = None,
        dropout_key: Key | None = None,
    ) -> BlockOut:
        x_BTD = tap(self, "in", x_BTD)
        y_BTD = self.norm("attention_norm", x_BTD) if self.in_norms else x_BTD
        y_BTD, cache = self.attend(y_BTD, visibility, cache, dropout_key)
        x_BTD = tap(self, "mid", x_BTD + y_BTD)
        y_BTD = self.norm("ffn_norm", x_BTD) if self.in_norms else x_BTD
        y_BTD, aux = self.feed(y_BTD, visibility, dropout_key)
        return tap(self, "out", x_BTD + y_BTD), cache, aux


class _PostNorm(_Block):
    @nn.compact
    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        visibility: Visibility,
        cache: Any = None,
        dropout_key: Key | None = None,
    ) -> BlockOut:
        x_BTD = tap(self, "in", x_BTD)
        y_BTD, cache = self.attend(x_BTD, visibility, cache, dropout_key)
        x_BTD = tap(self, "mid", self.norm("attention_norm", x_BTD + y_BTD, added=True))
        y_BTD, aux = self.feed(x_BTD, visibility, dropout_key)
        x_BTD = tap(self, "out", self.norm("ffn_norm", x_BTD + y_BTD, added=True))
        return x_BTD, cache, aux


class _Parallel(_Block):
    one_norm: bool = False

    @nn.compact
    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        visibility: Visibility,
        cache: Any = None,
        dropout_key: Key | None = None,
    ) -> BlockOut:
        x_BTD = tap(self, "in", x_BTD)
        in_BTD = self.norm("attention_norm", x_BTD)
        y_BTD, cache = self.attend(in_BTD, visibility, cache, dropout_key)
        in_BTD = in_BTD if self.one_norm else self.norm("ffn_norm", x_BTD)
        z_BTD, aux = self.feed(in_BTD, visibility, dropout_key)
        return tap(self, "out", x_BTD + y_BTD + z_BTD), cache, aux


def _site(dropout_key: Key | None, site: int) -> Key | None:
    """The key of one dropout site of this layer."""
    return None if dropout_key is None else jax.random.fold_in(dropout_key, site)
