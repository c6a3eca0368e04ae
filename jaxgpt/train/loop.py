# SPDX-License-Identifier: Apache-2.0
"""The training loop: the only place where steps, evaluation, checkpoints and signals meet.

Given a locked run folder it goes on from the newest verified checkpoint, or begins; what it needs
to know of the past is in that folder. Pictures, samples and weights to start from come as hooks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxgpt.data.config import DataConfig
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.model import ModelConfig
from jaxgpt.shapes import Params
from jaxgpt.train import processes, sharding
from jaxgpt.train.checkpoint import Checkpoints
from jaxgpt.train.config import LoraConfig, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.train.devices import describe_devices
from jaxgpt.train.files import MetricsWriter, read_metrics
from jaxgpt.train.profiling import Profile
from jaxgpt.train.report import Reporter
from jaxgpt.train.rundata import note_session, read_facts
from jaxgpt.train.runfolder import RunFolder, Signals
from jaxgpt.train.texts import Texts, open_texts
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
    profile: tuple[int, int] | None = None,
    began: float | None = None,
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
      profile: First and last step of a trace, which goes into the run's folder.
      began: When the wait for the first step began, by `time.monotonic`; None: now.

    Raises:
      ConfigError: Data, tokenizer, batch or model do not fit together or not to the run.
      DivergedError: Loss or gradient is not finite; the last good checkpoint stays.
      CheckpointError: The run has checkpoints, and none is usable.
      ResourceError: Storage or memory refused.
      Interrupted: A signal came; the state was saved, unless there was none yet.
    """
    with (
        Signals() as signals,
        _reporter(train, model.context_length, listeners, began) as out,
        Profile(profile, folder.path) as traced,
    ):
        out.say(f"{folder.path.name}: {describe_devices()}")
        devices = sharding.make_mesh(mesh)
        processes.connect(devices)
        stop = processes.Stop(devices, signals)
        for rows in (train.batch_size, *train.sizes.all()):
            sharding.check_rows(rows, train.micro_batches(rows), devices.shape)
        facts, tokens, tokenizer = _open(folder, data, signals, out)
        model = tokens.vocabulary_of(model, tokenizer)
        horizon = facts.setdefault("horizon", train.steps)
        trainer = Trainer(model, optim, train, lora, devices, tokens, tokenizer, horizon)
        for line in trainer.lines():
            out.say(line)
        with Checkpoints(
            folder.checkpoints_path,
            keep=train.keep,
            on_saved=lambda step: out.say(f"saved step {step}"),
            warn=lambda line: out.say(f"warning: {line}"),
        ) as checkpoints:
            state, start = trainer.begin(checkpoints, weights)
            owed = tokens.scored and processes.lead("owed", lambda: is_owed(folder, start, train))
            if start >= train.steps and not owed:
                out.say(
                    f"{folder.path.name} is finished at step {start}; nothing is done. "
                    f"Go on with --train.steps={2 * start}, or begin another --run"
                )
                return
            processes.lead("started", lambda: _start(folder, facts, start, state.params, out))
            if start:
                out.say(f"going on from step {start}")
            if owed or (weights is not None and not start):
                trainer.evaluate(start, state, out, stop, hooks)
            params = trainer.run(state, start, checkpoints, out, stop, hooks, traced)
            checkpoints.wait()
            stop.check(f"after step {train.steps}, which is saved", stop.now())
            trainer.show(params, out, endings)
        out.say(f"done: {folder.path}")


def _reporter(
    train: TrainConfig, length: int, listeners: Sequence[Listener], began: float | None
) -> Reporter:
    silent = not processes.leads()

    def tokens_in(step: int) -> int:
        return train.sizes.before(step) * length

    return Reporter(train.steps, tokens_in, listeners, silent=silent, began=began)


def _open(
    folder: RunFolder, data: DataConfig, signals: Signals, out: Reporter
) -> tuple[dict[str, Any], Texts, Tokenizer]:
    """The run's facts, ids and tokenizer. Process 0 makes what there is to make, others read it."""

    def check() -> None:
        signals.check("while process 0 prepared the data")

    leads = processes.leads()
    facts = read_facts(folder) if leads else {}
    opened = open_texts(folder, data, facts, signals) if leads else None
    facts = processes.lead("facts", lambda: facts, check)
    texts, tokenizer = opened or open_texts(folder, data, facts, signals)
    processes.meet("texts", check)
    for line in texts.lines(tokenizer):
        out.say(line)
    return facts, texts, tokenizer


def _start(
    folder: RunFolder, facts: dict[str, Any], start: int, params: Params, out: Reporter
) -> None:
    """What process 0 looks at and opens before the first step."""
    folder.require_space(6 * sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
    note_session(folder, facts, start)
    resumed = start or -1  # a record of step 0 is of an earlier start
    out.start(start, MetricsWriter(folder.metrics_path, resume_step=resumed))


def is_owed(folder: RunFolder, step: int, train: TrainConfig) -> bool:
    """Whether the evaluation that belongs to a saved step is not on record: a signal ended it."""
    if not step or (step < train.steps and step % train.eval_every):
        return False
    records = read_metrics(folder.metrics_path)
    return not any(r.get("step") == step and "val_nats_per_token" in r for r in records)
