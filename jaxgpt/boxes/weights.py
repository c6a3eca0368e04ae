# SPDX-License-Identifier: Apache-2.0
"""Matrices as they are stored for decoding, where reading them is what a step waits for.

A weight stands in the parameter tree in the place of an array; `Dense` and `Embed` take either.
`jaxgpt.sample.weights` makes a whole tree of them. Left out: gradients; quantised activations; the
kernels of experts and of MLA's absorbed products, which their boxes cut up and which stay arrays.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxgpt.shapes import Params, wide

Way = Literal["reduce", "each", "dot"]


def way(rows: int, backend: str, each: int) -> Way:
    """How a product is written that has so many rows of activations.

    On a GPU one row is multiplied with the matrix and added up ("reduce"), which a generic product
    does at two thirds of that speed; XLA's CPU back end converts a stored matrix on the fly only
    where it meets a vector, so up to `each` rows meet it one after the other ("each"); for more it
    writes a converted copy first, which takes several times as long. All else is one "dot".

    Args:
      rows: Of the activations, leading axes in one.
      backend: As `jax.default_backend()` says.
      each: The most rows that the matrix is read for anew.
    """
    if backend == "gpu":
        return "reduce" if rows == 1 else "dot"
    return "each" if backend == "cpu" and rows <= each else "dot"


class Weight:
    """A matrix of O rows and I columns, by its rows: O is the first axis of its arrays.

    It is the transpose of the [in, out] kernel of a `Dense`, or a table of embeddings.

    Attributes:
      each: See `way`.
      dtype: What a model computes in whose table this is.
      ones_I: Ones, float32, of all arrays the only one without O; see `_by_row`.
    """

    each: ClassVar[int] = 8
    dtype: Any
    ones_I: Any

    def values(self) -> Float[Array, "*O I"]:
        """The matrix in float32, up to the factors of its rows."""
        raise NotImplementedError

    def factors(self) -> Array | None:
        """What each row is yet to be multiplied by, (*O,); None: nothing."""
        return None

    def matrix(self) -> Float[Array, "*O I"]:
        """The matrix in float32."""
        factors = self.factors()
        return self.values() if factors is None else self.values() * factors[..., None]

    def array(self) -> Float[Array, "I O"]:
        """The kernel [in, out] that `product` multiplies by, in float32."""
        return self.matrix().T

    def rows(self, ids: Int[Array, "*B"]) -> Float[Array, "*B I"]:
        """Some rows, in float32: the lookup of embeddings."""
        return jax.tree.map(lambda a: a if a is self.ones_I else a[ids], self).matrix()

    def product(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        """`x @ array()` in the dtype of x.

        Numerics: on a CPU and for one row on a GPU everything is in float32 and rounded once;
        elsewhere the matrix is brought to the dtype of x.
        """
        backend, x_RI = jax.default_backend(), x.reshape(-1, x.shape[-1])
        y_RO = self.by(way(len(x_RI), backend, self.each), x_RI, backend)
        return y_RO.reshape(*x.shape[:-1], -1)

    def by(self, way: Way, x_RI: Float[Array, "R I"], backend: str) -> Float[Array, "R O"]:
        """The product, written in one of the ways."""
        if way == "dot" and backend != "cpu":
            return x_RI @ self.matrix().astype(x_RI.dtype).T
        wide_RI, factors_O = wide(x_RI), self.factors()
        if way == "dot":
            y_RO = wide_RI @ self.values().T
        elif way == "reduce":
            y_RO = (wide_RI[:, None] * self.values()[None]).sum(-1)
        else:
            rows = jnp.split(wide_RI, len(wide_RI))
            y_RO = jnp.concatenate([self._by_row(row) for row in rows])
        return (y_RO if factors_O is None else y_RO * factors_O[None]).astype(x_RI.dtype)

    def _by_row(self, x_1I: Float[Array, "1 I"]) -> Float[Array, "1 O"]:
        """The product of one row, read from the matrix as it is stored.

        Behind a barrier with x, or XLA would convert the matrix once, before the loop of decoding,
        and read the wide copy at every step. And divided by ones, since XLA:CPU computes what is
        cheap anew for each of the O outputs (a norm, a gate) but a division once.
        """
        stored, x_1I = jax.lax.optimization_barrier((self, x_1I))
        return (x_1I / stored.ones_I[None]) @ stored.values().T


@struct.dataclass
class Cast(Weight):
    """The matrix in a floating-point type of its own.

    Attributes:
      w_OI: The matrix.
      ones_I: See `Weight`.
    """

    w_OI: Any
    ones_I: Any

    @classmethod
    def of(cls, w_OI: Float[Array, "O I"], dtype: DTypeLike) -> "Cast":
        """The matrix, rounded to the dtype."""
        return cls(w_OI.astype(dtype), jnp.ones(w_OI.shape[1]))

    @property
    def dtype(self) -> Any:
        """See `Weight`."""
        return self.w_OI.dtype

    def values(self) -> Float[Array, "*O I"]:
        """See `Weight`."""
        return wide(self.w_OI)


@struct.dataclass
class Int8(Weight):
    """Whole numbers within 127 of zero and a factor for each row, an output of the product.

    Attributes:
      q_OI: The numbers.
      scale_O: The factors, float32.
      ones_I, dtype: See `Weight`.
    """

    q_OI: Any
    scale_O: Any
    ones_I: Any
    dtype: Any = struct.field(pytree_node=False)

    @classmethod
    def of(cls, w_OI: Float[Array, "O I"], dtype: DTypeLike) -> "Int8":
        """The nearest such matrix; no entry is off by more than half its row's factor."""
        q_OI, scale_O = _rounded(wide(w_OI), 127)
        return cls(q_OI, scale_O, jnp.ones(w_OI.shape[1]), jnp.dtype(dtype))

    def values(self) -> Float[Array, "*O I"]:
        """See `Weight`."""
        return self.q_OI.astype(jnp.float32)

    def factors(self) -> Array:
        """See `Weight`."""
        return self.scale_O


