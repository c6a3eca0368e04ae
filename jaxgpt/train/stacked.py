# SPDX-License-Identifier: Apache-2.0
"""The step of several runs at once: mapped over states that are stacked, with numbers of each run.

What a number of the configuration is in each run is an array that is traced; so the step is made
inside the trace, from configurations that hold tracers. Left out: whose runs they are (`lanes.py`).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxgpt.data.batches import Batch, Batches
from jaxgpt.data.mixture import MixedBatches
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig
from jaxgpt.train.config import LoraConfig, OptimConfig, TrainConfig
from jaxgpt.train.manysteps import Step, many_steps
from jaxgpt.train.optim import learning_rate, optimizer
from jaxgpt.train.step import TrainState, train_step


def with_value(cfg: Any, path: str, value: Any) -> Any:
    """A copy of a frozen dataclass with one value replaced, unchecked: a tracer passes no check.

    Args:
      cfg: The dataclass.
      path: Dotted, `method.beta2`.
      value: A tracer; the values that it stands for were checked where each run was configured.
    """
    name, _, rest = path.partition(".")
    new = copy.copy(cfg)
    inner = with_value(getattr(cfg, name), rest, value) if rest else value
    object.__setattr__(new, name, inner)
    return new


def stacked_step(
    model: ModelConfig,
    optim: OptimConfig,
    train: TrainConfig,
    lora: LoraConfig,
    horizon: int,
    values: Mapping[str, np.ndarray],
    *,
    one_batch: bool,
) -> Step:
    """One step of all lanes, to jit: of states, and metrics, with a leading axis of lanes.

    Args:
      model: Of all lanes; what it says of initialisation is not used.
      optim: The optimizer but for `values`.
      train: The rest but for `values`.
      lora: As for `train_step`.
      horizon: As for `learning_rate`.
      values: By dotted name, `optim.lr`: a float32 for each lane.
      one_batch: Whether all lanes train on one batch; else it has an axis of lanes, too.
    """

    def one(
        state: TrainState, batch: Batch, own: dict[str, Array]
    ) -> tuple[TrainState, dict[str, Array]]:
        groups = {"optim": optim, "train": train}
        for name, value in own.items():
            group, _, path = name.partition(".")
            groups[group] = with_value(groups[group], path, value)
        tx = optimizer(groups["optim"], horizon, model.dims().width_ratio)
        rate = learning_rate(groups["optim"], horizon)
        more: Any = dict(cfg=model, tx=tx, train=groups["train"], lora=lora, rate=rate)
        return train_step(state, batch, **more)

    mapped = jax.vmap(one, in_axes=(0, None if one_batch else 0, 0))

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        return mapped(state, batch, {name: jnp.asarray(each) for name, each in values.items()})

    return step


class StackedSteps:
    """The compiled steps of all lanes on one device, as `jaxgpt.train.manysteps.Steps`.

    There is always a loop over steps, also where `dispatch` is 1.

    Args:
      step: For each number of rows, the step of all lanes.
      dispatch: Most steps in a dispatch.
      names: Of the numbers that differ between lanes.
    """

    def __init__(self, step: Mapping[int, Step], dispatch: int, names: Sequence[str]):
        self.dispatch, self.names = dispatch, names
        self._compiled = {rows: _jitted(each) for rows, each in step.items()}

    def __call__(
        self, state: TrainState, batches: Sequence[Batch], n_rows: int
    ) -> tuple[TrainState, dict[str, Array]]:
        """One dispatch.

        Args:
          state: Of all lanes; given away.
          batches: Of each step, at most `dispatch`.
          n_rows: Rows of a batch.

        Returns:
          The new state, and the metrics, each of shape (`dispatch`, lanes), first ones first.

        Raises:
          ConfigError: One of the numbers decides what is computed.
        """
        filler = [batches[0]] * (self.dispatch - len(batches))
        stacked = jax.tree.map(lambda *own: np.stack(own), *batches, *filler)
        try:
            return self._compiled[n_rows](state, stacked, np.int32(len(batches)))
        except (
            jax.errors.ConcretizationTypeError,
            jax.errors.TracerArrayConversionError,
        ) as error:
            raise ConfigError(
                f"{', '.join(self.names)} cannot differ between lanes: what is computed depends "
                "on it",
                fix="a run for each value",
            ) from error


def _jitted(step: Step) -> Callable:
    def run(state: TrainState, batches: Batch, count: Any) -> Any:
        return many_steps(state, batches, count, step=step)

    return jax.jit(run, donate_argnums=0)


class StackedBatches:
    """The batches of all lanes, as those of one run.

    Args:
      each: Of every lane; one, where all have the same.
    """

    def __init__(self, each: Sequence[Batches | MixedBatches]):
        self.each, self.windows = each, each[0].windows

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """The batch of one step: of one lane, or with a leading axis of lanes."""
        own = [each.batch(step, rows) for each in self.each]
        return own[0] if len(own) == 1 else jax.tree.map(lambda *x: np.stack(x), *own)
