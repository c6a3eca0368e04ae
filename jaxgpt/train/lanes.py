# SPDX-License-Identifier: Apache-2.0
"""Many runs in one step: lanes share a compiled program, and differ in seeds and in numbers.

The train states of all lanes are stacked, and the step is mapped over them. A lane is a run of its
own: it has a folder with configuration, metrics and checkpoints, and reaches what it would alone,
up to rounding. Begun together, lanes go on together, from the newest step that all have saved.

Left out: several devices (lanes are on the first), weights to begin with, samples on the way.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxgpt.train.checkpoint import Checkpoints
from jaxgpt.train.config import LoraConfig
from jaxgpt.train.devices import describe_devices
from jaxgpt.train.files import MetricsWriter
from jaxgpt.train.lanetrainer import Lane, LaneTrainer, Own, Running, Together
from jaxgpt.train.loop import is_owed
from jaxgpt.train.processes import Stop
from jaxgpt.train.profiling import Profile
from jaxgpt.train.rundata import note_session, read_facts
from jaxgpt.train.runfolder import Signals
from jaxgpt.train.sharding import AXES
from jaxgpt.train.texts import open_texts
from jaxgpt.train.trainer import Trainer

_NO_LORA = LoraConfig()


def fit_lanes(
    lanes: Sequence[Lane],
    values: Mapping[str, Sequence[float]],
    *,
    lora: LoraConfig = _NO_LORA,
    diverged: Mapping[str, int] | None = None,
    on_diverged: Callable[[str, int], None] = lambda name, step: None,
    began: float | None = None,
) -> None:
    """Train all lanes until `train.steps`, from the newest step that all of them have saved.

    A lane that diverges is left behind at its last checkpoint, and the others go on.

    Args:
      lanes: At least one.
      values: By dotted name, `optim.lr`, what a number is in each lane; others are those of the
        first lane.
      lora: Adapters to train instead of the model.
      diverged: Lanes that diverged earlier, and when.
      on_diverged: Called with a lane's name and the step at which it diverges.
      began: When the wait for the first step began, by `time.monotonic`; None: now.

    Raises:
      ConfigError: As `fit`; or a number of `values` decides what is computed, and not only how.
      DivergedError: All lanes have.
      CheckpointError: The step that all have saved is damaged in one of them.
      ResourceError: Storage or memory refused.
      Interrupted: A signal came; the states were saved.
    """
    first = lanes[0]
    one_device = np.array(jax.devices()[:1]).reshape((1,) * len(AXES))
    mesh = Mesh(one_device, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    train, length = first.train, first.model.context_length

    def tokens_in(step: int) -> int:
        return train.sizes.before(step) * length

    with (
        Signals() as signals,
        Together(train.steps, lambda step: len(lanes) * tokens_in(step), began=began) as out,
        contextlib.ExitStack() as opened,
    ):
        where = "on" if jax.device_count() == 1 else "on the first of"
        top = first.folder.path.parent.name
        out.say(f"{top}: {len(lanes)} lanes {where} {describe_devices()}")
        running, said = [], []
        for lane in lanes:
            facts = read_facts(lane.folder)
            texts, tokenizer = open_texts(lane.folder, lane.data, facts, signals)
            model = texts.vocabulary_of(lane.model, tokenizer)
            horizon = facts.setdefault("horizon", train.steps)
            parts = (model, lane.optim, lane.train, lora, mesh, texts, tokenizer, horizon)
            each = opened.enter_context(Own(lane.name, out, tokens_in, began))
            keep = max(train.keep, 2)  # saved one after the other, they have a step in common
            saved = Checkpoints(lane.folder.checkpoints_path, keep=keep, warn=out.say)
            opened.enter_context(saved)
            ended = (diverged or {}).get(lane.name)
            running.append(Running(lane, facts, Trainer(*parts), saved, each, diverged=ended))
            said.append((parts, list(texts.lines(tokenizer))))
        parts, lines = said[0]
        for line in lines:
            out.say(line)
        out.each = [one.out for one in running]
        trainer = LaneTrainer(running, parts, values, on_diverged, out.say)
        _train(trainer, running, mesh, signals, out)


def _train(
    trainer: LaneTrainer, running: Sequence[Running], mesh: Mesh, signals: Signals, out: Together
) -> None:
    train, stop = trainer.train, Stop(mesh, signals)
    start = trainer.saved()
    scored = trainer.tokens.scored
    owed = [each for each in trainer.alive if scored and is_owed(each.lane.folder, start, train)]
    if start >= train.steps and not owed:
        out.say(f"all lanes are finished at step {start}; nothing is done")
        return
    state = trainer.stacked(start)
    params_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    running[0].lane.folder.require_space(6 * params_bytes, 100 * len(running))
    for each in trainer.alive:
        note_session(each.lane.folder, each.facts, start)
        metrics = MetricsWriter(each.lane.folder.metrics_path, resume_step=start or -1)
        each.out.start(start, metrics)
    out.start(start, None)
    if start:
        out.say(f"going on from step {start}")
    trainer.score(owed, start, state, stop)
    with Profile(None, running[0].lane.folder.path) as profile:
        trainer.run(state, start, running[0].checkpoints, out, stop, (), profile)
    stop.check(f"after step {train.steps}, which is saved", stop.now())
