# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: keys and values of all heads from one small latent per token.

Left out: windows, soft caps and sinks, which are `GQA`'s. Local letters: P is the rotary width of a
head, H its nope and rope together, W the width of its value, Q nope and value together.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxgpt.boxes.base import AttentionBox, Dims, NormBox, check_positive
from jaxgpt.boxes.dense import Dense
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.cache import LatentCache
from jaxgpt.kernels import attend
from jaxgpt.masks import Visibility
from jaxgpt.shapes import Key
from jaxgpt.taps import tap, tap_of


@dataclasses.dataclass(frozen=True)
class MLA(AttentionBox):
    """Attention whose cache holds a latent of `kv_rank` and one rotary key for each token.

    A head's query and key are [nope, rope]: the first part carries no position; the second goes
    through the position box as a head of its own, and all heads share its key.

    Sites: `queries` (B T N H, rotated), `keys` (the rotary key, B T 1 P, rotated), `latent` (B T R,
    behind its norm), `scores`, `probs`, `heads` (B T N W), `out`; no `values`: one form makes none.

    Source: DeepSeek-AI 2024 (V2), section 2.1 and, for the norms of the latents, 3.1.2,
      https://arxiv.org/abs/2405.04434; DeepSeek-AI 2024 (V3), section 2.1.1,
      https://arxiv.org/abs/2412.19437
    """

    n_heads: int = 16  # heads, of queries, keys and values alike
    kv_rank: int = 512  # R, width of the latent of keys and values
    q_rank: int | None = None  # width of a latent of the queries; None: they have none
    nope_dim: int = 128  # width of a head's query and key that carries no position
    rope_dim: int = 64  # width of a head's query, and of the shared key, that does
    v_dim: int = 128  # width of a head's value
    norm: NormBox = RMSNorm(eps=1e-6)  # of the latents
    use_bias: bool = False  # of q_down, kv_down and out, where DeepSeek's code may have them
    scale: float | None = None  # factor on the scores; None: (nope_dim + rope_dim) ** -0.5

    def __post_init__(self) -> None:
        for name in ("n_heads", "kv_rank", "q_rank", "nope_dim", "rope_dim", "v_dim", "scale"):
            check_positive(**{name: getattr(self, name)})

    def check(self, dims: Dims) -> None:
        """The position box must fit the rotary part."""
        dims.position.check_head(self.rope_dim)
        self.norm.check(dims)

    def absorbs(self, n_queries: int, n_slots: int) -> bool:
        """Whether the absorbed form takes fewer FLOPs than to expand the slots of a cache.

        At DeepSeek's sizes and long contexts: for at most 157 queries at once.
        """
        expand = self.kv_rank * (self.nope_dim + self.v_dim)  # of a token, for one head
        naive = n_slots * (expand + n_queries * (self.nope_dim + self.rope_dim + self.v_dim))
        absorbed = n_queries * (expand + n_slots * 2 * (self.kv_rank + self.rope_dim))
        return absorbed < naive

    def build(self, dims: Dims, name: str | None = None) -> nn.Module:
        """The module; parameters `q` or `q_down`, `q_norm`, `q_up`; `kv_down`, ..., `out`."""
        return _MLA(self, dims, name=name)

    def init_cache(self, dims: Dims, batch: int, length: int, dtype: DTypeLike) -> Any:
        """kv_rank + rope_dim numbers for each of `length` tokens."""
        return LatentCache.empty(batch, length, self.kv_rank, self.rope_dim, dtype)


