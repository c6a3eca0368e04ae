# SPDX-License-Identifier: Apache-2.0
"""How long a training step takes, by roofline: products, memory, network.

    step = max(compute, fsdp and data traffic) + tensor, context and expert traffic
    compute = sum over boxes of max(FLOPs / rate of products, bytes / rate of memory)
              + bytes of what is not part of a product / rate of memory

The rates are the device's peaks times an `Efficiency`, which is an assumption and printed as one.
"""

import dataclasses
from collections import Counter

from jaxgpt.costs import Cost, decode_costs, total, train_costs
from jaxgpt.study.planning.activations import SOFTMAX, Kept, block
from jaxgpt.study.planning.setting import Setting
from jaxgpt.study.planning.state import State
from jaxgpt.study.planning.traffic import HIDDEN, Traffic, traffic

PASSES = 4
"""Times that what a layer keeps is moved: written and read, and its gradient written and read."""
RECOMPUTED = {"none": 0.0, "dots": 0.0, "full": 1 / 3}
"""Of a step's FLOPs in a layer, what is done once more; of the scores with `dots` too."""
TRIANGLE = 0.625
"""Share of all scores that the chunked kernel computes of causal attention: of four runs of blocks
each has the keys up to its end."""


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """What part of a rate a step reaches.

    Attributes:
      products: Of the device's `matrix_share` of its peak.
      memory: Of its memory's bandwidth.
    """

    products: float
    memory: float


EFFICIENCY = {
    "gpu": Efficiency(0.74, 0.9),
    "tpu": Efficiency(0.74, 0.9),
    "cpu": Efficiency(1.0, 0.348),
}
"""By platform. GPUs: GPT-2 124M trained at 516,000 tokens a second on an H200 that copied at 0.9 of
its memory's bandwidth and multiplied matrices of 8,192 at 0.79 of its peak; TPUs are taken to be
like them; CPUs: fitted on three models (`benchmarks/planning.py`)."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds of a step, by what takes them.

    Attributes:
      products: Where products are the limit.
      memory: Where the memory is.
      sent: What is sent along each axis.
      tokens: Of a step, over all devices.
      model_flops: Of a step, as `mfu` counts them: all keys, nothing twice.
      peak: FLOPs per second of all devices.
    """

    products: float
    memory: float
    sent: tuple[Traffic, ...]
    tokens: int
    model_flops: float
    peak: float

    @property
    def compute(self) -> float:
        """All but the network."""
        return self.products + self.memory

    @property
    def waiting(self) -> float:
        """Seconds that a device waits for others."""
        hidden = sum(t.seconds for t in self.sent if t.axis in HIDDEN)
        exposed = sum(t.seconds for t in self.sent if t.axis not in HIDDEN)
        return max(0.0, hidden - self.compute) + exposed

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.compute + self.waiting

    @property
    def limit(self) -> str:
        """What takes most of it."""
        parts = {"compute": self.products, "memory": self.memory, "network": self.waiting}
        return max(parts, key=lambda part: parts[part])

    @property
    def tokens_per_s(self) -> float:
        """Over all devices."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs as a share of the peak."""
        return self.model_flops / self.seconds / self.peak


def step_time(setting: Setting, state: State, efficiency: Efficiency | None = None) -> Step:
    """The time of a training step.

    Args:
      setting: The run.
      state: From `state_of`.
      efficiency: None: that of the platform in `EFFICIENCY`.
    """
    chip, train, cfg = setting.chip, setting.train, setting.model
    share = efficiency or EFFICIENCY[chip.platform]
    flops_per_s = chip.flops_per_s(train.dtype) * chip.matrix_share * share.products
    bytes_per_s = chip.memory_bytes_per_s * share.memory
    products = memory = 0.0
    for cost in device_costs(setting, state).values():
        by_flops, by_bytes = cost.flops / flops_per_s, cost.bytes / bytes_per_s
        products += by_flops if by_flops > by_bytes else 0.0
        memory += by_bytes if by_bytes >= by_flops else 0.0
    full = total(train_costs(cfg, train.batch_size, causal=False)).flops
    return Step(
        products=products,
        memory=memory,
        sent=tuple(traffic(setting, state)),
        tokens=train.batch_size * cfg.context_length,
        model_flops=full,
        peak=chip.flops_per_s(train.dtype) * setting.devices,
    )


