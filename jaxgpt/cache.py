# SPDX-License-Identifier: Apache-2.0
"""Caches as values, of keys and values or of MLA's latents: `extend` returns a new one.

Left out: how long a cache is and when it is full. Whoever allocates it (`jaxgpt.sample`) counts the
tokens; writing past the end cannot be detected inside a compiled step.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


@struct.dataclass
class KVCache:
    """Keys, values and positions of the tokens seen so far, in the order they were written.

    Attributes:
      k_BSKH: Keys, rotated where the position box rotates.
      v_BSKH: Values.
      pos_BS: Position of each slot's token; -1 for an empty slot and for padding.
      index: The next slot to be written, one for all rows (ragged prompts are padded on the left).
    """

    k_BSKH: Float[Array, "B S K H"]
    v_BSKH: Float[Array, "B S K H"]
    pos_BS: Int[Array, "B S"]
    index: Int[Array, ""]

    @classmethod
    def empty(
        cls, batch: int, length: int, n_kv_heads: int, head_dim: int, dtype: DTypeLike
    ) -> "KVCache":
        """A cache of `length` empty slots."""
        kv_BSKH = jnp.zeros((batch, length, n_kv_heads, head_dim), dtype)
        return cls(kv_BSKH, kv_BSKH, **_no_tokens(batch, length))

    def extend(
        self,
        k_BTKH: Float[Array, "B T K H"],
        v_BTKH: Float[Array, "B T K H"],
        pos_BT: Int[Array, "B T"],
    ) -> "KVCache":
        """Write T tokens behind those that are there.

        Raises:
          ValueError: T alone is more than the cache's slots.
        """
        return _written(self, pos_BT, k_BSKH=k_BTKH, v_BSKH=v_BTKH)


@struct.dataclass
class LatentCache:
    """What MLA keeps of the tokens seen so far: R + P numbers a token, P the rotary width.

    Attributes:
      latent_BSR: Latents behind their norm, from which all heads' keys and values follow.
      key_BSP: The rotary key that the heads share, rotated.
      pos_BS: As in `KVCache`.
      index: As in `KVCache`.
    """

    latent_BSR: Float[Array, "B S R"]
    key_BSP: Float[Array, "B S P"]
    pos_BS: Int[Array, "B S"]
    index: Int[Array, ""]

    @classmethod
    def empty(
        cls, batch: int, length: int, kv_rank: int, rope_dim: int, dtype: DTypeLike
    ) -> "LatentCache":
        """A cache of `length` empty slots."""
        latent_BSR = jnp.zeros((batch, length, kv_rank), dtype)
        key_BSP = jnp.zeros((batch, length, rope_dim), dtype)
        return cls(latent_BSR, key_BSP, **_no_tokens(batch, length))

    def extend(
        self,
        latent_BTR: Float[Array, "B T R"],
        key_BTP: Float[Array, "B T P"],
        pos_BT: Int[Array, "B T"],
    ) -> "LatentCache":
        """Write T tokens behind those that are there.

        Raises:
          ValueError: T alone is more than the cache's slots.
        """
        return _written(self, pos_BT, latent_BSR=latent_BTR, key_BSP=key_BTP)


def _no_tokens(batch: int, length: int) -> dict[str, Any]:
    """Positions and index of a cache that nothing was written to."""
    return dict(pos_BS=jnp.full((batch, length), -1, jnp.int32), index=jnp.zeros((), jnp.int32))


def _written(cache: Any, pos_BT: Array, **new: Array) -> Any:
    """`cache` with T tokens at its index; `new` has (B, T, ...) for each of its other fields."""
    T, S = pos_BT.shape[1], cache.pos_BS.shape[1]
    if T > S:
        raise ValueError(f"{T} tokens do not fit into a cache of {S} slots")

    def write(name: str, new: Array) -> Array:
        old = getattr(cache, name)
        return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), cache.index, 1)

    fields = {name: write(name, value) for name, value in (new | {"pos_BS": pos_BT}).items()}
    return cache.replace(**fields, index=cache.index + T)
