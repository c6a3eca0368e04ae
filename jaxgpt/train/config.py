# SPDX-License-Identifier: Apache-2.0
"""The knobs of the optimizer and of the training loop."""

import dataclasses
import math
from typing import Literal

from jaxgpt.boxes.base import check_positive
from jaxgpt.errors import ConfigError
from jaxgpt.kernels.choice import check_name


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW with a learning-rate schedule, decoupled decay, and clipping by global norm.

    The schedule is a function of the optimizer step alone. Its horizon is the `train.steps` that a
    run was started with; a run that is continued past it goes on at the final rate.
    """

    lr: float = 1e-3  # peak rate
    final_lr: float | None = None  # rate at the horizon; None: lr / 10
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # wsd: warmup, stable, decay
    warmup_steps: int = 100  # updates of linear rise to lr; the first has lr / warmup_steps
    decay_fraction: float = 0.2  # wsd: share of the horizon in the final linear decay
    weight_decay: float = 0.1  # times the rate: the share of a weight that an update takes
    decay: Literal["matrices", "all"] = "matrices"  # decayed: kernels and embeddings, or all
    beta1: float = 0.9  # memory of the gradient's mean
    beta2: float = 0.99  # memory of its square
    eps: float = 1e-8  # added to the root of the square
    clip: float | None = 1.0  # largest global gradient norm; None: no clipping

    def __post_init__(self) -> None:
        check_positive(lr=self.lr, eps=self.eps, clip=self.clip)
        for name in ("final_lr", "weight_decay", "warmup_steps"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{name}={value} must be a number, zero or larger")
        if not math.isfinite(self.lr):
            raise ConfigError(f"lr={self.lr} must be finite")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ConfigError(f"beta1={self.beta1}, beta2={self.beta2} must be in [0, 1)")
        if not 0 < self.decay_fraction <= 1:
            raise ConfigError(f"decay_fraction={self.decay_fraction} must be in (0, 1]")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: with a rank the model is frozen, and they alone are trained.

    Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685
    """

    rank: int | None = None  # inner width of an adapter; None: no adapters, all is trained
    alpha: float = 16.0  # additions are scaled by alpha / rank
    targets: tuple[str, ...] = ("attention/*",)  # patterns of the paths of kernels in a block

    def __post_init__(self) -> None:
        check_positive(rank=self.rank, alpha=self.alpha)
        if not self.targets:
            raise ConfigError("lora.targets is empty", fix="--lora.targets='attention/*'")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, how much at a time, and what happens on the way."""

    steps: int = 1000  # optimizer steps
    batch_size: int = 32  # sequences in an optimizer step, over all devices
    accumulate: int = 1  # micro-batches that an optimizer step is split into, to save memory
    dtype: Literal["float32", "bfloat16"] = "float32"  # of compute; parameters stay float32
    remat: bool = False  # recompute blocks in the backward pass: less memory, a third more work
    scan: bool = False  # scan over repeating layers: less compile time for deep models
    kernel: str = "auto"  # of attention: auto, reference, xla, cudnn or chunked
    eval_every: int = 250  # steps between evaluations
    save_every: int = 250  # steps between checkpoints
    log_every: int = 10  # steps between lines of metrics
    keep: int = 3  # newest checkpoints kept, beside the best
    seed: int = 0  # of parameters, batches and dropout

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < (0 if field.name == "seed" else 1):
                raise ConfigError(f"{field.name}={value} is too small")
        check_name(self.kernel)
        if self.seed >= 2**32:  # a key takes 32 bits
            raise ConfigError(f"seed={self.seed} must be below 2**32")
        if self.batch_size % self.accumulate:
            divisors = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            raise ConfigError(
                f"batch_size={self.batch_size} is not divisible by accumulate={self.accumulate}",
                fix=f"accumulate of {divisors}",
            )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How the devices are arranged: the product of the four is their number.

    Rows of a batch are split over data, fsdp and expert; parameters and moments over fsdp, tensor
    and expert.
    """

    data: int | None = None  # groups that hold all of the state; None: the devices that are left
    fsdp: int = 1  # devices that share the state, and gather each layer when they compute it
    tensor: int = 1  # devices that share the heads, the hidden units and the vocabulary
    expert: int = 1  # devices that share the experts of a mixture

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ConfigError(f"mesh.{field.name}={value} must be at least 1")
