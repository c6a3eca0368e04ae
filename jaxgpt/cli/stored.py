# SPDX-License-Identifier: Apache-2.0
"""A run as the commands see it that only read it: its configuration and its parameters.

Left out: its tokenizer and data (`jaxgpt.train.rundata`).
"""

import functools
from pathlib import Path

from jaxgpt.cli.command import note
from jaxgpt.cli.train import stored_run
from jaxgpt.config import RunConfig
from jaxgpt.errors import CheckpointError, ConfigError
from jaxgpt.model import ModelConfig, init_params
from jaxgpt.shapes import Params
from jaxgpt.study.lanes import read_notes
from jaxgpt.train.config import LoraConfig
from jaxgpt.train.runfolder import RunFolder, newest_run, run_path

_NO_LORA = LoraConfig()


def find_run(name: str | None) -> tuple[RunFolder, RunConfig]:
    """A run and its configuration; None: the newest with a checkpoint.

    Raises:
      ConfigError: No possible name, or a damaged configuration.
      CheckpointError: There is no such run.
    """
    folder = RunFolder(newest_run() if name is None else run_path(name))
    run = stored_run(folder)
    if run is None and (notes := read_notes(folder.path)) is not None:
        lane = next(iter(notes.lanes), "LANE")
        what = f"a folder of lanes, {', '.join(notes.lanes)}"
        raise ConfigError(what, where=str(folder.path), fix=f"one of them: {folder.path / lane}")
    if run is None:
        runs = sorted(path.parent.name for path in Path("runs").glob("*/config.yaml"))
        fix = f"--run with one of {', '.join(runs)}" if runs else "python train.py"
        raise CheckpointError("no run there: no config.yaml", where=str(folder.path), fix=fix)
    return folder, run


def check_average(run: RunConfig) -> None:
    """Raise `ConfigError` where a run keeps no moving average."""
    if run.train.ema_decay is None:
        raise ConfigError(
            "--ema is for a run that keeps a moving average of its weights, and this one does not",
            fix="no --ema, or a run trained with --train.ema_decay=0.999",
        )


def load_params(
    folder: RunFolder,
    model: ModelConfig,
    which: str,
    lora: LoraConfig = _NO_LORA,
    ema: bool = False,
    *,
    merge: bool = True,
) -> Params:
    """The verified parameters of a checkpoint, on the first device.

    Args:
      folder: The run.
      model: Its model, the vocabulary known.
      which: `latest`, `best`, or a step.
      lora: Its adapters.
      ema: The moving average instead, of a run that keeps one.
      merge: Merge adapters; else they stay beside the model's parameters.

    Raises:
      ConfigError: `which` is none of these.
      CheckpointError: No such checkpoint, or not a sound one.
    """
    import jax

    from jaxgpt.train.checkpoint import Checkpoints
    from jaxgpt.train.lora import init_lora, merged, split

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(
        lambda key: init_lora(init_params(model, key), lora, key), jax.random.key(0)
    )
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
    )
    warn = lambda line: note(f"warning: {line}")  # noqa: E731
    with Checkpoints(folder.checkpoints_path, read_only=True, warn=warn) as checkpoints:
        if which == "latest":
            step = None
        elif which == "best":
            step = checkpoints.best_step()
            if step is None:
                where = str(folder.checkpoints_path)
                raise CheckpointError("no checkpoint has a validation loss", where=where)
        elif which.isdecimal():
            step = int(which)
        else:
            raise ConfigError(f"--checkpoint {which!r}", fix="latest, best or the number of a step")
        average = split(abstract, lora)[0] if ema else None
        found = checkpoints.restore_params(abstract, average, step=step)
    params = {**found.params, **(found.ema or {})}
    return jax.jit(functools.partial(merged, cfg=lora))(params) if lora.rank and merge else params
