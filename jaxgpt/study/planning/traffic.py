# SPDX-License-Identifier: Apache-2.0
"""What devices send each other in a training step, by axis of the mesh, and how long that takes.

Bytes are those that one device sends, with the fewest that a ring needs: (p - 1) / p of an array
that p devices gather or scatter, twice that for a sum that all get.
"""

import dataclasses
import math

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.moe import MoE
from jaxgpt.study.planning.setting import Setting
from jaxgpt.study.planning.state import State
from jaxgpt.train.sharding import AXES

HIDDEN = ("data", "fsdp")
"""Axes whose traffic depends on no activation: it can be sent while others compute."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Of one device along one axis, in a step.

    Attributes:
      axis: Of the mesh.
      bytes: That it sends.
      bytes_per_s: Of its link along this axis.
      within: Whether all devices of the axis are linked directly, within a host or slice.
    """

    axis: str
    bytes: float
    bytes_per_s: float
    within: bool

    @property
    def seconds(self) -> float:
        """At the full rate."""
        return self.bytes / self.bytes_per_s


def traffic(setting: Setting, state: State) -> list[Traffic]:
    """Of each axis with more than one device."""
    sizes, found = setting.sizes, []
    sent = _parameters(setting, state)
    for axis, n in _activations(setting).items():
        sent[axis] += n
    for axis in AXES:
        if sizes[axis] > 1:
            rate, within = link(setting, axis)
            found.append(Traffic(axis, sent[axis], rate, within))
    return found


def link(setting: Setting, axis: str) -> tuple[float, bool]:
    """Bytes per second of a device along an axis, and whether that is within a host or slice.

    Neighbours along the last axes are next to each other. A ring that leaves the host has the
    network links of all its members there.
    """
    chip, sizes = setting.chip, setting.sizes
    inner = math.prod(sizes[other] for other in AXES[AXES.index(axis) + 1 :])
    if inner * sizes[axis] <= chip.linked:
        return chip.link_bytes_per_s, True
    members = max(1.0, chip.linked / inner)
    return min(chip.link_bytes_per_s, members * chip.network_bytes_per_s), False


def _parameters(setting: Setting, state: State) -> dict[str, float]:
    """Gathers of parameters, and sums of gradients, of each micro-batch.

    What is gathered over several axes at once counts with the outermost of them.
    """
    sizes, again = setting.sizes, setting.remat != "none"
    sent: dict[str, float] = dict.fromkeys(AXES, 0.0)
    for p in state.params:
        if p.split:
            part = (p.parts - 1) / p.parts * p.times
            outer = min(p.split, key=AXES.index)
            gathers = 1 + (again and p.in_block)
            sent[outer] += part * p.used * gathers
            sent[outer] += part * p.whole * p.trained
            sent["data"] += _summed(sizes["data"]) * p.stored * p.times * p.trained
        elif p.trained:
            rows = [a for a in ("data", "fsdp", "expert", "context") if a not in p.held]
            for axis in rows:
                sent[axis] += _summed(sizes[axis]) * p.stored * p.times
    return {axis: n * setting.train.accumulate for axis, n in sent.items()}


def _activations(setting: Setting) -> dict[str, float]:
    """Sums over `tensor`, keys and values over `context`, tokens over `expert`."""
    cfg, sizes, number = setting.model, setting.sizes, setting.number
    tokens = setting.rows * setting.tokens * setting.train.accumulate
    stream = tokens * cfg.d_model * number
    passes = 2 + (setting.remat != "none")  # forward, backward, and forward again
    sent: dict[str, float] = dict.fromkeys(("tensor", "context", "expert"), 0.0)
    if sizes["tensor"] > 1:
        sent["tensor"] = _summed(sizes["tensor"]) * stream * (2 * passes * cfg.n_layers + 2)
    for layer in cfg.layers:
        box = layer.attention
        width = 0.0
        if isinstance(box, GQA):
            heads = max(box.kv_heads / sizes["tensor"], 1.0)
            width = 2 * heads * box.width(cfg.dims(layer))
        elif isinstance(box, MLA):
            width = box.n_heads * (box.nope_dim + box.rope_dim + box.v_dim) / sizes["tensor"]
        sent["context"] += (sizes["context"] - 1) * tokens * width * number * passes
        if isinstance(layer.ffn, MoE):
            sent["expert"] += (sizes["expert"] - 1) * stream * 2 * passes
    return sent


def _summed(devices: int) -> float:
    """Of an array that so many devices add up, the share that each sends."""
    return 2 * (devices - 1) / devices
