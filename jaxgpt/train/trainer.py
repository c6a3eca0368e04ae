# SPDX-License-Identifier: Apache-2.0
"""The compiled steps of one run, and the loop over them."""

import functools
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
from jaxgpt.train.devices import memory_bytes
from jaxgpt.train.health import SCORED_TOKENS, Health, Speed, attention_logits
from jaxgpt.train.optim import learning_rate, optimizer
from jaxgpt.train.processes import Stop
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
        self.rate = learning_rate(optim, horizon)
        self.batches = tokens.batches(model.context_length, train.sizes, train.seed)
        stored, self.guessed = sharding.param_specs(model, mesh.shape)
        self.layout = sharding.make_layout(mesh, stored)
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
        self.steps = {  # by the rows that they take
            rows: jax.jit(
                self._placed(train_step, cfg=model, tx=tx, train=train.at_rows(rows), lora=lora),
                in_shardings=(pieces, self.rows),
                out_shardings=(pieces, None),
                donate_argnums=0,
            )
            for rows in train.sizes.all()
        }
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
    ) -> Params:
        """Steps start..train.steps - 1, with evaluation and checkpoints at their intervals.

        The metrics of a step are fetched after the next one was dispatched, so that the devices
        never wait for the host; with them comes the check that all was finite. That it comes late
        does no harm: a step that is not finite has changed nothing.
        """
        train = self.train
        if self.speed is not None:
            out.speed = self.speed.metrics
        waiting: list[tuple[int, dict[str, jax.Array]]] = []

        def fetch() -> None:
            while waiting:
                self._report(*waiting.pop(), out)

        choice.forget()
        for step in range(start + 1, train.steps + 1):
            rows = train.sizes.at(step - 1)
            compiles = step == start + 1 or rows != train.sizes.at(step - 2)
            if compiles:
                fetch()
                out.halt()
            own = self.batches.batch(step - 1, processes.own_rows(self.rows, rows))
            state, metrics = self.steps[rows](state, processes.put_rows(own, self.rows, rows))
            fetch()
            waiting.append((step, metrics))
            last = step == train.steps
            due = last or step % train.save_every == 0
            if compiles:
                fetch()
                out.go()
            if step == start + 1:
                kernels = ", ".join(map(str, choice.choices()))
                out.say_if(kernels and f"attention: {kernels}")
            signal = stop.soon()
            if last or step % train.eval_every == 0 or due or signal:
                fetch()
                out.halt()
                score = None
                if last or step % train.eval_every == 0:
                    score = self.evaluate(step, state, out, stop, hooks)
                signal = signal or stop.now()
                if due or signal:
                    self._save(checkpoints, step, state, score)
                if signal and not last:
                    checkpoints.wait()
                    stop.check(f"after step {step}, which is saved", signal)
                out.go()
            checkpoints.poll()
        return state.params

    def _report(self, step: int, metrics: dict[str, jax.Array], out: Reporter) -> None:
        values = {name: float(np.asarray(value)) for name, value in metrics.items()}
        line = self.health.look(step, values)
        # The schedule counts updates.
        values["lr"] = float(np.asarray(self.rate(step - int(values["skipped_steps"]))))
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

        Beside it that of the moving average, where one is kept, and the largest attention logit.
        """
        score = self._score(state.params, out, stop)
        if score is None:
            return None
        more = {}
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
