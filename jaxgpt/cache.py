# SPDX-License-Identifier: Apache-2.0
"""Caches as values, of keys and values or of MLA's latents: `extend` returns a new one.

Left out: how long a cache is and when it is full. Whoever allocates it (`jaxgpt.sample`) counts the
tokens; writing past the end cannot be detected inside a compiled step.
"""

import functools
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

AnyCache = TypeVar("AnyCache", bound="_Slots")


class _Slots:
    """What all caches share; `SLOTTED` names their arrays, whose second axis is that of slots."""

    SLOTTED: ClassVar[tuple[str, ...]]
    pos_BS: Any
    index: Any
    replace: Any

    def grown(self: AnyCache, length: int) -> AnyCache:
        """The same with `length` slots in all, the new ones empty and behind the others.

        Raises:
          ValueError: There are more than `length` already.
        """
        more = length - self.pos_BS.shape[1]
        if more < 0:
            raise ValueError(f"a cache of {self.pos_BS.shape[1]} slots cannot grow to {length}")

        def pad(name: str) -> Array:
            array = getattr(self, name)
            width = [(0, 0), (0, more), *[(0, 0)] * (array.ndim - 2)]
            return jnp.pad(array, width, constant_values=-1 if name == "pos_BS" else 0)

        return self.replace(**{name: pad(name) for name in self.SLOTTED})

    def rewound(self: AnyCache, index: Int[Array, "..."] | int) -> AnyCache:
        """The same without the tokens in slot `index` and behind it, which are written next.

        With an index for each row, (B,), rows go on from there each by itself.
        """
        index = jnp.asarray(index, jnp.int32)
        kept_bS = jnp.arange(self.pos_BS.shape[1])[None] < index.reshape(-1, 1)
        return self.replace(pos_BS=jnp.where(kept_bS, self.pos_BS, -1), index=index)

    def _written(self: AnyCache, **new: Array) -> AnyCache:
        """The same with T tokens at the index, given for each of the arrays."""
        T, S = new["pos_BS"].shape[1], self.pos_BS.shape[1]
        if T > S:
            raise ValueError(f"{T} tokens do not fit into a cache of {S} slots")

        def write(name: str, new: Array) -> Array:
            old = getattr(self, name)
            new = new.astype(old.dtype)
            if self.index.ndim == 0:
                return jax.lax.dynamic_update_slice_in_dim(old, new, self.index, 1)
            index = jnp.repeat(self.index, len(old) // len(self.index))
            update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
            return jax.vmap(update)(old, new, index)

        fields = {name: write(name, value) for name, value in new.items()}
        return self.replace(**fields, index=self.index + T)


@struct.dataclass
class KVCache(_Slots):
    """Keys, values and positions of the tokens seen so far, in the order they were written.

    The local letter J is B and K in one axis. Heads stand before slots, so that a step of decoding
    reads each head's keys in one stretch; and as the batched products of attention take them, since
    XLA's CPU back end would copy a whole cache that is reshaped between its write and its use.

    Attributes:
      k_JSH: Keys, rotated where the position box rotates.
      v_JSH: Values.
      pos_BS: Position of each slot's token; -1 for an empty slot and for padding.
      index: The next slot to be written: one for all rows (ragged prompts are padded on the left),
        or one for each after `rewound`.
    """

    SLOTTED: ClassVar = ("k_JSH", "v_JSH", "pos_BS")
    k_JSH: Float[Array, "J S H"]
    v_JSH: Float[Array, "J S H"]
    pos_BS: Int[Array, "B S"]
    index: Int[Array, ""] | Int[Array, " B"]

    @classmethod
    def empty(
        cls, batch: int, length: int, n_kv_heads: int, head_dim: int, dtype: DTypeLike
    ) -> "KVCache":
        """A cache of `length` empty slots."""
        kv_JSH = jnp.zeros((batch * n_kv_heads, length, head_dim), dtype)
        return cls(kv_JSH, kv_JSH, **_no_tokens(batch, length))

    @property
    def k_BSKH(self) -> Float[Array, "B S K H"]:
        """Keys as attention kernels take them; those that want heads first undo it for free."""
        return self.k_JSH.reshape(len(self.pos_BS), -1, *self.k_JSH.shape[1:]).swapaxes(1, 2)

    @property
    def v_BSKH(self) -> Float[Array, "B S K H"]:
        """Values, likewise."""
        return self.v_JSH.reshape(len(self.pos_BS), -1, *self.v_JSH.shape[1:]).swapaxes(1, 2)

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
        k_JTH, v_JTH = (
            x.swapaxes(1, 2).reshape(-1, len(x[0]), x.shape[3]) for x in (k_BTKH, v_BTKH)
        )
        return self._written(k_JSH=k_JTH, v_JSH=v_JTH, pos_BS=pos_BT)


@struct.dataclass
class LatentCache(_Slots):
    """What MLA keeps of the tokens seen so far: R + P numbers a token, P the rotary width.

    Both stand in one array, since the absorbed form takes it whole as its keys and its values.

    Attributes:
      slot_BSZ: Z = R + P: the latent behind its norm, from which all heads' keys and values follow,
        and the rotary key that the heads share, rotated.
      pos_BS: As in `KVCache`.
      index: As in `KVCache`.
      kv_rank: R.
    """

    SLOTTED: ClassVar = ("slot_BSZ", "pos_BS")
    slot_BSZ: Float[Array, "B S Z"]
    pos_BS: Int[Array, "B S"]
    index: Int[Array, ""] | Int[Array, " B"]
    kv_rank: int = struct.field(pytree_node=False)

    @classmethod
    def empty(
        cls, batch: int, length: int, kv_rank: int, rope_dim: int, dtype: DTypeLike
    ) -> "LatentCache":
        """A cache of `length` empty slots."""
        slot_BSZ = jnp.zeros((batch, length, kv_rank + rope_dim), dtype)
        return cls(slot_BSZ, **_no_tokens(batch, length), kv_rank=kv_rank)

    @property
    def latent_BSR(self) -> Float[Array, "B S R"]:
        """The latents."""
        return self.slot_BSZ[..., : self.kv_rank]

    @property
    def key_BSP(self) -> Float[Array, "B S P"]:
        """The rotary keys."""
        return self.slot_BSZ[..., self.kv_rank :]

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
        slot_BTZ = jnp.concatenate([latent_BTR, key_BTP], -1)
        return self._written(slot_BSZ=slot_BTZ, pos_BS=pos_BT)


def _no_tokens(batch: int, length: int) -> dict[str, Any]:
    """Positions and index of a cache that nothing was written to."""
    return dict(pos_BS=jnp.full((batch, length), -1, jnp.int32), index=jnp.zeros((), jnp.int32))
