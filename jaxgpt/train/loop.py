# SPDX-License-Identifier: Apache-2.0
"""The training loop: the only place where steps, evaluation, checkpoints and signals meet.

Given a locked run folder it goes on from the newest verified checkpoint, or begins; what it needs
to know of the past is in that folder. Pictures, samples and weights to start from come as hooks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxgpt.data.config import DataConfig
from jaxgpt.model import ModelConfig
from jaxgpt.shapes import Params
from jaxgpt.train import sharding
from jaxgpt.train.checkpoint import Checkpoints
from jaxgpt.train.config import LoraConfig, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.train.devices import describe_devices
from jaxgpt.train.files import MetricsWriter
from jaxgpt.train.report import Reporter
from jaxgpt.train.rundata import (
    check_ids,
    note_session,
    open_data,
    read_facts,
    with_vocabulary,
)
from jaxgpt.train.runfolder import RunFolder, Signals
from jaxgpt.train.trainer import Hook, Trainer, Weights

# Called with each record of metrics.jsonl, from then on its own.
Listener = Callable[[dict[str, Any]], None]
# Called when the last step is done and saved; a line that it returns is shown.
Ending = Callable[[Params], str | None]

_NO_LORA, _ALL_DATA = LoraConfig(), MeshConfig()


def fit(
    folder: RunFolder,
    model: ModelConfig,
    data: DataConfig,
    optim: OptimConfig,
    train: TrainConfig,
    *,
    lora: LoraConfig = _NO_LORA,
    mesh: MeshConfig = _ALL_DATA,
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
      mesh: How the devices are arranged.
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
        trainer = Trainer(model, optim, train, lora, mesh, tokens, tokenizer, horizon)
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
