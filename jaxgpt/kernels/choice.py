# SPDX-License-Identifier: Apache-2.0
"""Which attention kernel a call gets, and why: rules over what is known before anything runs.

Left out: the kernels themselves, and a measurement that would choose among them.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.errors import ConfigError
from jaxgpt.kernels.chunked import block_length
from jaxgpt.masks import Visibility
from jaxgpt.placing import ROWS, active

NAMES = ("reference", "xla", "cudnn", "chunked")
SCORES_LIMIT_BYTES = 2**26
"""Above it "auto" leaves the reference, whose scores of one call take B * N * T * S * 4 bytes."""


@dataclasses.dataclass(frozen=True)
class Call:
    """What the choice of a kernel depends on, all of it static.

    Attributes:
      batch: B, on one device.
      queries: T, on one device.
      keys: S.
      n_heads: N, on one device.
      head_dim: H, the width of queries and keys.
      value_dim: P, the width of values; None: H.
      dtype: Of queries, keys and values; "mixed" where they differ.
      plain: See `jaxgpt.masks.Visibility`.
      extras: Those of "softcap", "bias", "sinks" and "dropout" that the call uses.
      kernel: What was asked for: a name, or "auto".
      device: "cpu", "gpu" or "tpu".
      capability: Compute capability of an NVIDIA GPU; None for other devices.
    """

    batch: int
    queries: int
    keys: int
    n_heads: int
    head_dim: int
    value_dim: int | None = None
    dtype: str = "float32"
    plain: bool = True
    extras: frozenset[str] = frozenset()
    kernel: str = "auto"
    device: str = "cpu"
    capability: tuple[int, int] | None = None

    @classmethod
    def of(
        cls, q_BTNH: Any, k_BSKH: Any, v_BSKP: Any, visibility: Visibility, **use: bool
    ) -> "Call":
        """The call with these arguments on the default device; only shapes and dtypes are read.

        Args:
          q_BTNH: Queries.
          k_BSKH: Keys.
          v_BSKP: Values.
          visibility: Who sees whom.
          **use: Which of the extras are in use.
        """
        dtypes = {jnp.dtype(x.dtype).name for x in (q_BTNH, k_BSKH, v_BSKP)}
        device, capability = _default_device()
        layout = active()
        rows, parts, pieces = (
            (1, 1, 1)
            if layout is None
            else (layout.size(*ROWS), layout.size("tensor"), layout.size("context"))
        )
        return cls(
            batch=-(-q_BTNH.shape[0] // rows),
            queries=-(-q_BTNH.shape[1] // pieces),
            keys=k_BSKH.shape[1],
            n_heads=-(-q_BTNH.shape[2] // parts),
            head_dim=q_BTNH.shape[3],
            value_dim=v_BSKP.shape[3],
            dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
            plain=visibility.plain and pieces == 1,
            extras=frozenset(name for name, used in use.items() if used),
            kernel=visibility.kernel,
            device=device,
            capability=capability,
        )


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel's name and the reason for it, in words."""

    kernel: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kernel} ({self.reason})"


def choose(call: Call) -> Choice:
    """The kernel for a call, without running it.

    "auto" is cuDNN where it applies; elsewhere the reference while the scores stay below
    `SCORES_LIMIT_BYTES`, and the chunked kernel above.

    Raises:
      ConfigError: The kernel that was asked for does not exist, or cannot serve this call.
    """
    if call.kernel != "auto":
        check_name(call.kernel)
        if why := refusal(call.kernel, call):
            fits = [name for name in NAMES if not refusal(name, call)]
            raise ConfigError(
                f"attention kernel {call.kernel!r} cannot serve this call: {why}",
                fix=f"kernel 'auto' or one of {fits}",
            )
        return Choice(call.kernel, "asked for")
    why = refusal("cudnn", call)
    if why is None:
        return Choice("cudnn", f"plain {call.dtype} attention on an NVIDIA GPU")
    rows, limit = call.batch * call.n_heads * call.keys, f"{SCORES_LIMIT_BYTES // 2**20} MiB"
    large = 4 * rows * call.queries > SCORES_LIMIT_BYTES
    if large and block_length(rows, call.queries) < call.queries:
        return Choice("chunked", f"scores of more than {limit}; not cudnn: {why}")
    return Choice("reference", f"scores of at most {limit}; not cudnn: {why}")


def refusal(kernel: str, call: Call) -> str | None:
    """Why a kernel cannot serve a call; None where it can."""
    value_dim, extras = call.value_dim or call.head_dim, sorted(call.extras)
    if kernel == "xla":
        if call.dtype in ("mixed", "float64"):  # float64: its softmax is in float32
            return f"{call.dtype} arrays"
        extras = [name for name in extras if name != "bias"]
    elif kernel == "cudnn":
        capability = call.capability
        if capability is None:
            return f"no NVIDIA GPU but {call.device}"
        if capability < (8, 0):
            return f"compute capability {capability[0]}.{capability[1]}, below 8.0"
        if call.dtype not in ("bfloat16", "float16"):
            return f"{call.dtype} instead of bfloat16 or float16"
        widest = 256 if capability >= (9, 0) else 128
        if call.head_dim % 8 or call.head_dim > widest:
            return f"head_dim={call.head_dim} is no multiple of 8 up to {widest}"
        if not call.plain or call.queries != call.keys:
            return "padding, segments, a prefix or a cache"
    else:
        return None
    if value_dim > call.head_dim:
        return f"values of width {value_dim} over keys of {call.head_dim}"
    return f"the call has {' and '.join(extras)}" if extras else None


def check_name(kernel: str) -> None:
    """Raise `ConfigError` unless it is "auto" or a kernel's name."""
    if kernel not in ("auto", *NAMES):
        known = ", ".join(("auto", *NAMES))
        raise ConfigError(f"no attention kernel {kernel!r}", fix=f"one of {known}")


def _default_device() -> tuple[str, tuple[int, int] | None]:
    """Kind of the device that JAX computes on, and its compute capability if it is NVIDIA's."""
    device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return device.platform, None if found is None else (int(found[1]), int(found[2]))


# --- what was chosen ------------------------------------------------------------------------------

_made: dict[Choice, None] = {}


def note(choice: Choice) -> None:
    """Remember a choice; called while JAX traces, so once for each compilation."""
    _made[choice] = None


def choices() -> tuple[Choice, ...]:
    """The distinct choices that calls of `attend` led to, since the process or `forget` began."""
    return tuple(_made)


def forget() -> None:
    """Begin a new record of choices."""
    _made.clear()
