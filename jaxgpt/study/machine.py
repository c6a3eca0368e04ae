# SPDX-License-Identifier: Apache-2.0
"""What this machine is, and what it can do at most: measured, not looked up.

A figure of speed says little by itself; beside these limits, measured in the same minutes, it says
how much is left. All of the work is on the default device.
"""

import concurrent.futures
import dataclasses
import math
import os
import platform
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SMALLEST = 256
"""Rows of the first square product; the others have twice as many as the one before."""
TURN_S = 0.03
"""Products that take less are measured several at a time."""
PIECES = 8
"""Parts of the array for each core: one that is interrupted delays the others less."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a machine can do at most.

    Attributes:
      dtype: Of the products.
      flops_per_s: Of square products of this dtype, at the best size.
      read_bytes_per_s: Of reading an array far larger than any cache.
      copy_bytes_per_s: Of copying it, bytes read and bytes written together.
    """

    dtype: str
    flops_per_s: float
    read_bytes_per_s: float
    copy_bytes_per_s: float


def measure_limits(
    dtype: str, *, largest: int = 8192, n_bytes: int = 1 << 29, repeats: int = 5
) -> Limits:
    """Measure all limits: seconds.

    Args:
      dtype: Of the products.
      largest: Rows of the largest square product.
      n_bytes: Of the array that is read and copied.
      repeats: The best of so many counts.
    """
    rate = matrix_rate(dtype, largest=largest, repeats=repeats)
    return Limits(dtype, rate, read_rate(n_bytes, repeats), copy_rate(n_bytes, repeats))


def matrix_rate(
    dtype: str, *, largest: int = 8192, repeats: int = 5, enough_s: float = 0.3
) -> float:
    """FLOPs per second of square products, the best over sizes and repeats.

    Sizes grow until one product takes `enough_s` or is the largest. Float32 is multiplied as JAX
    does it by default: on NVIDIA GPUs in TF32, on TPUs in bfloat16.
    """
    multiply, best, n = jax.jit(jnp.matmul), 0.0, SMALLEST
    while True:
        x_NN = jnp.ones((n, n), dtype)
        one_s = _best(lambda x=x_NN: multiply(x, x), 1)
        calls = min(64, max(1, round(TURN_S / one_s)))  # a short one takes less than its call
        took = _best(lambda x=x_NN, n=calls: [multiply(x, x) for _ in range(n)], repeats)
        best = max(best, 2 * n**3 * calls / took)
        if 2 * n > largest or took / calls > enough_s:
            return best
        n *= 2


def read_rate(n_bytes: int = 1 << 29, repeats: int = 5) -> float:
    """Bytes per second of reading an array: on CPU by a thread for each core."""
    if jax.default_backend() != "cpu":
        x_N = jnp.ones(n_bytes // 4, jnp.float32)
        largest = jax.jit(jnp.max)
        return max(n_bytes / _best(lambda: largest(x_N), repeats), copy_rate(n_bytes, repeats))
    cores = _cores()
    parts = np.array_split(np.ones(n_bytes // 8, np.int64), PIECES * cores)
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        return n_bytes / _best(lambda: [*pool.map(np.bitwise_or.reduce, parts)], repeats)


def copy_rate(n_bytes: int = 1 << 29, repeats: int = 5) -> float:
    """Bytes per second of copying an array, read and written ones together."""
    if jax.default_backend() != "cpu":
        x_N = jnp.ones(n_bytes // 4, jnp.float32)
        move = jax.jit(jnp.negative)
        return 2 * n_bytes / _best(lambda: move(x_N), repeats)
    cores = _cores()
    source, target = (np.ones(n_bytes // 8, np.int64) for _ in range(2))
    pairs = [np.array_split(x, PIECES * cores) for x in (target, source)]
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        return 2 * n_bytes / _best(lambda: [*pool.map(np.copyto, *pairs)], repeats)


def describe() -> dict[str, Any]:
    """Processor, devices, memory and versions, for a record of what was measured."""
    devices = jax.devices()
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "cpu": _cpu_model(),
        "cores": _cores(),
        "memory_gib": _memory_gib(),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "backend": jax.default_backend(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def _best(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of some calls, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _cores() -> int:
    """Cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _cpu_model() -> str:
    """As the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gib() -> float | None:
    """Of the machine; None where the system does not say."""
    try:
        n_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    return math.floor(n_bytes / 2**30 * 10) / 10
