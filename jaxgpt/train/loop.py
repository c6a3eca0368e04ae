# SPDX-License-Identifier: Apache-2.0
"""The training loop: the only place where steps, evaluation, checkpoints and signals meet.

Given a locked run folder it goes on from the newest verified checkpoint, or begins; what it needs
to know of the past is in that folder. Pictures, samples and weights to start from come as hooks.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxgpt.data.batches import Batches
from jaxgpt.data.config import DataConfig
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
from jaxgpt.train.config import LoraConfig, OptimConfig, TrainConfig
from jaxgpt.train.devices import describe_devices
from jaxgpt.train.evaluate import evaluate
from jaxgpt.train.files import MetricsWriter
from jaxgpt.train.optim import learning_rate, optimizer
from jaxgpt.train.report import Reporter
from jaxgpt.train.rundata import (
    check_ids,
    note_session,
    open_data,
    read_facts,
    with_vocabulary,
)
from jaxgpt.train.runfolder import RunFolder, Signals
from jaxgpt.train.step import TrainState, eval_step, init_state, train_step

# Called after each evaluation with the step, the parameters and the evaluation's metrics. A line
# that it returns is shown. The next step reuses the memory of the parameters.
Hook = Callable[[int, Params, dict[str, float]], str | None]
# Called with each record of metrics.jsonl, from then on its own.
Listener = Callable[[dict[str, Any]], None]
# Called with the abstract parameters of the model; returns them with their values.
Weights = Callable[[Params], Params]
# Called when the last step is done and saved; a line that it returns is shown.
Ending = Callable[[Params], str | None]

_NO_LORA = LoraConfig()


def fit(
    folder: RunFolder,
    model: ModelConfig,
    data: DataConfig,
    optim: OptimConfig,
    train: TrainConfig,
    *,
    lora: LoraConfig = _NO_LORA,
    weights: Weights | None = None,
    hooks: Sequence[Hook] = (),
    listeners: Sequence[Listener] = (),
    endings: Sequence[Ending] = (),
) -> None:
    """Train until `train.steps`, from wherever the run folder stands.

    Run again after an interruption it reaches bitwise the same parameters as without one (on one
    machine). A finished run is left untouched. With more steps than before it goes on; the schedule
    keeps the horizon of the run's first start.

    Args:
      folder: The run's folder, locked by the caller.
      model: `vocab_size` None takes the tokenizer's.
      data: The text; must be what the run began with.
      optim: The optimizer.
      train: Length, batch, intervals.
      lora: Adapters to train instead of the model.
      weights: Gives the parameters that a new run begins with, from their abstract form (shapes,
        dtypes, shardings); None: fresh ones. A run that goes on does not ask for them. With
        them there is an evaluation before the first step.
      hooks: Called after each evaluation.
      listeners: Called with each record of metrics.
      endings: Called once the run is complete, not where it was already.

    Raises:
      ConfigError: Data, tokenizer, batch or model do not fit together or not to the run.
      DivergedError: Loss or gradient is not finite; the last good checkpoint stays.
      CheckpointError: The run has checkpoints, and none is usable.
      ResourceError: Storage or memory refused.
      Interrupted: A signal came; the state was saved, unless there was none yet.
    """
    with (
        Signals() as signals,
        Reporter(train.steps, train.batch_size * model.context_length, listeners) as out,
    ):
        out.say(f"{folder.path.name}: {describe_devices()}")
        sharding.check_rows(train.batch_size, train.accumulate, jax.device_count())
        facts = read_facts(folder)
        tokens, tokenizer = open_data(folder, data, facts, signals)
        model = with_vocabulary(model, tokenizer)
        check_ids(tokens, model)
        out.say(
            f"{tokens.path.name}: {len(tokens.train):,} training and {len(tokens.val):,} "
            f"validation tokens, {tokenizer.kind} vocabulary of {tokenizer.vocab_size:,}"
        )
        horizon = facts.setdefault("horizon", train.steps)
        trainer = Trainer(model, optim, train, lora, tokens, tokenizer, horizon)
        with Checkpoints(
            folder.checkpoints_path,
            keep=train.keep,
            on_saved=lambda step: out.say(f"saved step {step}"),
            warn=lambda line: out.say(f"warning: {line}"),
        ) as checkpoints:
            state, start = trainer.begin(checkpoints, weights)
            if start >= train.steps:
                out.say(
                    f"{folder.path.name} is finished at step {start}; nothing is done. "
                    f"Go on with --train.steps={2 * start}, or begin another --run"
                )
                return
            folder.require_space(2 * sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)) * 3)
            note_session(folder, facts, start)
            resumed = start or -1  # a record of step 0 is of an earlier start
            out.start(start, MetricsWriter(folder.metrics_path, resume_step=resumed))
            if start:
                out.say(f"going on from step {start}")
            elif weights is not None:
                trainer.evaluate(0, state.params, out, signals, hooks)
            params = trainer.run(state, start, checkpoints, out, signals, hooks)
            checkpoints.wait()
            for ending in endings:
                out.say_if(ending(trainer.merged(params)))
        out.say(f"done: {folder.path}")


class Trainer:
    """The compiled steps of one run, and the loop over them."""

    def __init__(
        self,
        model: ModelConfig,
        optim: OptimConfig,
        train: TrainConfig,
        lora: LoraConfig,
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
