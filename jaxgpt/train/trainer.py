# SPDX-License-Identifier: Apache-2.0
"""The compiled steps of one run, and the loop over them."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgpt.data.batches import Batch
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.kernels import choice
from jaxgpt.losses import Score
from jaxgpt.model import ModelConfig
from jaxgpt.shapes import Params
from jaxgpt.train import lora as adapters
from jaxgpt.train import processes, sharding
from jaxgpt.train.checkpoint import Checkpoints
from jaxgpt.train.config import LoraConfig, OptimConfig, TrainConfig
from jaxgpt.train.devices import memory_bytes, peak_bytes
from jaxgpt.train.health import SCORED_TOKENS, Health, Speed, attention_logits
from jaxgpt.train.manysteps import Steps, until
from jaxgpt.train.optim import learning_rate, optimizer
from jaxgpt.train.processes import Stop
from jaxgpt.train.profiling import Profile
from jaxgpt.train.report import Reporter
from jaxgpt.train.step import (
    TrainState,
    apart,
    averaged_params,
    eval_step,
    init_state,
    together,
    train_step,
)
from jaxgpt.train.texts import Texts

# Called after each evaluation with the step, the parameters and the evaluation's metrics. A line
# that it returns is shown. The next step reuses the memory of the parameters.
Hook = Callable[[int, Params, dict[str, float]], str | None]
# Called with the abstract parameters of the model; returns them with their values.
Weights = Callable[[Params], Params]


class Trainer:
    """The compiled steps of one run, and the loop over them."""

    def __init__(
        self,
        model: ModelConfig,
        optim: OptimConfig,
        train: TrainConfig,
        lora: LoraConfig,
        mesh: Mesh,
        tokens: Texts,
        tokenizer: Tokenizer,
        horizon: int,
    ):
        self.model, self.train, self.tokens, self.tokenizer = model, train, tokens, tokenizer
        self.intervals = train.eval_every, train.save_every
        rate = learning_rate(optim, horizon)
        self.batches = tokens.batches(model.context_length, train.sizes, train.order)
        stored, self.guessed = sharding.param_specs(model, mesh.shape)
        self.layout = sharding.make_layout(mesh, stored, sharding.narrow_paths(model))
        self.rows = sharding.batch_sharding(mesh)
        tx = optimizer(optim, horizon, model.dims().width_ratio)
        ema = train.ema_decay is not None
        init = functools.partial(init_state, model, tx, train.seed, lora=lora, ema=ema)
        self.abstract = sharding.state_shardings(self.layout, jax.eval_shape(init))
        pieces = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        self.init = jax.jit(init, out_shardings=pieces, donate_argnums=0)
        whole = functools.partial(adapters.merged, cfg=lora)
        split = any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(pieces))
        self.merged = (
            jax.jit(whole, out_shardings=self.layout.sharding()) if lora.rank or split else whole
        )
        limit = memory_bytes() if split else None
        n_bytes = sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.abstract.params)
        )
        self.shows = limit is None or n_bytes <= limit / 4
        step = functools.partial(train_step, cfg=model, tx=tx, lora=lora, rate=rate)
        by_rows = {n: self._placed(step, train=train.at_rows(n)) for n in train.sizes.all()}
        self.steps = Steps(by_rows, pieces, self.rows, train.dispatch)
        self.nats = jax.jit(
            self._placed(eval_step, cfg=model, train=train, lora=lora),
            out_shardings=self.layout.sharding() if processes.several() else None,
        )
        looks = functools.partial(attention_logits, cfg=model, dtype=train.dtype, lora=lora)
        # Not placed: one row does not split.
        self.logits = jax.jit(looks, out_shardings=self.layout.sharding())
        self.health = Health(train.max_bad_steps, self.batches.windows)
        self.speed = None if lora.rank else Speed.of(model, train.dtype)

    def lines(self) -> Iterator[str]:
        """What there is to say before the first step: what is split by guess, what is left out."""
        if self.guessed and self.layout.size(*sharding.GATHERED) > 1:
            yield f"split by size: {', '.join(self.guessed)}"
        if not self.shows:
            yield "no samples and pictures: the parameters do not fit on one device"

    def _placed(self, function: Callable, **options: Any) -> Callable:
        """A function to jit, traced for the mesh."""
        return sharding.placed(functools.partial(function, **options), self.layout)

    def begin(self, checkpoints: Checkpoints, weights: Weights | None) -> tuple[TrainState, int]:
        """The newest verified state and its step, or a fresh one at step 0."""
        params, *rest = apart(self.abstract)
        found = checkpoints.restore(params, *rest)
        if found is None:
            model = {name: leaf for name, leaf in params.items() if name != adapters.NAME}
            return self.init(*(() if weights is None else (weights(model),))), 0
        return together(found.params, found.rest, found.ema), found.step

    def run(
        self,
        state: TrainState,
        start: int,
        checkpoints: Checkpoints,
        out: Reporter,
        stop: Stop,
        hooks: Sequence[Hook],
        profile: Profile,
    ) -> Params:
        """Steps start + 1..train.steps, with evaluation and checkpoints at their intervals.

        The devices are given work before the host looks at what they did before it: batches are
        made and metrics fetched while they compute. With metrics comes the check that all was
        finite. That it comes late does no harm: a step that is not finite has changed nothing.
        """
        train, step = self.train, start
        if self.speed is not None:
            out.speed = self.speed.metrics
        waiting: list[tuple[int, int, dict[str, jax.Array]]] = []

        def fetch() -> None:
            while waiting:
                self._report(*waiting.pop(), out)

        choice.forget()
        while step < train.steps:
            rows = train.sizes.at(step)
            compiles = step == start or rows != train.sizes.at(step - 1)
            if profile.begins(step):
                fetch()
                profile.begin(step)
            if compiles:
                fetch()
                out.halt()
            count = 1 if compiles else self._ahead(step, profile)
            own = processes.own_rows(self.rows, rows)
            batches = [self.batches.batch(step + i, own) for i in range(count)]
            called = time.monotonic()
            state, metrics = self.steps(state, batches, rows)
            compile_s = time.monotonic() - called
            fetch()
            waiting.append((step, count, metrics))
            step += count
            if step == start + 1:
                jax.block_until_ready(metrics)
                out.first_step(compile_s)
            if compiles:
                fetch()
                out.go()
            if step == start + 1:
                kernels = ", ".join(map(str, choice.choices()))
                out.say_if(kernels and f"attention: {kernels}")
            if profile.ends(step):
                fetch()
                out.say_if(profile.end(step))
            signal = stop.soon()
            if signal or step == train.steps or any(step % n == 0 for n in self.intervals):
                fetch()
                out.halt()
                self._between(step, signal, state, checkpoints, out, stop, hooks)
                out.go()
            checkpoints.poll()
        out.say_if(profile.end(step))
        return state.params

    def _ahead(self, step: int, profile: Profile) -> int:
        """How many steps the devices are given at once behind `step` finished ones."""
        changes = (s for s in self.train.sizes.changes if s > 0)
        edges = (self.train.steps, *changes, *profile.edges())
        return until(step, self.train.dispatch, self.intervals, edges)

    def _between(
        self,
        step: int,
        signal: int | None,
        state: TrainState,
        checkpoints: Checkpoints,
        out: Reporter,
        stop: Stop,
        hooks: Sequence[Hook],
    ) -> None:
        """What is due behind `step` finished steps; a signal saves them and ends the run."""
        last, score = step == self.train.steps, None
        if last or step % self.train.eval_every == 0:
            score = self.evaluate(step, state, out, stop, hooks)
        signal = signal or stop.now()
        if last or step % self.train.save_every == 0 or signal:
            self._save(checkpoints, step, state, score)
        if signal and not last:
            checkpoints.wait()
            stop.check(f"after step {step}, which is saved", signal)

    def _report(self, done: int, count: int, metrics: dict[str, Any], out: Reporter) -> None:
        """What `count` steps behind `done` finished ones measured, step by step."""
        arrays = {name: np.atleast_1d(x) for name, x in jax.device_get(metrics).items()}
        out.count(done, done + count)
        for i in range(count):
            step, values = done + i + 1, {name: float(x[i]) for name, x in arrays.items()}
            line = self.health.look(step, values)
            log = step % self.train.log_every == 0 or step == self.train.steps
            out.step(step, values, log=log, line=line and f"warning: {line}")

    def evaluate(
        self,
        step: int,
        state: TrainState,
        out: Reporter,
        stop: Stop,
        hooks: Sequence[Hook],
    ) -> Score | None:
        """The validation loss; None without a validation text, or where a signal came.

        Beside it that of the moving average, where one is kept, the largest attention logit, and
        the most memory so far.
        """
        score = self._score(state.params, out, stop)
        if score is None:
            return None
        more = peak_bytes()
        if (averaged := averaged_params(state)) is not None:
            if (other := self._score(averaged, out, stop)) is None:
                return None
            more["val_ema_nats_per_token"] = other.nats_per_token
        text = next(text.val for text in self.tokens.texts if len(text.val) > 1)
        row_1T = np.asarray(text[: min(self.model.context_length, SCORED_TOKENS)], np.int32)[None]
        if logits := self.logits(state.params, row_1T):
            more["max_attention_logit"] = max(float(np.asarray(x)) for x in logits.values())
        out.score(step, score, more)
        numbers = score.metrics()
        views = [functools.partial(lambda hook, p: hook(step, p, numbers), hook) for hook in hooks]
        self.show(state.params, out, views)
        return score

    def show(
        self, params: Params, out: Reporter, views: Sequence[Callable[[Params], str | None]]
    ) -> None:
        """Let process 0 look at the whole parameters, and say what comes of it.

        Not where the mesh splits them and a device has no room for all of them.
        """
        if not views or not self.shows:
            return
        whole = processes.own_copy(self.merged(params))
        for view in views if processes.leads() else ():
            out.say_if(view(whole))
        processes.meet("shown")

    def _score(self, params: Params, out: Reporter, stop: Stop) -> Score | None:
        def nats(batch: Batch) -> np.ndarray:
            n = len(batch.tokens_BT)
            own = processes.own_rows(self.rows, n)
            rows = processes.put_rows(jax.tree.map(lambda x: x[own], batch), self.rows, n)
            return np.asarray(self.nats(params, rows))

        return self.tokens.evaluate(
            nats,
            self.tokenizer,
            self.model.context_length,
            self.train.batch_size // self.train.accumulate,  # what fits into memory
            stop=lambda: stop.now() is not None,
            say=out.say,
        )

    def _save(
        self, checkpoints: Checkpoints, step: int, state: TrainState, score: Score | None
    ) -> None:
        val_loss = None if score is None else score.nats_per_token
        params, rest, ema = apart(state)
        checkpoints.save(step, params, rest, ema=ema, val_loss=val_loss)
