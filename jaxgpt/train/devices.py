# SPDX-License-Identifier: Apache-2.0
"""Which devices JAX runs on, in words, and what to do where the choice cannot be.

Nothing here happens on import: the first call that asks for devices starts the back end.
"""

import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import jax

from jaxgpt.errors import ConfigError

DRIVER = Path("/proc/driver/nvidia/version")
"""The file that NVIDIA's kernel driver puts there on Linux."""


def describe_devices() -> str:
    """All devices and the back end: `2 x cpu (jax 0.10.2)`, `8 x NVIDIA H100 (jax 0.10.2, gpu)`.

    Raises:
      ConfigError: JAX has no such back end.
    """
    devices = check_devices()
    kind, platform = devices[0].device_kind, devices[0].platform
    back_end = f"jax {jax.__version__}" + ("" if kind == platform else f", {platform}")
    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{len(devices)} x {kind}{processes} ({back_end})"


def check_devices() -> list[Any]:
    """All devices of the back end that was asked for.

    Raises:
      ConfigError: JAX has no such back end: a wrong JAX_PLATFORMS, or no such device.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion: "cuda" without a GPU
        wanted = jax.config.jax_platforms or "any"  # type: ignore[attr-defined]
        reason = " ".join(str(error).split()) or "there is none"
        raise ConfigError(
            f"no device for JAX_PLATFORMS={wanted}: {reason}",
            fix="JAX_PLATFORMS=cpu, or the package for the device: " + INSTALL,
        ) from error


def check_xla_flags() -> None:
    """Let another process read XLA_FLAGS first, if it is set: where XLA knows no flag it aborts.

    Raises:
      ConfigError: It does.
    """
    flags = os.environ.get("XLA_FLAGS")
    if not flags:
        return
    command = [sys.executable, "-c", "from jaxlib import _jax; _jax.CompileOptions()"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode and "XLA_FLAGS" in done.stderr + done.stdout:
        said = re.search(r"\] (.*value.*for flag.*|.*XLA_FLAGS.*)", done.stderr)
        raise ConfigError(
            f"XLA refuses XLA_FLAGS={flags}" + (f": {said[1]}" if said else ""),
            fix="unset XLA_FLAGS",
        )


def choose_device(device: Literal["cpu", "gpu", "tpu"] | None) -> None:
    """Take this kind of device, whatever else there is; call it before the first computation.

    Args:
      device: None leaves the choice to JAX and JAX_PLATFORMS. "gpu" is NVIDIA's; others are chosen
        with JAX_PLATFORMS.

    Raises:
      ConfigError: There is none.
    """
    if device is None:
        check_devices()
        return
    # JAX takes "gpu" for all makes of GPU at once and fails where one of them is missing.
    jax.config.update("jax_platforms", {"gpu": "cuda,cpu", "tpu": "tpu,cpu"}.get(device, device))
    try:
        found = check_devices()[0].platform
    except ConfigError as error:
        raise ConfigError(f"no {device} for JAX", where=error.what, fix=INSTALLS[device]) from error
    if found != device:
        raise ConfigError(f"no {device} for JAX, only {found}", fix=INSTALLS[device])


INSTALL = 'pip install -U "jax[cuda12]"'
INSTALLS = {"gpu": INSTALL, "tpu": 'pip install -U "jax[tpu]"', "cpu": "unset JAX_PLATFORMS"}


def unused_gpu_warning() -> str | None:
    """One line where an NVIDIA GPU seems to be there and JAX computes on the CPU; else None.

    Silent where the CPU was asked for.
    """
    asked = jax.config.jax_platforms  # type: ignore[attr-defined]
    if asked or jax.default_backend() != "cpu":
        return None
    if not (DRIVER.exists() or shutil.which("nvidia-smi")):
        return None
    return f"an NVIDIA GPU seems to be present, but this jax computes on the CPU; {INSTALL}"


def memory_bytes() -> int | None:
    """Memory of a device, in bytes; None where JAX does not know it, as on a CPU."""
    stats = jax.local_devices()[0].memory_stats()
    return None if stats is None else stats.get("bytes_limit")


def peak_bytes() -> dict[str, float]:
    """The most memory so far: `peak_host_bytes`, `peak_device_bytes` of the fullest local device.

    What the system, or the devices, do not say is left out; on CPU the host's is all there is.
    """
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2)
    found = {"peak_host_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if peaks := [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]:
        found["peak_device_bytes"] = float(max(peaks))
    return found


def only_cpu(device: str | None) -> bool:
    """Whether JAX can take nothing but the CPU, told without starting it.

    Args:
      device: What was asked for; None for JAX's own choice.
    """
    if device is not None:
        return device == "cpu"
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm_plugin", "libtpu")
    return not any(importlib.util.find_spec(name) for name in plugins)
