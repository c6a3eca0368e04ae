# SPDX-License-Identifier: Apache-2.0
"""The knobs of the optimizer and of the training loop."""

import dataclasses
import math
from typing import Literal

from jaxgpt.boxes.base import check_choices, check_positive
from jaxgpt.data.order import Sizes
from jaxgpt.errors import ConfigError
from jaxgpt.kernels.choice import check_name
from jaxgpt.train.optimizers import AdamW, OptimBox

MAY_BE_0 = ("seed", "batch_seed", "z_coef")
Schedule = Literal["cosine", "wsd", "constant", "inverse-sqrt"]


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """An optimizer with a learning-rate schedule, decoupled decay, and clipping by global norm.

    `multipliers` has patterns of parameter paths, `block_*/ffn/*`; the rate of a parameter, and so
    its decay, is multiplied by the factors of all that match. 0 freezes.

    The schedule is a function of the optimizer step alone. Its horizon is the `train.steps` that a
    run was started with; a run that is continued past it goes on at the final rate.
    """

    method: OptimBox = AdamW()  # how a gradient becomes a step
    lr: float = 1e-3  # peak rate
    final_lr: float | None = None  # of cosine and wsd, rate at the horizon; None: lr / 10
    schedule: Schedule = "cosine"  # wsd: warmup, stable, decay; inverse-sqrt: with 1 / sqrt(update)
    warmup_steps: int = 100  # updates of linear rise to lr; the first has lr / warmup_steps
    decay_fraction: float = 0.2  # wsd: share of the horizon in the final linear decay
    weight_decay: float = 0.1  # times the rate: the share of a weight that an update takes
    decay: Literal["matrices", "all"] = "matrices"  # decayed: kernels and embeddings, or all
    clip: float | None = 1.0  # largest global gradient norm; None: no clipping
    multipliers: dict[str, float] = dataclasses.field(default_factory=dict)  # {path: factor on lr}
    state_dtype: Literal["float32", "bfloat16"] = "float32"  # in which moments are kept

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(lr=self.lr, clip=self.clip)
        for name in ("final_lr", "weight_decay", "warmup_steps"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{name}={value} must be a number, zero or larger")
        if not math.isfinite(self.lr):
            raise ConfigError(f"lr={self.lr} must be finite")
        if not 0 < self.decay_fraction <= 1:
            raise ConfigError(f"decay_fraction={self.decay_fraction} must be in (0, 1]")
        for pattern, factor in self.multipliers.items():
            if not (factor >= 0 and math.isfinite(factor)):
                what = f"multipliers: {factor} for {pattern!r} must be a number, zero or larger"
                raise ConfigError(what)
        memory = self.method.memory()
        if self.state_dtype == "bfloat16" and 1 - memory < 2**-8:
            raise ConfigError(
                f"state_dtype=bfloat16 rounds away what a step changes of a moment that keeps "
                f"{memory:g} of itself",
                fix="a memory (beta2) of at most 0.996, or --optim.state_dtype=float32",
            )


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
    batch_sizes: dict[int, int] | None = (
        None  # {steps done: sequences from then on}; None: the same
    )
    accumulate: int = 1  # micro-batches that an optimizer step is split into, to save memory
    dtype: Literal["float32", "bfloat16"] = "float32"  # of compute; parameters stay float32
    remat: Literal["none", "dots", "full"] = "none"  # recomputed: nothing, all but products, blocks
    scan: bool = False  # scan over repeating layers: less compile time for deep models
    loss_chunk: int | None = None  # tokens of a row whose logits exist at a time; None: all
    dispatch: int = 1  # steps that the devices are given at a time; more help small models
    kernel: str = "auto"  # of attention: auto, reference, xla, cudnn or chunked
    eval_every: int = 250  # steps between evaluations
    save_every: int = 250  # steps between checkpoints
    log_every: int = 10  # steps between lines of metrics
    keep: int = 3  # newest checkpoints kept, beside the best
    max_bad_steps: int = 3  # steps in a row without a finite loss and update that end the run
    ema_decay: float | None = None  # of a moving average of the weights, kept beside them; None: no
    z_coef: float = 0.0  # of the z-loss, which holds the logits' log-sum-exp near zero
    seed: int = 0  # of parameters, batches and dropout
    batch_seed: int | None = None  # of batches alone; None: seed

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < (field.name not in MAY_BE_0):
                raise ConfigError(f"{field.name}={value} is too small")
        check_name(self.kernel)
        check_choices(self)
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(f"ema_decay={self.ema_decay} must be between 0 and 1")
        if not (self.z_coef >= 0 and math.isfinite(self.z_coef)):
            raise ConfigError(f"z_coef={self.z_coef} must be a number, zero or larger")
        for name in ("seed", "batch_seed"):  # a key takes 32 bits
            if (getattr(self, name) or 0) >= 2**32:
                raise ConfigError(f"{name}={getattr(self, name)} must be below 2**32")
        if self.batch_size % self.accumulate:
            divisors = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            raise ConfigError(
                f"batch_size={self.batch_size} is not divisible by accumulate={self.accumulate}",
                fix=f"accumulate of {divisors}",
            )
        for rows in self.sizes.all():
            self.micro_batches(rows)

    @property
    def order(self) -> int:
        """The seed of batches."""
        return self.seed if self.batch_seed is None else self.batch_seed

    @property
    def sizes(self) -> Sizes:
        """Rows of each step, by its number from 0."""
        return Sizes(self.batch_size, self.batch_sizes or {})

    def micro_batches(self, rows: int) -> int:
        """The fewest that a step of so many rows takes, none larger than those of `batch_size`.

        Raises:
          ConfigError: The rows do not split evenly into them.
        """
        largest = self.batch_size // self.accumulate
        number = -(-rows // largest)
        if rows % number:
            raise ConfigError(
                f"batch_sizes: {rows} rows do not split into {number} micro-batches of at most "
                f"batch_size / accumulate = {largest} rows",
                fix=f"{rows // largest * largest} or {number * largest} rows",
            )
        return number

    def at_rows(self, rows: int) -> "TrainConfig":
        """The same for steps of `rows` rows alone."""
        if rows == self.batch_size:
            return self
        accumulate = self.micro_batches(rows)
        return dataclasses.replace(self, batch_size=rows, batch_sizes=None, accumulate=accumulate)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How the devices are arranged: the product of the five is their number.

    Rows of a batch are split over data, fsdp and expert, their tokens over context; parameters and
    moments over all but data.
    """

    data: int | None = None  # groups that hold all of the state; None: the devices that are left
    fsdp: int = 1  # devices that share the state, and gather each layer when they compute it
    tensor: int = 1  # devices that share the heads, the hidden units and the vocabulary
    expert: int = 1  # devices that share the experts of a mixture
    context: int = 1  # devices that share the tokens of a sequence

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ConfigError(f"mesh.{field.name}={value} must be at least 1")
