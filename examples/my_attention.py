# SPDX-License-Identifier: Apache-2.0
"""A box of one's own: attention that averages the past. Nothing in jaxgpt is edited for it.

On the command line, from this folder:

    python ../train.py --preset tiny --model.attention=my_attention.MeanPool \
        --model.attention.scale=0.5 --run meanpool

and in Python: `dataclasses.replace(cfg, attention=MeanPool())`.
"""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxgpt.boxes.base import AttentionBox, Dims
from jaxgpt.boxes.dense import Dense
from jaxgpt.cache import KVCache
from jaxgpt.kernels import dropout
from jaxgpt.masks import Visibility


@dataclasses.dataclass(frozen=True)
class MeanPool(AttentionBox):
    """The mean over what a token may see: the smallest thing that is still an attention box."""

    scale: float = 1.0  # factor on the mean

    def build(self, dims: Dims, name: str | None = None) -> nn.Module:
        """The module; one matrix, `out`."""
        return _MeanPool(self, dims, name=name)

    def init_cache(self, dims: Dims, batch: int, length: int, dtype) -> KVCache:
        """The past itself, as the values of a cache with one head."""
        return KVCache.empty(batch, length, 1, dims.d_model, dtype)


class _MeanPool(nn.Module):
    box: MeanPool
    dims: Dims

    @nn.compact
    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        visibility: Visibility,
        cache: KVCache | None = None,
        dropout_key=None,
    ):
        past_BSD = x_BTD
        if cache is not None:
            x_BT1D = x_BTD[:, :, None]
            cache = cache.extend(x_BT1D, x_BT1D, visibility.q_pos_BT)
            visibility = visibility.onto(cache.pos_BS)
            past_BSD = jnp.where(cache.pos_BS[..., None] >= 0, cache.v_BSKH[:, :, 0], 0)
        seen_BTS = visibility.mask().astype(x_BTD.dtype)
        share_BTS = seen_BTS / jnp.maximum(seen_BTS.sum(-1, keepdims=True), 1)
        share_BTS = dropout(share_BTS, self.dims.dropout, dropout_key)
        share_BTS = jnp.broadcast_to(share_BTS, (len(x_BTD), *share_BTS.shape[1:]))
        mean_BTD = jnp.einsum("bts,bsd->btd", share_BTS, past_BSD)
        out = Dense(x_BTD.shape[-1], self.dims, residual=True, name="out")
        return self.box.scale * out(mean_BTD), cache
