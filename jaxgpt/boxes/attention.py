# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention; multi-head and multi-query attention are two settings of it."""

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxgpt.boxes.base import AttentionBox, Dims, NormBox, check_positive
from jaxgpt.boxes.dense import Dense
from jaxgpt.boxes.weights import joined
from jaxgpt.cache import KVCache
from jaxgpt.errors import ConfigError
from jaxgpt.kernels import attend
from jaxgpt.masks import Visibility
from jaxgpt.shapes import Key, Params
from jaxgpt.taps import tap, tap_of, tapping


@dataclasses.dataclass(frozen=True)
class GQA(AttentionBox):
    """Attention with `n_heads` query heads over `n_kv_heads` key/value heads.

    Source: Vaswani et al. 2017, section 3.2.2 (multi-head); Shazeer 2019,
      https://arxiv.org/abs/1911.02150 (multi-query); Ainslie et al. 2023,
      https://arxiv.org/abs/2305.13245 (grouped); q/k norm: Dehghani et al. 2023, section 2,
      https://arxiv.org/abs/2302.05442, over the whole width: Team OLMo 2024, section 2.1,
      https://arxiv.org/abs/2501.00656; window: Beltagy et al. 2020, https://arxiv.org/abs/2004.05150;
      softcap: Gemma Team 2024, section 2, https://arxiv.org/abs/2408.00118; sinks: OpenAI 2025,
      https://arxiv.org/abs/2508.10925
    """

    n_heads: int = 12  # query heads
    n_kv_heads: int | None = None  # None: one for each query head (MHA); 1: MQA
    head_dim: int | None = None  # None: d_model / n_heads, which grows with the width (muP)
    use_bias: bool = True  # of the q, k and v projections
    use_out_bias: bool | None = None  # of the output projection; None: as use_bias
    window: int | None = None  # keys a query sees, itself included; None: all of the past
    scale: float | None = None  # factor on the scores; None: head_dim ** -0.5; see `factor` for muP
    softcap: float | None = None  # scores are squashed into (-softcap, softcap); None: they are not
    sinks: bool = False  # a trained logit for each head that takes a share of the probability
    qk_norm: NormBox | None = None  # norm of q and of k, before positions
    qk_norm_of: Literal["head", "each_head", "all"] = (
        "head"  # heads share, have own, are one vector
    )

    def __post_init__(self) -> None:
        for name in ("n_heads", "n_kv_heads", "head_dim", "window", "scale", "softcap"):
            check_positive(**{name: getattr(self, name)})
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

    def factor(self, dims: Dims) -> float:
        """On the scores, with None resolved.

        With muP heads that grow with the model have sqrt(width at the base) / width; heads that
        say their `head_dim` are as wide there as here.

        Source: Yang et al. 2022, definition 4.1, https://arxiv.org/abs/2203.03466
        """
        growth = dims.width_ratio if self.head_dim is None else 1.0
        return self.scale or self.width(dims) ** -0.5 * growth**-0.5

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
        """The module; parameters `q`, `k`, `v`, `out`; `q_norm`, `k_norm`, `sinks` if asked for."""
        return _GQA(self, dims, name=name)

    def init_cache(self, dims: Dims, batch: int, length: int, dtype: DTypeLike) -> Any:
        """K heads of keys and values for each of `length` tokens."""
        return KVCache.empty(batch, length, self.kv_heads, self.width(dims), dtype)

    def joined(self, params: Params) -> Params:
        """With `qkv` in the place of three, unless a subclass builds another module."""
        known = type(self).build is GQA.build
        return joined(params, "qkv", ("q", "k", "v")) if known else params


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
        pos_BT = visibility.q_pos_BT
        q_BTNH, k_BSKH, v_BSKH = self._heads(x_BTD)
        if box.qk_norm is not None:
            how = box.qk_norm, box.qk_norm_of
            q_BTNH = tap(self, "q_norm/out", _normed(q_BTNH, *how, "q_norm"))
            k_BSKH = tap(self, "k_norm/out", _normed(k_BSKH, *how, "k_norm"))
        q_BTNH = tap(self, "queries", position.rotate(q_BTNH, pos_BT))
        k_BSKH = tap(self, "keys", position.rotate(k_BSKH, pos_BT))
        v_BSKH = tap(self, "values", v_BSKH)
        if cache is not None:
            cache = cache.extend(k_BSKH, v_BSKH, pos_BT)
            if not visibility.fresh:
                k_BSKH, v_BSKH = cache.k_BSKH, cache.v_BSKH
                visibility = visibility.onto(cache.pos_BS)
        sinks_N = None
        if box.sinks:
            sinks_N = self.param("sinks", nn.initializers.zeros, (box.n_heads,), jnp.float32)
        y_BTNH = attend(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            dataclasses.replace(visibility, window=box.window),
            scale=position.score_scale() * box.factor(dims),
            softcap=box.softcap,
            bias=position.bias(box.n_heads),
            sinks_N=sinks_N,
            dropout_rate=dims.dropout,
            dropout_key=dropout_key,
            tap=tap_of(self, "scores", "probs"),
        )
        y = tap(self, "heads", y_BTNH).reshape(*x_BTD.shape[:2], -1)
        out_bias = box.use_bias if box.use_out_bias is None else box.use_out_bias
        y_BTD = Dense(x_BTD.shape[-1], dims, out_bias, residual=True, name="out")(y)
        return tap(self, "out", y_BTD), cache

    def _heads(self, x_BTD: Array) -> list[Array]:
        """Queries, keys and values by head, from three products or, joined, from one."""
        box, H = self.box, self.box.width(self.dims)
        counts = {"q": box.n_heads, "k": box.kv_heads, "v": box.kv_heads}
        if self.has_variable("params", "qkv"):
            dense = Dense(sum(counts.values()) * H, self.dims, box.use_bias, name="qkv")
            ends = [box.n_heads * H, (box.n_heads + box.kv_heads) * H]
            parts = jnp.split(dense(x_BTD), ends, -1)
        else:
            parts = [
                Dense(n * H, self.dims, box.use_bias, name=name)(x_BTD)
                for name, n in counts.items()
            ]
        return [y.reshape(*x_BTD.shape[:2], -1, H) for y in parts]


def _normed(y_BTNH: Array, norm: NormBox, of: str, name: str) -> Array:
    """Queries or keys after their norm; see `GQA.qk_norm_of`."""
    if of == "all":
        flat = y_BTNH.reshape(*y_BTNH.shape[:2], -1)
        return norm.build(name=name)(flat).reshape(y_BTNH.shape)
    if of == "head":
        return norm.build(name=name)(y_BTNH)
    each = nn.vmap(
        lambda module, y_BTH: module(y_BTH),
        in_axes=2,
        out_axes=2,
        variable_axes={"params": 0},
        split_rngs={"params": True},
    )
    with tapping():
        return each(norm.build(name=name), y_BTNH)
