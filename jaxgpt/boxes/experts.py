# SPDX-License-Identifier: Apache-2.0
"""The experts of a mixture, all at once, and the two ways of bringing tokens to them.

`Sorted` lines the choices of all tokens up by expert and drops none; `Slots` gives each expert a
fixed number of slots, which einsums fill: shapes that a mesh can divide among its devices. Both
offer what `Experts` needs: rows of tokens, and the product of each row with its expert's matrix.
Left out: who chooses, which is `boxes/moe.py`.
"""

from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.nn.initializers import Initializer
from jaxtyping import Array, Bool, Float, Int

from jaxgpt.boxes.base import Dims
from jaxgpt.boxes.ffn import ACTIVATIONS, MLP, GatedMLP
from jaxgpt.kernels.grouped import grouped_matmul, permute
from jaxgpt.shapes import Key

Multiply = Callable[[Array, Array], Array]  # rows [..., I] and w_EIO -> rows [..., O]
Tap = Callable[[Array], Array]


class Experts(nn.Module):
    """A feed-forward network for each expert.

    Attributes:
      expert: Each of them.
      n_experts: E.
      dims: The model around them.
    """

    expert: GatedMLP | MLP
    n_experts: int
    dims: Dims

    @nn.compact
    def __call__(
        self, x: Float[Array, "... D"], multiply: Multiply, tap_hidden: Tap
    ) -> Float[Array, "... D"]:
        """Rows through the expert that `multiply` finds for each; parameters as the expert's."""

        def dense(name: str, x: Array, features: int, residual: bool = False) -> Array:
            layer = ExpertDense(
                self.n_experts, features, self.dims, self.expert.use_bias, residual, name=name
            )
            return layer(x, multiply)

        expert, d_ff = self.expert, self.expert.width(self.dims)
        if isinstance(expert, GatedMLP):
            hidden = expert.hidden(dense("gate", x, d_ff), dense("up", x, d_ff))
        else:
            hidden = ACTIVATIONS[expert.activation](dense("up", x, d_ff))
        return dense("down", tap_hidden(hidden), x.shape[-1], residual=True)


class ExpertDense(nn.Module):
    """`boxes.dense.Dense` for each expert: kernel [E, in, out], bias [E, out]."""

    n_experts: int
    features: int
    dims: Dims
    use_bias: bool
    residual: bool

    @nn.compact
    def __call__(self, x: Float[Array, "... I"], multiply: Multiply) -> Float[Array, "... O"]:
        """Multiply each row by the kernel of its expert."""
        fan_in, init = x.shape[-1], self.dims.init
        kernel_init = _for_each(init.kernel(self.dims, residual=self.residual))
        shape = (self.n_experts, fan_in, self.features)
        y = multiply(x, self.param("kernel", kernel_init, shape, jnp.float32))
        if self.use_bias:
            bias_init = _for_each(init.bias(self.dims.fan_at_base(fan_in)))
            bias_EO = self.param("bias", bias_init, shape[::2], jnp.float32)
            # A product with ones: its gradient is a sum over rows of each expert, not a scatter.
            y = y + multiply(jnp.ones_like(x[..., :1]), bias_EO[:, None])
        return y


def _for_each(init: Initializer) -> Initializer:
    """`init` for each index of the first axis: experts are drawn as if each were alone."""

    def init_each(key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32, **_: Any) -> Array:
        keys = jax.random.split(key, shape[0])
        return jax.vmap(lambda key: init(key, shape[1:], dtype))(keys)

    return cast(Initializer, init_each)


