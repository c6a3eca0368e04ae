# SPDX-License-Identifier: Apache-2.0
"""The compiled steps of one run, and the loop over them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxgpt.data.batches import Batches
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tokens import TokenFile
from jaxgpt.errors import DivergedError
from jaxgpt.kernels import choice
from jaxgpt.losses import Score
from jaxgpt.model import ModelConfig
from jaxgpt.shapes import Params
from jaxgpt.train import lora as adapters
from jaxgpt.train import sharding
from jaxgpt.train.checkpoint import Checkpoints
from jaxgpt.train.config import LoraConfig, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.train.evaluate import evaluate
from jaxgpt.train.optim import learning_rate, optimizer
from jaxgpt.train.report import Reporter
from jaxgpt.train.runfolder import Signals
from jaxgpt.train.step import TrainState, eval_step, init_state, train_step

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
        layout: MeshConfig,
        tokens: TokenFile,
        tokenizer: Tokenizer,
        horizon: int,
    ):
        self.model, self.train, self.tokens, self.tokenizer = model, train, tokens, tokenizer
        self.rate = learning_rate(optim, horizon)
        sizes = model.context_length, train.batch_size
        self.batches = Batches(tokens.train, *sizes, train.seed, tokens.train_weights)
        mesh, tx = sharding.make_mesh(), optimizer(optim, horizon)
        self.rows = sharding.batch_sharding(mesh)
        init = functools.partial(init_state, model, tx, train.seed, lora=lora)
        self.abstract = sharding.state_shardings(mesh, jax.eval_shape(init))
        whole = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        self.init = jax.jit(init, out_shardings=whole, donate_argnums=0)
        self.merged = (
            jax.jit(functools.partial(adapters.merged, cfg=lora)) if lora.rank else lambda p: p
        )
        self.step = jax.jit(
            functools.partial(train_step, cfg=model, tx=tx, train=train, lora=lora),
            in_shardings=(whole, self.rows),
            out_shardings=(whole, None),
            donate_argnums=0,
        )
        self.nats = jax.jit(functools.partial(eval_step, cfg=model, train=train, lora=lora))

    def begin(self, checkpoints: Checkpoints, weights: Weights | None) -> tuple[TrainState, int]:
        """The newest verified state and its step, or a fresh one at step 0."""
        abstract = self.abstract
        restored = checkpoints.restore(abstract.params, dataclasses.replace(abstract, params=None))
        if restored is None:
            model = {name: leaf for name, leaf in abstract.params.items() if name != adapters.NAME}
            return self.init(*(() if weights is None else (weights(model),))), 0
        return dataclasses.replace(restored.rest, params=restored.params), restored.step

    def run(
        self,
        state: TrainState,
        start: int,
        checkpoints: Checkpoints,
        out: Reporter,
        signals: Signals,
        hooks: Sequence[Hook],
    ) -> Params:
        """Steps start..train.steps - 1, with evaluation and checkpoints at their intervals.

        The metrics of a step are fetched after the next one was dispatched, so that the devices
        never wait for the host; with them comes the check that all was finite.
        """
        train = self.train
        waiting: list[tuple[int, dict[str, jax.Array]]] = []

        def fetch() -> None:
            while waiting:
                self._report(*waiting.pop(), out)

        choice.forget()
        for step in range(start + 1, train.steps + 1):
            batch = sharding.put_batch(self.batches.batch(step - 1), self.rows)
            state, metrics = self.step(state, batch)
            fetch()
            waiting.append((step, metrics))
            last = step == train.steps
            due = last or step % train.save_every == 0
            if step == start + 1:  # compiled
                fetch()
                kernels = ", ".join(map(str, choice.choices()))
                out.say_if(kernels and f"attention: {kernels}")
                out.go()
            if last or step % train.eval_every == 0 or due or signals.pending:
                fetch()
                out.halt()
                score = None
                if last or step % train.eval_every == 0:
                    score = self.evaluate(step, state.params, out, signals, hooks)
                if due or signals.pending:
                    self._save(checkpoints, step, state, score)
                if signals.pending and not last:
                    checkpoints.wait()
                    signals.check(f"after step {step}, which is saved")
                out.go()
            checkpoints.poll()
        return state.params

    def _report(self, step: int, metrics: dict[str, jax.Array], out: Reporter) -> None:
        values = {name: float(np.asarray(value)) for name, value in metrics.items()}
        if not values.pop("finite"):
            raise DivergedError(
                f"loss or gradient is not finite at step {step}: loss {values['loss_nats']}, "
                f"gradient norm {values['grad_norm']}",
                fix="a lower --optim.lr or longer --optim.warmup_steps, in another --run",
            )
        values["lr"] = float(np.asarray(self.rate(step)))
        out.step(step, values, log=step % self.train.log_every == 0 or step == self.train.steps)

    def evaluate(
        self, step: int, params: Params, out: Reporter, signals: Signals, hooks: Sequence[Hook]
    ) -> Score | None:
        """The validation loss; None without a validation text, or where a signal came."""
        if len(self.tokens.val) < 2:
            return None
        score = evaluate(
            lambda batch: np.asarray(self.nats(params, sharding.put_batch(batch, self.rows))),
            self.tokens.val,
            self.tokenizer,
            context_length=self.model.context_length,
            batch_size=self.train.batch_size,
            weights=self.tokens.val_weights,
            stop=lambda: signals.pending is not None,
        )
        if score is not None:
            out.score(step, score)
            for hook in hooks:
                out.say_if(hook(step, self.merged(params), score.metrics()))
        return score

    def _save(
        self, checkpoints: Checkpoints, step: int, state: TrainState, score: Score | None
    ) -> None:
        val_loss = None if score is None else score.nats_per_token
        checkpoints.save(
            step, state.params, dataclasses.replace(state, params=None), val_loss=val_loss
        )
