# SPDX-License-Identifier: Apache-2.0
"""The key/value cache as a value: `extend` returns a new one and changes nothing.

Left out: how long a cache is and when it is full. Whoever allocates it (`jaxgpt.sample`) counts the
tokens; writing past the end cannot be detected inside a compiled step.
"""

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
        return cls(
            kv_BSKH, kv_BSKH, jnp.full((batch, length), -1, jnp.int32), jnp.zeros((), jnp.int32)
        )

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
        if k_BTKH.shape[1] > self.k_BSKH.shape[1]:
            raise ValueError(
                f"{k_BTKH.shape[1]} tokens do not fit into a cache of {self.k_BSKH.shape[1]} slots"
            )

        def write(old: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), self.index, 1)

        return KVCache(
            write(self.k_BSKH, k_BTKH),
            write(self.v_BSKH, v_BTKH),
            write(self.pos_BS, pos_BT),
            self.index + k_BTKH.shape[1],
        )