class _MLA(nn.Module):
    box: MLA
    dims: Dims

    @nn.compact
    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        visibility: Visibility,
        cache: LatentCache | None = None,
        dropout_key: Key | None = None,
    ) -> tuple[Float[Array, "B T D"], LatentCache | None]:
        box, dims, position = self.box, self.dims, self.dims.position
        (B, T, D), pos_BT, head_dim = x_BTD.shape, visibility.q_pos_BT, box.nope_dim + box.rope_dim
        q, q_name = x_BTD, "q"
        if box.q_rank is not None:
            q, q_name = Dense(box.q_rank, dims, box.use_bias, name="q_down")(x_BTD), "q_up"
            q = tap(self, "q_norm/out", box.norm.build(name="q_norm")(q))
        q = Dense(box.n_heads * head_dim, dims, False, name=q_name)(q)
        q_BTNH = q.reshape(B, T, box.n_heads, head_dim)
        nope, rope = jnp.split(q_BTNH, [box.nope_dim], -1)
        q_BTNH = tap(self, "queries", jnp.concatenate([nope, position.rotate(rope, pos_BT)], -1))

        down = Dense(box.kv_rank + box.rope_dim, dims, box.use_bias, name="kv_down")(x_BTD)
        latent, key = jnp.split(down, [box.kv_rank], -1)
        latent_BSR = tap(self, "latent", box.norm.build(name="kv_norm")(latent))
        key_BSP = tap(self, "keys", position.rotate(key[:, :, None], pos_BT))[:, :, 0]
        up_RNQ = _Up(box, dims, name="kv_up")().astype(x_BTD.dtype)
        form = _naive
        slot_BSZ = jnp.concatenate([latent_BSR, key_BSP], -1)
        if cache is not None:
            cache = cache.extend(latent_BSR, key_BSP, pos_BT)
        if cache is not None and not visibility.fresh:
            slot_BSZ = cache.slot_BSZ.astype(x_BTD.dtype)
            visibility = visibility.onto(cache.pos_BS)
            form = _absorbed if box.absorbs(T, cache.pos_BS.shape[1]) else _naive
        mix = functools.partial(
            attend,
            visibility=visibility,
            scale=position.score_scale() * (box.scale or head_dim**-0.5),
            bias=position.bias(box.n_heads),
            dropout_rate=dims.dropout,
            dropout_key=dropout_key,
            tap=tap_of(self, "scores", "probs"),
        )
        y_BTNW = tap(self, "heads", form(mix, q_BTNH, slot_BSZ, up_RNQ))
        y_BTD = Dense(D, dims, box.use_bias, residual=True, name="out")(y_BTNW.reshape(B, T, -1))
        return tap(self, "out", y_BTD), cache


class _Up(nn.Module):
    """The kernel from the latent to each head's [key, value], a matrix for the forms to cut."""

    box: MLA
    dims: Dims

    @nn.compact
    def __call__(self) -> Float[Array, "R N Q"]:
        box, init = self.box, self.dims.init.kernel(self.dims, residual=False)
        shape = (box.kv_rank, box.n_heads * (box.nope_dim + box.v_dim))
        return self.param("kernel", init, shape, jnp.float32).reshape(shape[0], box.n_heads, -1)


def _naive(
    mix: Callable[..., Array],
    q_BTNH: Float[Array, "B T N H"],
    slot_BSZ: Float[Array, "B S Z"],
    up_RNQ: Float[Array, "R N Q"],
) -> Float[Array, "B T N W"]:
    """Attention over N heads of keys and values, expanded from the latents."""
    (B, S, _), (R, N, Q) = slot_BSZ.shape, up_RNQ.shape
    latent_BSR, key_BSP = jnp.split(slot_BSZ, [R], -1)
    nope_dim = q_BTNH.shape[-1] - key_BSP.shape[-1]
    up_BSNQ = (latent_BSR.reshape(B * S, R) @ up_RNQ.reshape(R, N * Q)).reshape(B, S, N, Q)
    key_BSNP = jnp.broadcast_to(key_BSP[:, :, None], (B, S, N, key_BSP.shape[-1]))
    k_BSNH = jnp.concatenate([up_BSNQ[..., :nope_dim], key_BSNP], -1)
    return mix(q_BTNH, k_BSNH, up_BSNQ[..., nope_dim:])


def _absorbed(
    mix: Callable[..., Array],
    q_BTNH: Float[Array, "B T N H"],
    slot_BSZ: Float[Array, "B S Z"],
    up_RNQ: Float[Array, "R N Q"],
) -> Float[Array, "B T N W"]:
    """The same without expanding a token: one key head [latent, rotary key], its value the latent.

    `q . (W_k latent)` is `(W_k^T q) . latent`, and W_v is applied to the mean of the latents. Slots
    are their own values, rotary keys included, whose mean is dropped: a cache is read as it is.
    """
    rank, nope_dim = len(up_RNQ), q_BTNH.shape[-1] + len(up_RNQ) - slot_BSZ.shape[-1]
    q_BTNR = jnp.einsum("btnh,rnh->btnr", q_BTNH[..., :nope_dim], up_RNQ[..., :nope_dim])
    q_BTNZ = jnp.concatenate([q_BTNR, q_BTNH[..., nope_dim:]], -1)
    y_BTNZ = mix(q_BTNZ, slot_BSZ[:, :, None], slot_BSZ[:, :, None])
    return jnp.einsum("btnr,rnw->btnw", y_BTNZ[..., :rank], up_RNQ[..., nope_dim:])
