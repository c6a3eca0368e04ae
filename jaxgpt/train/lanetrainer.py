# SPDX-License-Identifier: Apache-2.0
"""The loop of one run, made to work on the stacked states of several.

What a lane is by itself (its batches, its evaluation, its records, its checkpoints) is done by a
`Trainer` of its own, which never steps. Left out: how lanes begin and end (`lanes.py`).
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.data.config import DataConfig
from jaxgpt.errors import DivergedError
from jaxgpt.losses import Score
from jaxgpt.model import ModelConfig
from jaxgpt.train.checkpoint import Checkpoints
from jaxgpt.train.config import OptimConfig, TrainConfig
from jaxgpt.train.optim import optimizer
from jaxgpt.train.processes import Stop
from jaxgpt.train.report import Reporter
from jaxgpt.train.runfolder import RunFolder
from jaxgpt.train.stacked import StackedBatches, StackedSteps, stacked_step
from jaxgpt.train.step import TrainState, apart, init_state, together
from jaxgpt.train.trainer import Hook, Trainer


@dataclasses.dataclass(frozen=True)
class Lane:
    """One run among others.

    Attributes:
      folder: Its folder, locked by the caller.
      model: As for `fit`; lanes differ in `init` alone.
      data: The same for all.
      optim: Lanes differ in numbers that the step computes with.
      train: Lanes differ in seeds, and in such numbers.
    """

    folder: RunFolder
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig

    @property
    def name(self) -> str:
        """That of its folder."""
        return self.folder.path.name


@dataclasses.dataclass(eq=False)
class Running:
    """A lane on its way; its trainer knows all but the step.

    Attributes:
      score: Of the last evaluation.
      diverged: The step at which it did.
    """

    lane: Lane
    facts: dict[str, Any]
    trainer: Trainer
    checkpoints: Checkpoints
    out: "Own"
    score: Score | None = None
    diverged: int | None = None


class Together(Reporter):
    """Says what concerns all lanes; the clocks of their own reports go with its clock."""

    each: Sequence[Reporter] = ()

    def go(self) -> None:
        """For all."""
        for reporter in self.each:
            reporter.go()
        super().go()

    def halt(self) -> None:
        """For all."""
        for reporter in self.each:
            reporter.halt()
        super().halt()

    def first_step(self, compile_s: float) -> None:
        """Of all."""
        for reporter in self.each:
            reporter.first_step(compile_s)
        super().first_step(compile_s)


class Own(Reporter):
    """Writes the records of one lane, and says only what is the matter with it."""

    def __init__(
        self, name: str, out: Reporter, tokens_in: Callable[[int], int], began: float | None
    ):
        super().__init__(out.steps, tokens_in, silent=True, began=began)
        self._name, self._out = name, out

    def step(
        self, step: int, values: dict[str, float], *, log: bool, line: str | None = None
    ) -> None:
        """As of one run; a line has the lane's name."""
        super().step(step, values, log=log, line=line)
        self._out.say_if(line and f"{self._name}: {line}")


