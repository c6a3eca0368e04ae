# SPDX-License-Identifier: Apache-2.0
"""Who sees whom: one value, passed from the model through attention to the kernels.

The rule compares positions, never array indices, so that training, left padding, packing and cached
decoding share it. It is written once, in `Visibility.mask`; a kernel that can do without the array
(a fused one) decides on the static fields alone.
"""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int


@struct.dataclass
class Visibility:
    """Query t sees key s iff 0 <= q_pos - k_pos < window, both are in one segment, and s is filled.

    Attributes:
      q_pos_BT: Position of each query in its sequence, in tokens; -1 marks padding.
      k_pos_BS: Position of each key; -1 marks padding or an empty cache slot.
      q_segment_BT: Document number of each query in a packed row, or None for one document.
      k_segment_BS: The same for the keys; None together with the queries'.
      prefix_B: Length of each row's prefix, whose keys every query of the row sees; None for none.
        A model with one is a prefix-LM and not a decoder-only transformer (Raffel et al. 2020,
        section 3.2.1, https://arxiv.org/abs/1910.10683).
      causal: False drops the rule's left side (and its right one): every filled key is seen.
      window: Number of keys a query may see, itself included; None for all of the past.
      fresh: Static promise that the caches of this call were empty: keys that a box just made are
        all there is, and it may attend to them alone.
      cached: Static: the keys are those of a cache, so that few queries meet many keys, and
        nothing is differentiated.
      plain: Static promise that queries and keys are both at positions 0..T-1 with neither padding
        nor segments nor prefix, which lets a kernel work without a mask array.
      kernel: Name of the attention kernel to use, "auto" to choose; see `jaxgpt.kernels`.
    """

    q_pos_BT: Int[Array, "B T"]
    k_pos_BS: Int[Array, "B S"]
    q_segment_BT: Int[Array, "B T"] | None = None
    k_segment_BS: Int[Array, "B S"] | None = None
    prefix_B: Int[Array, " B"] | None = None
    causal: bool = struct.field(pytree_node=False, default=True)
    window: int | None = struct.field(pytree_node=False, default=None)
    plain: bool = struct.field(pytree_node=False, default=False)
    fresh: bool = struct.field(pytree_node=False, default=False)
    cached: bool = struct.field(pytree_node=False, default=False)
    kernel: str = struct.field(pytree_node=False, default="auto")

    @classmethod
    def full(cls, batch: int, length: int) -> "Visibility":
        """Plain causal self-attention over `length` tokens without padding."""
        pos_BT = jnp.broadcast_to(jnp.arange(length), (batch, length))
        return cls(pos_BT, pos_BT, plain=True)

    @classmethod
    def of(
        cls,
        pos_BT: Int[Array, "B T"],
        segment_BT: Int[Array, "B T"] | None = None,
        prefix_B: Int[Array, " B"] | None = None,
    ) -> "Visibility":
        """Causal self-attention over tokens at `pos_BT`, each document for itself."""
        return cls(pos_BT, pos_BT, segment_BT, segment_BT, prefix_B)

    def onto(self, k_pos_BS: Int[Array, "B S"]) -> "Visibility":
        """The same queries over the keys of a cache.

        Raises:
          ValueError: The queries have segments; caches hold one document a row.
        """
        self._check_segments()
        static = dict(plain=False, fresh=False, cached=True)
        return dataclasses.replace(self, k_pos_BS=k_pos_BS, **static)

    def first(self) -> "Visibility":
        """The same queries over their own keys, which are the first in a cache: see `fresh`.

        Raises:
          ValueError: As `onto`.
        """
        self._check_segments()
        return dataclasses.replace(self, fresh=True)

    def _check_segments(self) -> None:
        if self.q_segment_BT is not None:
            raise ValueError(
                "segments cannot be used with a cache: a cache holds one document a row"
            )

    @property
    def valid_BT(self) -> Bool[Array, "B T"]:
        """True where a query is a real token."""
        return self.q_pos_BT >= 0

    def mask(self) -> Bool[Array, "b T S"]:
        """The rule as an array; b is 1 where it is the same for every row, else B."""
        q_pos, k_pos = self.q_pos_BT, self.k_pos_BS
        if self.plain:
            q_pos, k_pos = (jnp.arange(p.shape[1])[None] for p in (q_pos, k_pos))
        distance_bTS = q_pos[:, :, None] - k_pos[:, None, :]
        seen_bTS = jnp.broadcast_to(k_pos[:, None, :] >= 0, distance_bTS.shape)
        if self.causal:
            seen_bTS &= distance_bTS >= 0
            if self.window is not None:
                seen_bTS &= distance_bTS < self.window
            if self.prefix_B is not None:
                in_prefix_BS = (k_pos >= 0) & (k_pos < self.prefix_B[:, None])
                seen_bTS |= in_prefix_BS[:, None, :]
        if self.q_segment_BT is not None and self.k_segment_BS is not None:
            seen_bTS &= self.q_segment_BT[:, :, None] == self.k_segment_BS[:, None, :]
        return seen_bTS
