# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of the arrays of a pytree, computed where the arrays live.

A checkpoint stores them beside its data and compares them after reading: the storage layers below
do not notice a flipped bit. Each element's bits are mixed with its global index and summed as
32-bit integers, which add up to the same in any order: the digest is exact under any sharding and
device count, and nothing is gathered. One changed bit always changes both sums; two elements that
changed places go unnoticed with probability 2^-64. It is no cryptographic hash.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, UInt32


def digest(tree: PyTree) -> dict[str, str]:
    """Fingerprint every leaf.

    Args:
      tree: jax arrays of any shape and sharding: floats, integers, booleans, typed PRNG keys.

    Returns:
      Path -> `float32[4,8]:0123456789abcdef`, that is dtype, shape and 64 bits of the values.

    Raises:
      TypeError: A leaf is no jax array.
    """
    return inspect(tree)[0]


def inspect(tree: PyTree) -> tuple[dict[str, str], list[str]]:
    """Fingerprint every leaf and look for NaN and inf in the same pass.

    Args:
      tree: As for `digest`.

    Returns:
      The digest, and the paths of the leaves that are not finite.

    Raises:
      TypeError: A leaf is no jax array.
    """
    leaves = by_path(tree)
    for path, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"{path} is a {type(leaf).__name__}, not a jax array")
    # One small program per shape, not one per tree: a tree of hundreds of leaves compiles slowly,
    # and its leaves may live on different devices. One after the other: hundreds in flight wait for
    # each other without end where XLA:CPU has fewer threads than devices.
    found = {path: jax.device_get(_leaf(x)) for path, x in leaves.items()}
    digests = {p: f"{spec(leaves[p])}:{a:08x}{b:08x}" for p, (a, b, _) in found.items()}
    return digests, [p for p, (_, _, finite) in found.items() if not finite]


def by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves of `tree` by path, as `params/block_0/attention/q/kernel`.

    Args:
      tree: Any pytree.

    Raises:
      ValueError: Two leaves have the same path (a key that contains `/`).
    """
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in pairs}
    if len(leaves) != len(pairs):
        raise ValueError("two leaves of the tree have the same path; is there a '/' in a key?")
    return leaves


def spec(leaf: Any) -> str:
    """Dtype and shape of an array or `jax.ShapeDtypeStruct`, as `bfloat16[2,3]`.

    Args:
      leaf: Anything with a `dtype` and a `shape`.
    """
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


@jax.jit
def _leaf(x: Array) -> UInt32[Array, " 3"]:
    """Two sums of mixed words, and 1 where every element is finite."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    words = _words(x)
    place = _global_index(words.shape)
    # Two independent mixes of the place, used in two ways, so that no pair fools both sums.
    first = _mix(words ^ _mix(place + jnp.uint32(0x9E3779B9)))
    second = _mix(words + _mix(place ^ jnp.uint32(0x85EBCA6B)))
    finite = _finite(x, words.ndim) & jnp.ones_like(words)
    # One reduction of three operands: XLA:CPU fuses it into a single pass without a temporary, and
    # does neither for three separate sums (8 times slower).
    return jnp.stack(
        jax.lax.reduce(
            (first, second, finite),
            (jnp.uint32(0), jnp.uint32(0), jnp.uint32(1)),
            lambda a, b: (a[0] + b[0], a[1] + b[1], a[2] & b[2]),
            tuple(range(words.ndim)),
        )
    )


def _finite(x: Array, ndim: int) -> UInt32[Array, "..."]:
    """1 where an element is finite, with axes of size 1 added up to `ndim`."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.ones((1,) * ndim, jnp.uint32)
    return jnp.isfinite(x).astype(jnp.uint32).reshape(*x.shape, *[1] * (ndim - x.ndim))


def _words(x: Array) -> UInt32[Array, "..."]:
    """The bits of each element as a uint32; an element of 64 bits gives two, on a new last axis."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    info = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
    bits = jax.lax.bitcast_convert_type(x, f"uint{min(info(x.dtype).bits, 32)}")
    return bits.astype(jnp.uint32)


def _global_index(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """The row-major index of every element, modulo 2^32."""
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    return index


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A one-to-one scrambling of 32 bits: `lowbias32` of github.com/skeeto/hash-prospector."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