@struct.dataclass
class Sorted:
    """Choices in the order of their expert, M = B T k of them; those of padding come last.

    Attributes:
      order_M: Which choice stands in each row.
      place_BTk: In which row each choice stands.
      size_E: Rows of each expert.
    """

    order_M: Int[Array, " M"]
    place_BTk: Int[Array, "B T k"]
    size_E: Int[Array, " E"]

    @classmethod
    def of(
        cls, choice_BTk: Int[Array, "B T k"], valid_BT: Bool[Array, "B T"], n_experts: int
    ) -> "Sorted":
        """Sort the choices of valid tokens."""
        expert_M = jnp.where(valid_BT[:, :, None], choice_BTk, n_experts).reshape(-1)
        order_M = jnp.argsort(expert_M, stable=True)
        # A scatter of integers is a hundred times as fast as another sort.
        place_M = jnp.zeros_like(order_M).at[order_M].set(jnp.arange(len(order_M)))
        size_E = jax.nn.one_hot(expert_M, n_experts, dtype=bool).sum(0)
        return cls(order_M, place_M.reshape(choice_BTk.shape), size_E)

    def rows(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "M D"]:
        """Each token once for each of its choices."""
        k = self.place_BTk.shape[-1]
        return self._sort(
            jnp.broadcast_to(x_BTD[:, :, None], (*x_BTD.shape[:2], k, x_BTD.shape[2]))
        )

    def multiply(self, x_MI: Float[Array, "M I"], w_EIO: Float[Array, "E I O"]) -> Array:
        """Rows times the matrices of their experts, zero for padding."""
        return grouped_matmul(x_MI, w_EIO, self.size_E)

    def tap_hidden(self, tap: Tap, h_MF: Float[Array, "M F"]) -> Float[Array, "M F"]:
        """Show rows to a tap as (B, T, k, F)."""
        h_BTkF = self._unsort(h_MF)
        patched_BTkF = tap(h_BTkF)
        return h_MF if patched_BTkF is h_BTkF else self._sort(patched_BTkF)

    def combine(
        self, y_MD: Float[Array, "M D"], weight_BTk: Float[Array, "B T k"]
    ) -> Float[Array, "B T D"]:
        """Weighted sums over the choices of each token, in the dtype of the weights."""
        return (self._unsort(y_MD) * weight_BTk[..., None]).sum(2).astype(y_MD.dtype)

    def _sort(self, x_BTkI: Array) -> Array:
        x_MI = x_BTkI.reshape(-1, x_BTkI.shape[-1])
        return permute(x_MI, self.order_M, self.place_BTk.reshape(-1))

    def _unsort(self, x_MI: Array) -> Array:
        place_M = self.place_BTk.reshape(-1)
        return permute(x_MI, place_M, self.order_M).reshape(*self.place_BTk.shape, -1)


@struct.dataclass
class Slots:
    """C slots of each expert for each sequence, taken in the order of the tokens.

    Attributes:
      choice_BTk: Experts of each token.
      taken_BTEC: Which slot each token takes with each expert: at most one; none where it did not
        choose the expert, is padding, or comes too late.

    Source: Lepikhin et al. 2020 (GShard), section 2.2, https://arxiv.org/abs/2006.16668
    Differs from the paper: GShard fills slots with all first choices before the second ones; here a
      token's slot does not depend on later tokens.
    """

    choice_BTk: Int[Array, "B T k"]
    taken_BTEC: Bool[Array, "B T E C"]

    @classmethod
    def of(
        cls,
        choice_BTk: Int[Array, "B T k"],
        valid_BT: Bool[Array, "B T"],
        n_experts: int,
        n_slots: int,
    ) -> "Slots":
        """Give slots to valid tokens."""
        chosen_BTE = jax.nn.one_hot(choice_BTk, n_experts, dtype=bool).any(2)
        chosen_BTE &= valid_BT[:, :, None]
        before_BTE = jnp.cumsum(chosen_BTE, axis=1) - chosen_BTE
        slot_BTEC = jax.nn.one_hot(before_BTE, n_slots, dtype=bool)
        return cls(choice_BTk, slot_BTEC & chosen_BTE[..., None])

    def rows(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "E B C D"]:
        """The token of each slot, zero in empty ones."""
        taken_BTEC = self.taken_BTEC.astype(x_BTD.dtype)
        return jnp.einsum("btec,btd->ebcd", taken_BTEC, x_BTD, precision="highest")

    def multiply(self, x_EBCI: Float[Array, "E B C I"], w_EIO: Float[Array, "E I O"]) -> Array:
        """Slots times the matrix of their expert."""
        return jnp.einsum("ebci,eio->ebco", x_EBCI, w_EIO.astype(x_EBCI.dtype))

    def tap_hidden(self, tap: Tap, h_EBCF: Float[Array, "E B C F"]) -> Float[Array, "E B C F"]:
        """Show slots to a tap, as they are."""
        return tap(h_EBCF)

    def combine(
        self, y_EBCD: Float[Array, "E B C D"], weight_BTk: Float[Array, "B T k"]
    ) -> Float[Array, "B T D"]:
        """Weighted sums over the slots of each token, in the dtype of the weights."""
        hot_BTkE = jax.nn.one_hot(self.choice_BTk, self.taken_BTEC.shape[2], dtype=bool)
        weight_BTE = jnp.where(hot_BTkE, weight_BTk[..., None], 0).sum(2)
        weight_BTEC = jnp.where(self.taken_BTEC, weight_BTE[..., None], 0)
        y_EBCD = y_EBCD.astype(weight_BTEC.dtype)
        y_BTD = jnp.einsum("btec,ebcd->btd", weight_BTEC, y_EBCD, precision="highest")
        return y_BTD.astype(y_EBCD.dtype)
