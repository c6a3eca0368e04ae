# SPDX-License-Identifier: Apache-2.0
"""One call, `attend`, in front of all attention kernels."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Array, Float

from jaxgpt.kernels import chunked, fused, reference
from jaxgpt.kernels.choice import Call, Choice, choose, note
from jaxgpt.kernels.reference import ScoreBias
from jaxgpt.kernels.spread import spread
from jaxgpt.masks import Visibility
from jaxgpt.shapes import Key
from jaxgpt.taps import SiteTap

KERNELS: Mapping[str, Callable[..., Array]] = {
    "reference": reference.attend,
    "xla": fused.xla,
    "cudnn": fused.cudnn,
    "chunked": chunked.attend,
}


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKP: Float[Array, "B S K P"],
    visibility: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
    bias: ScoreBias | None = None,
    sinks_N: Float[Array, " N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key | None = None,
    tap: SiteTap | None = None,
) -> Float[Array, "B T N P"]:
    """Attention by the kernel that `choose` names: `reference.attend` says what is computed.

    Args:
      q_BTNH: Queries.
      k_BSKH: Keys.
      v_BSKP: Values.
      visibility: Who sees whom; its `kernel` is the one asked for.
      scale: Factor on the scores.
      softcap: Bound of the scores, or None.
      bias: Scores to add, or None.
      sinks_N: Logits of the sinks, or None.
      dropout_rate: Rate on the probabilities.
      dropout_key: None for no dropout.
      tap: Called at `scores` and `probs`, or None where nobody asks for them. Another kernel than
        the reference never holds either: the reference then computes them beside it, and gives
        the result too if they are patched.

    Raises:
      ConfigError: The kernel that was asked for cannot serve this call.
    """
    options: dict[str, Any] = dict(softcap=softcap, bias=bias, sinks_N=sinks_N)
    options = {"scale": scale} | {k: x for k, x in options.items() if x is not None}
    drops = dropout_key is not None and dropout_rate > 0
    if drops:
        options |= dict(dropout_rate=dropout_rate, dropout_key=dropout_key)
    choice = choose(
        Call.of(
            q_BTNH,
            k_BSKH,
            v_BSKP,
            visibility,
            softcap=softcap is not None,
            bias=bias is not None,
            sinks=sinks_N is not None,
            dropout=drops,
        )
    )
    arrays = q_BTNH, k_BSKH, v_BSKP, visibility
    if tap is not None:
        if tap.patched:
            choice = Choice("reference", f"patched {' and '.join(tap.patched)}")
        y_BTNP = reference.attend(*arrays, **options, tap=tap)
        if choice.kernel == "reference":
            note(choice)
            return y_BTNP
    note(choice)
    kernel = KERNELS[choice.kernel]
    if drops:  # a mask for each device would not be that of one device
        return kernel(*arrays, **options)
    return spread(kernel, *arrays, **options)
