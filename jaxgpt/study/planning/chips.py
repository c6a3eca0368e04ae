# SPDX-License-Identifier: Apache-2.0
"""Devices by name: what their makers say that they can do, and where they say it."""

import dataclasses
import difflib

from jaxgpt.errors import ConfigError
from jaxgpt.study.machine import Limits

GB = 1e9


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device, and how it is linked to others.

    Attributes:
      name: For tables.
      bfloat16_flops_per_s: Of dense products in bfloat16, summed in float32; the peak.
      float32_flops_per_s: Of products of float32 as JAX makes them by default.
      memory_bytes: Of the device.
      memory_bytes_per_s: Of that memory.
      link_bytes_per_s: To all other devices of the host or slice together, in one direction.
      network_bytes_per_s: Its share of the network between hosts or slices, in one direction.
      linked: Devices that `link_bytes_per_s` holds among.
      platform: "cpu", "gpu" or "tpu".
      capability: Compute capability of an NVIDIA GPU.
      matrix_share: Of the peak, what large products reach.
      source: Where the figures stand.
      note: What they do not say.
    """

    name: str
    bfloat16_flops_per_s: float
    float32_flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    linked: int
    platform: str
    capability: tuple[int, int] | None = None
    matrix_share: float = 0.79
    source: str = ""
    note: str = ""

    def flops_per_s(self, dtype: str) -> float:
        """The peak for products of this dtype."""
        return self.bfloat16_flops_per_s if dtype == "bfloat16" else self.float32_flops_per_s


def _gpu(
    name: str,
    tflops: tuple[float, float],
    memory_gb: int,
    memory_gbps: int,
    links_gbps: tuple[int, int],
    capability: tuple[int, int],
    source: str,
    *,
    linked: int = 8,
    note: str = "",
) -> Chip:
    """An NVIDIA GPU: rates in TFLOP/s and GB/s; NVLink is quoted for both directions together."""
    return Chip(
        name=name,
        bfloat16_flops_per_s=tflops[0] * 1e12,
        float32_flops_per_s=tflops[1] * 1e12,
        memory_bytes=memory_gb * GB,
        memory_bytes_per_s=memory_gbps * GB,
        link_bytes_per_s=links_gbps[0] / 2 * GB,
        network_bytes_per_s=links_gbps[1] / 8 * GB,
        linked=linked,
        platform="gpu",
        capability=capability,
        source=source,
        note=note,
    )


def _tpu(
    name: str,
    tflops: float,
    memory: float,
    memory_gbps: int,
    links_gbps: tuple[int, int],
    linked: int,
    *,
    note: str = "",
) -> Chip:
    """A TPU: memory in bytes; its links are quoted for both directions, its network in Gbit/s."""
    return Chip(
        name=name,
        bfloat16_flops_per_s=tflops * 1e12,
        float32_flops_per_s=tflops * 1e12,
        memory_bytes=memory,
        memory_bytes_per_s=memory_gbps * GB,
        link_bytes_per_s=links_gbps[0] / 2 * GB,
        network_bytes_per_s=links_gbps[1] / 8 * GB,
        linked=linked,
        platform="tpu",
        source=f"https://cloud.google.com/tpu/docs/{name.removeprefix('tpu-')}",
        note=note,
    )


_WWW = "https://www.nvidia.com/en-us/data-center"
_ETHERNET = "of a DGX: 200 Gbit/s for each GPU"
_INFINIBAND = "of a DGX: 400 Gbit/s for each GPU"
_ICI = "links: 3D torus, bandwidth per chip as in the table of v4's paper, arXiv:2304.01433"

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _gpu(
            *("v100", (125.0, 15.7), 32, 900, (300, 100), (7, 0), f"{_WWW}/v100/"),
            note="no bfloat16: the rate of float16; network of a DGX-1: 100 Gbit/s for 2 GPUs, "
            "taken as one each",
        ),
        _gpu(
            "a100-40", (312.0, 156.0), 40, 1555, (600, 200), (8, 0), f"{_WWW}/a100/", note=_ETHERNET
        ),
        _gpu(
            "a100-80", (312.0, 156.0), 80, 2039, (600, 200), (8, 0), f"{_WWW}/a100/", note=_ETHERNET
        ),
        _gpu(
            "h100", (989.4, 494.7), 80, 3350, (900, 400), (9, 0), f"{_WWW}/h100/", note=_INFINIBAND
        ),
        _gpu(
            "h200", (989.4, 494.7), 141, 4800, (900, 400), (9, 0), f"{_WWW}/h200/", note=_INFINIBAND
        ),
        _gpu(
            *("b200", (2250.0, 1100.0), 180, 8000, (1800, 400), (10, 0), f"{_WWW}/dgx-b200/"),
            note=_INFINIBAND,
        ),
        _gpu(
            *("rtx-4090", (165.2, 82.6), 24, 1008, (64, 25), (8, 9)),
            "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
            note="no NVLink: PCIe 4.0 x16; a network of 25 Gbit/s is taken",
        ),
        _tpu("tpu-v4", 275.0, 32 * 2.0**30, 1200, (600, 25), 4096, note=_ICI),
        _tpu("tpu-v5e", 197.0, 16 * GB, 819, (400, 25), 256),
        _tpu("tpu-v5p", 459.0, 95 * GB, 2765, (1200, 50), 8960),
        _tpu("tpu-v6e", 918.0, 32 * GB, 1640, (800, 100), 256),
    )
}
"""By name. Peaks of NVIDIA are half of what is given "with sparsity"."""


def chip(name: str) -> Chip:
    """The device of that name.

    Raises:
      ConfigError: There is none.
    """
    if name in CHIPS:
        return CHIPS[name]
    near = difflib.get_close_matches(name.lower(), [*CHIPS, "cpu"], n=1, cutoff=0.4)
    fix = f"did you mean {near[0]}?" if near else f"one of {', '.join([*CHIPS, 'cpu'])}"
    raise ConfigError(f"no device {name!r}", fix=fix)


def this_cpu(limits: Limits, memory_bytes: float) -> Chip:
    """This machine as a device, by what was measured on it.

    Args:
      limits: From `jaxgpt.study.machine.measure_limits`.
      memory_bytes: Of the machine.
    """
    return Chip(
        name="cpu",
        bfloat16_flops_per_s=limits.flops_per_s,
        float32_flops_per_s=limits.flops_per_s,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=limits.copy_bytes_per_s,
        link_bytes_per_s=limits.copy_bytes_per_s,
        network_bytes_per_s=limits.copy_bytes_per_s,
        linked=1 << 20,
        platform="cpu",
        matrix_share=1.0,
        source="measured on this machine",
        note=f"products in {limits.dtype}, and copies of memory",
    )