@struct.dataclass
class Int4(Weight):
    """Whole numbers from -8 to 7, two in a byte, and a factor for each group of a row.

    Meant for memory: a CPU unpacks it at each step, which takes longer than to read int8.

    Attributes:
      pair_OJ: In byte j the numbers of columns j (low) and j + I/2 (high).
      scale_OG: The factors of G groups of neighbouring columns, float32.
      ones_I, dtype: See `Weight`.
    """

    each: ClassVar[int] = 1
    pair_OJ: Any
    scale_OG: Any
    ones_I: Any
    dtype: Any = struct.field(pytree_node=False)

    @classmethod
    def of(cls, w_OI: Float[Array, "O I"], dtype: DTypeLike, group: int = 32) -> "Int4":
        """Such a matrix near by: of several factors each group has the one with the least squares.

        Args:
          w_OI: The matrix, with an even number of columns.
          dtype: See the attribute.
          group: Columns of a group, or fewer where they do not divide I.
        """
        size = math.gcd(group, w_OI.shape[1])
        q_OGC, scale_OG = _fitted(wide(w_OI).reshape(len(w_OI), -1, size))
        low_OJ, high_OJ = jnp.split(q_OGC.reshape(w_OI.shape), 2, axis=1)
        return cls(
            (high_OJ << 4) | (low_OJ & 15), scale_OG, jnp.ones(w_OI.shape[1]), jnp.dtype(dtype)
        )

    def values(self) -> Float[Array, "*O I"]:
        """See `Weight`."""
        low, high = (self.pair_OJ << 4) >> 4, self.pair_OJ >> 4  # both keep the sign
        q_OI = jnp.concatenate([low, high], -1).astype(jnp.float32)
        q_OGC = q_OI.reshape(*self.scale_OG.shape, -1)
        return (q_OGC * self.scale_OG[..., None]).reshape(q_OI.shape)


def _rounded(w: Array, most: int) -> tuple[Array, Array]:
    """Whole numbers up to `most` and the factor for each vector of the last axis."""
    scale = jnp.abs(w).max(-1) / most
    scale = jnp.where(scale > 0, scale, 1.0)
    return jnp.round(w / scale[..., None]).astype(jnp.int8), scale


def _fitted(w: Array) -> tuple[Array, Array]:
    """Whole numbers from -8 to 7 and the factor for each vector of the last axis, least squares.

    Tried are factors that bring the largest entry to -8, whatever its sign, and smaller ones, which
    cut it and give the others a finer step; each is then the best one for its numbers.
    """
    largest = jnp.take_along_axis(w, jnp.abs(w).argmax(-1, keepdims=True), -1)
    best = jnp.full(largest.shape, jnp.inf), jnp.zeros(w.shape), jnp.ones_like(largest)

    def better(i: Array, best: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        scale = largest / -8 * (1 - i / 32)
        q = jnp.clip(jnp.round(w / jnp.where(scale == 0, 1.0, scale)), -8, 7)
        squares = (q * q).sum(-1, keepdims=True)
        scale = (w * q).sum(-1, keepdims=True) / jnp.where(squares == 0, 1.0, squares)
        new = ((w - q * scale) ** 2).sum(-1, keepdims=True), q, scale
        return jax.tree.map(lambda a, b: jnp.where(new[0] < best[0], a, b), new, best)

    _, q, scale = jax.lax.fori_loop(0, 14, better, best)
    return q.astype(jnp.int8), scale[..., 0]


def parameter(
    module: nn.Module, name: str, init: Callable[..., Array], shape: Sequence[int]
) -> Any:
    """A parameter of a module: an array, float32 when it is made, or the `Weight` in its place."""
    if module.has_variable("params", name):
        stored = module.get_variable("params", name)
        if isinstance(stored, Weight):
            return stored
    return module.param(name, init, tuple(shape), jnp.float32)


def joined(params: Params, name: str, parts: Sequence[str]) -> Params:
    """Parameters of a module with several `Dense` of one input in one, their outputs side by side.

    Unchanged where they are not there as plain arrays.

    Args:
      params: Of the module.
      name: Of the one.
      parts: Names of the several, in order.
    """
    several = [params.get(part, {}) for part in parts]
    if not all("kernel" in part and set(part) <= {"kernel", "bias"} for part in several):
        return params
    if any(isinstance(leaf, Weight) for part in several for leaf in part.values()):
        return params
    one = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-1), *several)
    return {**{key: value for key, value in params.items() if key not in parts}, name: one}