class LaneTrainer(Trainer):
    """The loop of one run, over states that have an axis of lanes."""

    def __init__(
        self,
        lanes: Sequence[Running],
        parts: tuple,
        values: Mapping[str, Sequence[float]],
        on_diverged: Callable[[str, int], None],
        say: Callable[[str], None],
    ):
        super().__init__(*parts)
        self.lanes, self.on_diverged, self.say = lanes, on_diverged, say
        model, optim, train, lora, *_, horizon = parts
        same = len({lane.lane.train.order for lane in lanes}) == 1
        batches = [lane.trainer.batches for lane in lanes]
        self.batches: Any = StackedBatches(batches[:1] if same else batches)
        numbers = {name: np.asarray(each, np.float32) for name, each in values.items()}
        by_rows = {
            n: stacked_step(model, optim, train.at_rows(n), lora, horizon, numbers, one_batch=same)
            for n in train.sizes.all()
        }
        self.steps: Any = StackedSteps(by_rows, train.dispatch, list(values))
        ratio, ema = model.dims().width_ratio, train.ema_decay is not None
        fresh = functools.partial(init_state, tx=optimizer(optim, horizon, ratio), lora=lora)
        self._fresh = functools.partial(fresh, ema=ema)
        self._pick = jax.jit(lambda state, k: jax.tree.map(lambda x: x[k], state))
        for lane in lanes:  # compiled once: none of it depends on what lanes differ in
            lane.trainer.nats, lane.trainer.logits = self.nats, self.logits

    @property
    def alive(self) -> list[Running]:
        """The lanes that have not diverged."""
        return [lane for lane in self.lanes if lane.diverged is None]

    def saved(self) -> int:
        """The newest step that all lanes have saved; 0: there is none."""
        steps = [set(lane.checkpoints.steps()) for lane in self.alive]
        return max(set.intersection(*steps), default=0) if steps else self.train.steps

    def stacked(self, step: int) -> TrainState:
        """The states of all lanes at a step that they have saved, or fresh ones at step 0."""
        states, made = [], {}
        for lane in self.lanes:
            model = lane.trainer.model
            if step and lane.diverged is None:
                params, *rest = apart(lane.trainer.abstract)
                found = lane.checkpoints.restore(params, *rest, step=step)
                assert found is not None
                states.append(together(found.params, found.rest, found.ema))
            else:  # of a lane that diverged: any, for nothing of it is kept
                if repr(model) not in made:
                    made[repr(model)] = jax.jit(functools.partial(self._fresh, model))
                states.append(made[repr(model)](seed=np.uint32(lane.lane.train.seed)))
        state = jax.tree.map(lambda *each: jnp.stack(each), *states)
        return jax.device_put(state, jax.sharding.SingleDeviceSharding(jax.devices()[0]))

    def _report(self, done: int, count: int, metrics: dict[str, Any], out: Reporter) -> None:
        arrays = jax.device_get(metrics)
        out.count(done, done + count)
        for k, lane in enumerate(self.lanes):
            if lane.diverged is None:
                try:
                    own = {name: x[:, k] for name, x in arrays.items()}
                    lane.trainer._report(done, count, own, lane.out)
                except DivergedError as error:
                    self._leave(lane, done + count, error, out)
        alive = [k for k, lane in enumerate(self.lanes) if lane.diverged is None]
        for i in range(count):
            step = done + i + 1
            log = step % self.train.log_every == 0 or step == self.train.steps
            values = {name: float(x[i, alive].mean()) for name, x in arrays.items()}
            out.step(step, values, log=log)

    def _leave(self, lane: Running, step: int, error: DivergedError, out: Reporter) -> None:
        """Go on without a lane.

        Raises:
          DivergedError: It was the last.
        """
        lane.diverged = step
        self.on_diverged(lane.lane.name, step)
        if not self.alive:
            raise error
        out.say(f"{lane.lane.name} diverged, {len(self.alive)} lanes go on: {error.what}")

    def evaluate(
        self, step: int, state: TrainState, out: Reporter, stop: Stop, hooks: Sequence[Hook]
    ) -> Score | None:
        """Lane by lane; returns the score of the last one."""
        if not self.score(self.alive, step, state, stop):
            return None
        losses = [lane.score.nats_per_token for lane in self.alive if lane.score is not None]
        spread = f", standard deviation {statistics.stdev(losses):.4f}" if losses[1:] else ""
        out.say(
            f"step {step}/{self.train.steps}  validation {statistics.mean(losses):.4f} nats/token, "
            f"mean of {len(losses)} lanes{spread}"
        )
        return self.alive[-1].score

    def score(self, lanes: Sequence[Running], step: int, state: TrainState, stop: Stop) -> bool:
        """Evaluate some lanes, each with its own record; whether there was a score for all."""
        for lane in lanes:
            own = self._pick(state, self.lanes.index(lane))
            lane.score = lane.trainer.evaluate(step, own, lane.out, stop, ())
            if lane.score is None:
                return False
        return True

    def _save(
        self, checkpoints: Checkpoints, step: int, state: TrainState, score: Score | None
    ) -> None:
        for k, lane in enumerate(self.lanes):
            if lane.diverged is None:
                own = None if score is None else lane.score
                lane.trainer._save(lane.checkpoints, step, self._pick(state, k), own)
        for lane in self.alive:  # one after the other: they are to have a step in common
            lane.checkpoints.wait()
        self.say(f"saved step {step} of {len(self.alive)} lanes")
