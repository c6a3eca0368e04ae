# SPDX-License-Identifier: Apache-2.0
"""JAX's own attention, `jax.nn.dot_product_attention`, brought under the rules of `masks.py`.

Each function takes only what its kernel can do; `choice.py` says when that is enough. Values that
are narrower than keys (MLA) are filled up with zeros, because JAX wants one width for both.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxgpt.kernels.reference import ScoreBias
from jaxgpt.masks import Visibility


def xla(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKP: Float[Array, "B S K P"],
    visibility: Visibility,
    *,
    scale: float,
    bias: ScoreBias | None = None,
) -> Float[Array, "B T N P"]:
    """As `reference.attend`, left to XLA; it builds the score matrix and the mask too."""
    (B, T, N, _), S = q_BTNH.shape, k_BSKH.shape[1]
    seen_b1TS = visibility.mask()[:, None]
    bias_BNTS = None
    if bias is not None:
        bias_BNTS = bias(visibility.q_pos_BT, visibility.k_pos_BS)
        bias_BNTS = jnp.broadcast_to(bias_BNTS, (B, N, T, S))
    if not visibility.plain:  # zero times NaN is NaN
        v_BSKP = jnp.where(visibility.k_pos_BS[:, :, None, None] >= 0, v_BSKP, 0)
    y_BTNP = _call("xla", q_BTNH, k_BSKH, v_BSKP, scale=scale, bias=bias_BNTS, mask=seen_b1TS)
    # A row without any key would be the mean of all values.
    some_bT11 = seen_b1TS.any(-1)[:, 0, :, None, None]
    return jnp.where(some_bT11, y_BTNP, 0)


def cudnn(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKP: Float[Array, "B S K P"],
    visibility: Visibility,
    *,
    scale: float,
) -> Float[Array, "B T N P"]:
    """As `reference.attend` where `visibility` is plain, by cuDNN's flash attention.

    Its backward pass may add in another order each time it runs.
    """
    window = None
    if visibility.causal and visibility.window is not None:
        if visibility.window < k_BSKH.shape[1]:
            window = (visibility.window - 1, 0)  # keys to the left, without the query's own
    return _call(
        "cudnn",
        q_BTNH,
        k_BSKH,
        v_BSKP,
        scale=scale,
        is_causal=visibility.causal,
        local_window_size=window,
    )


def _call(implementation: Any, q_BTNH: Array, k_BSKH: Array, v_BSKP: Array, **options) -> Array:
    H, P = k_BSKH.shape[3], v_BSKP.shape[3]
    v_BSKH = jnp.pad(v_BSKP, [(0, 0)] * 3 + [(0, H - P)])
    y_BTNH = jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, implementation=implementation, **options
    )
    return y_BTNH[..., :P]