def device_costs(setting: Setting, state: State) -> dict[str, Cost]:
    """FLOPs and bytes of one device in a step, by box, as they are done.

    `costs.train_costs` with what is computed again, and beside the boxes `elementwise`: what is
    not part of a product; and the optimizer, on the parameters that the device stores.
    """
    train, cfg = setting.train, setting.model
    rows = setting.rows * train.accumulate
    full, seen = (
        train_costs(cfg, rows, dtype=train.dtype, causal=causal) for causal in (False, True)
    )
    kernels = [setting.kernel(layer, setting.rows) for layer in cfg.layers]
    softmax = sum(kernel in SOFTMAX for kernel in kernels) / len(kernels)
    chunked = sum(kernel == "chunked" for kernel in kernels) / len(kernels)
    parts = setting.sizes["context"] * setting.sizes["tensor"]
    held = setting.sizes["tensor"]
    costs = {}
    for box, cost in full.items():
        again = 1.0 + RECOMPUTED[setting.remat] * (box not in ("embed", "head", "final_norm"))
        flops = cost.flops
        if box == "head" and train.loss_chunk is not None:
            again = 4 / 3
        if box == "scores":
            flops = softmax * flops + chunked * max(TRIANGLE * flops, seen[box].flops)
            flops += (1 - softmax - chunked) * seen[box].flops
            twice = setting.remat == "dots" or (chunked > 0 and setting.remat == "none")
            again = max(again, 1.0 + twice / 3)
        weights = cost.weight_bytes * train.accumulate / held
        costs[box] = Cost(flops * again / parts, weights, 0.0, cost.other_bytes * again / parts)
    costs["optimizer"] = Cost(weight_bytes=4 * state.trained + 2 * state.moments)
    costs["elementwise"] = Cost(other_bytes=_elementwise(setting))
    return costs


def _elementwise(setting: Setting) -> float:
    """Bytes that norms, activations, softmax and loss move on a device, beside products."""
    cfg, tokens = setting.model, setting.rows * setting.tokens * setting.train.accumulate
    kept = Kept()
    for layer, times in Counter(cfg.layers).items():
        one = block(setting, layer, setting.rows)
        kept += Kept(times * one.narrow, times * one.wide)
    logits = cfg.dims().padded_vocab_size / setting.sizes["tensor"] * (setting.number + 4)
    passes = PASSES + PASSES / 2 * (setting.remat == "full")
    return tokens * (passes * kept.bytes(setting.number) + PASSES / 2 * logits)


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """One new token for each row.

    Attributes:
      seconds: Of the step.
      limit: `memory` or `compute`.
      batch: Rows.
    """

    seconds: float
    limit: str
    batch: int

    @property
    def tokens_per_s(self) -> float:
        """Of all rows together."""
        return self.batch / self.seconds


def decode_time(
    setting: Setting,
    batch: int,
    context: int,
    weights: str | None = None,
    efficiency: Efficiency | None = None,
) -> DecodeStep:
    """The time of one step of decoding, without what devices send each other.

    Args:
      setting: The model, the dtype, the mesh.
      batch: Rows, of all devices together.
      context: Tokens of a row.
      weights: In which the weights are kept; None: the dtype.
      efficiency: None: that of the platform.
    """
    chip, share = setting.chip, efficiency or EFFICIENCY[setting.chip.platform]
    parts = setting.sizes["tensor"]
    rows = -(-batch * parts // setting.devices)
    dtype = setting.train.dtype
    cost = total(decode_costs(setting.model, rows, context, dtype=dtype, weights=weights))
    flops_s = cost.flops / parts / (chip.flops_per_s(dtype) * chip.matrix_share * share.products)
    bytes_s = cost.bytes / parts / (chip.memory_bytes_per_s * share.memory)
    limit = "compute" if flops_s > bytes_s else "memory"
    return DecodeStep(max(flops_s, bytes_s), limit, batch)
