# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention; multi-head and multi-query attention are two settings of it."""

import dataclasses
from typing import Any

import flax.linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxgpt.boxes.base import AttentionBox, Dims, NormBox, check_positive, tap
from jaxgpt.boxes.dense import Dense
from jaxgpt.cache import KVCache
from jaxgpt.errors import ConfigError
from jaxgpt.kernels import attend
from jaxgpt.masks import Visibility
from jaxgpt.shapes import Key


@dataclasses.dataclass(frozen=True)
class GQA(AttentionBox):
    """Attention with `n_heads` query heads over `n_kv_heads` key/value heads.

    Source: Vaswani et al. 2017, section 3.2.2 (multi-head); Shazeer 2019,
      https://arxiv.org/abs/1911.02150 (multi-query); Ainslie et al. 2023,
      https://arxiv.org/abs/2305.13245 (grouped); q/k norm: Dehghani et al. 2023, section 2,
      https://arxiv.org/abs/2302.05442; window: Beltagy et al. 2020, https://arxiv.org/abs/2004.05150
    """

    n_heads: int = 12  # query heads
    n_kv_heads: int | None = None  # None: one for each query head (MHA); 1: MQA
    head_dim: int | None = None  # None: d_model / n_heads
    use_bias: bool = True  # of the q, k and v projections
    use_out_bias: bool | None = None  # of the output projection; None: as use_bias
    window: int | None = None  # keys a query sees, itself included; None: all of the past
    qk_norm: NormBox | None = None  # norm of each head of q and k, before positions

    def __post_init__(self) -> None:
        check_positive(
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            window=self.window,
        )
        if self.n_heads % self.kv_heads:
            divisors = [k for k in range(1, self.n_heads + 1) if self.n_heads % k == 0]
            raise ConfigError(
                f"n_heads={self.n_heads} is not divisible by n_kv_heads={self.n_kv_heads}",
                fix=f"n_kv_heads of {divisors}",
            )

    @property
    def kv_heads(self) -> int:
        """K, with None resolved."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    def width(self, dims: Dims) -> int:
        """H, with None resolved."""
        return self.head_dim or dims.d_model // self.n_heads

    def check(self, dims: Dims) -> None:
        """Heads must divide d_model (or have a width), and the position box must fit them."""
        if self.head_dim is None and dims.d_model % self.n_heads:
            near = [n for n in range(1, dims.d_model + 1) if dims.d_model % n == 0]
            raise ConfigError(
                f"d_model={dims.d_model} is not divisible by n_heads={self.n_heads}",
                fix=f"n_heads of {near}, or set head_dim",
            )
        dims.position.check_head(self.width(dims))
        if self.qk_norm is not None:
            self.qk_norm.check(dims)

    def build(self, dims: Dims, name: str | None = None) -> nn.Module:
        """The module; parameters `q`, `k`, `v`, `out`, and `q_norm`, `k_norm` where asked for."""
        return _GQA(self, dims, name=name)

    def init_cache(self, dims: Dims, batch: int, length: int, dtype: DTypeLike) -> Any:
        """K heads of keys and values for each of `length` tokens."""
        return KVCache.empty(batch, length, self.kv_heads, self.width(dims), dtype)


class _GQA(nn.Module):
    box: GQA
    dims: Dims

    @nn.compact
    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        visibility: Visibility,
        cache: KVCache | None = None,
        dropout_key: Key | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        box, dims, position = self.box, self.dims, self.dims.position
        H, pos_BT = box.width(dims), visibility.q_pos_BT

        def heads(n: int, name: str) -> Float[Array, "B T n H"]:
            y = Dense(n * H, dims, box.use_bias, name=name)(x_BTD)
            return y.reshape(*x_BTD.shape[:2], n, H)

        q_BTNH, k_BTKH, v_BTKH = (
            heads(box.n_heads, "q"),
            heads(box.kv_heads, "k"),
            heads(box.kv_heads, "v"),
        )
        if box.qk_norm is not None:
            q_BTNH = box.qk_norm.build(name="q_norm")(q_BTNH)
            k_BTKH = box.qk_norm.build(name="k_norm")(k_BTKH)
        q_BTNH = tap(self, "queries", position.rotate(q_BTNH, pos_BT))
        k_BSKH = tap(self, "keys", position.rotate(k_BTKH, pos_BT))
        v_BSKH = tap(self, "values", v_BTKH)
        if cache is not None:
            cache = cache.extend(k_BSKH, v_BSKH, pos_BT)
            k_BSKH, v_BSKH = cache.k_BSKH, cache.v_BSKH
            visibility = visibility.onto(cache.pos_BS)
        y_BTNH = attend(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            dataclasses.replace(visibility, window=box.window),
            scale=position.score_scale() * H**-0.5,
            bias=position.bias,
            dropout_rate=dims.dropout,
            dropout_key=dropout_key,
            tap=lambda name, x: tap(self, name, x),
        )
        y = tap(self, "heads", y_BTNH).reshape(*x_BTD.shape[:2], -1)
        out_bias = box.use_bias if box.use_out_bias is None else box.use_out_bias
        y_BTD = Dense(x_BTD.shape[-1], dims, out_bias, residual=True, name="out")(y)
        return tap(self, "out", y_BTD), cache
