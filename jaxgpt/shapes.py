# SPDX-License-Identifier: Apache-2.0
"""The legend of dimension letters, and the few aliases that need a name.

Array names end in these letters (`q_BTNH`), signatures repeat them (`Float[Array, "B T N H"]`), and
the letters change on the line that changes the shape.

| letter | meaning                 | letter | meaning                               |
| ------ | ----------------------- | ------ | ------------------------------------- |
| B      | batch                   | D      | model width, `d_model`                |
| T      | query length (time)     | F      | FFN hidden width, `d_ff`              |
| S      | key/value length        | V      | vocabulary, padded inside the model   |
| N      | query heads             | E      | experts                               |
| K      | key/value heads         | C      | slots per expert                      |
| G      | query heads per kv head | R      | latent rank (MLA)                     |
| H      | head width              | L      | layers                                |

N = K * G. Config fields are words (`n_heads`), arrays carry letters.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Params = Mapping[str, Any]  # nested dict of float arrays; paths such as block_3/attention/q/kernel
Key = jax.Array  # a typed PRNG key, jax.random.key(seed)


def wide(x: jax.Array) -> jax.Array:
    """Float32 of x, or float64 where it is that already: for sums that must not round."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@jax.custom_jvp
def rounded(x: jax.Array) -> jax.Array:
    """x, whose last multiplication a CPU rounds before it adds anything, as PyTorch does.

    XLA makes one instruction of a product and a sum that it fuses, which skips the rounding between
    them: what is captured there would not be, to the bit, what the model goes on with. Choosing x
    where x is a number keeps them apart.
    """
    return jnp.where(x == x, x, jnp.nan) if jax.default_backend() == "cpu" else x


@rounded.defjvp
def _rounded_slope(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return rounded(*primals), tangents[0]
