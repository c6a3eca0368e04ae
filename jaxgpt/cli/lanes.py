# SPDX-License-Identifier: Apache-2.0
"""`train.py --seeds 8 --lanes.optim.lr=1e-3,2e-3`: many runs in one step, each in its folder."""

import argparse
import contextlib
import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxgpt.boxes.base import Box
from jaxgpt.cli.command import emit, start_jax
from jaxgpt.cli.train import DEFAULT, NAMES, preset_run, settle, stored_run
from jaxgpt.config import RunConfig, differences, resolve, to_yaml
from jaxgpt.configlib import options_in, short_name
from jaxgpt.errors import ConfigError
from jaxgpt.study.lanes import SEEDS, LaneNotes, read_lanes, read_notes, summary
from jaxgpt.train.config import MeshConfig
from jaxgpt.train.report import process_age_s
from jaxgpt.train.runfolder import RunFolder, open_run, run_path
from jaxgpt.train.stepfolder import step_folders

PREFIX = "lanes."
MAY_DIFFER = "train.seed, train.batch_seed, model.init and its fields, and numbers of optim.* and "
MAY_DIFFER += "train.* such as optim.lr, optim.weight_decay and optim.method.beta2"


def asks_for_lanes(options: argparse.Namespace, rest: Sequence[str]) -> bool:
    """Whether a command line of train.py is for lanes, also by the name of a folder of them."""
    if options.seeds is not None or any(word.startswith(f"--{PREFIX}") for word in rest):
        return True
    return options.run is not None and read_notes(run_path(options.run)) is not None


def train_lanes(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Train lanes, or go on with them.

    Args:
      options: Of train.py.
      rest: The words that are none of its options: names with values.

    Raises:
      ConfigError: Something differs that cannot, or an option is for single runs.
    """
    name, runs, values = _planned(options, rest)
    numbers = traced_numbers(list(runs.values()))
    if options.print_config:
        emit("".join(f"# {lane}\n{to_yaml(run)}" for lane, run in runs.items()))
        return
    top = open_run(run_path(name))
    if top.config_path.exists():
        raise ConfigError("a run is there", where=str(top.path), fix="--run=ANOTHER_NAME")
    start_jax(options.device, heavy=True)
    _fit(top, runs, LaneNotes(values), numbers)
    from jaxgpt.study.curveplots import draw_lanes
    from jaxgpt.study.runs import unfailing

    show = unfailing("picture of the lanes", lambda: f"drew {draw_lanes(top.path)}")
    emit("".join(f"{line}\n" for line in (*summary(read_lanes(top.path)), show())))


def _fit(
    top: RunFolder,
    runs: Mapping[str, RunConfig],
    notes: LaneNotes,
    numbers: Mapping[str, Sequence[float]],
) -> None:
    from jaxgpt.train.lanes import Lane, fit_lanes

    with contextlib.ExitStack() as locks:
        locks.enter_context(top.lock())
        old = read_notes(top.path)
        if old is not None and any(_has_steps(top, name) for name in old.lanes):
            if list(old.lanes) != list(notes.lanes):
                raise ConfigError(
                    f"the lanes there are {', '.join(old.lanes)}",
                    where=str(top.path),
                    fix="--run=ANOTHER_NAME",
                )
            notes = old
        lanes = []
        for name, run in runs.items():
            folder = open_run(top.path / name)
            locks.enter_context(folder.lock())
            settle(folder, run)
            lanes.append(Lane(folder, run.model, run.data, run.optim, run.train))
        notes.write(top.path)
        diverged = dict(notes.diverged)

        def on_diverged(name: str, step: int) -> None:
            diverged[name] = step
            LaneNotes(notes.lanes, diverged).write(top.path)

        began = time.monotonic() - process_age_s()
        lora = next(iter(runs.values())).lora
        more: Any = {"lora": lora, "began": began, "on_diverged": on_diverged}
        fit_lanes(lanes, numbers, diverged=notes.diverged, **more)


def _has_steps(top: RunFolder, name: str) -> bool:
    return bool(step_folders(RunFolder(top.path / name).checkpoints_path))


def _planned(
    options: argparse.Namespace, rest: Sequence[str]
) -> tuple[str, dict[str, RunConfig], dict[str, dict[str, Any]]]:
    """The folder's name, the run of each lane, and what it has of what differs."""
    base = options.preset or ("run" if options.config else DEFAULT)
    name = options.run or f"{base}-lanes"
    words = list(options_in(rest))
    others = [f"--{key}" if text is None else f"--{key}={text}" for key, text in words]
    others = [word for word in others if not word.startswith(f"--{PREFIX}")]
    axes = {k.removeprefix(PREFIX): t for k, t in words if k.startswith(PREFIX)}
    notes = read_notes(run_path(name))
    if options.seeds is None and not axes and notes is not None:
        runs = {}
        for lane in notes.lanes:
            stored = stored_run(RunFolder(run_path(name) / lane)) or RunConfig()
            runs[lane] = resolve(stored, options.config, others, known=NAMES)
        _check_single(options, list(runs.values()))
        return name, runs, {lane: dict(each) for lane, each in notes.lanes.items()}
    recipe = RunConfig() if options.config and not options.preset else preset_run(base)
    run = resolve(recipe, options.config, others, known=NAMES)
    choices = {key: _split(key, text) for key, text in axes.items()}
    if options.seeds is not None:
        if options.seeds < 1 or "train.seed" in choices:
            fix = "--seeds=8, or --lanes.train.seed=0,1,2"
            raise ConfigError(f"--seeds={options.seeds} with {list(choices)}", fix=fix)
        choices["train.seed"] = [str(run.train.seed + i) for i in range(options.seeds)]
    runs, values = {}, {}
    for chosen in itertools.product(*choices.values()):
        own = [f"--{key}={text}" for key, text in zip(choices, chosen, strict=True)]
        lane = resolve(run, (), own, known=NAMES)
        has = {key: _plain(value_at(lane, key)) for key in choices}
        title = "-".join(_titles(has))
        if title in runs:
            raise ConfigError(f"two lanes are {title}", fix="each value once")
        runs[title], values[title] = lane, has
    _check_single(options, list(runs.values()))
    return name, runs, values


def _check_single(options: argparse.Namespace, runs: Sequence[RunConfig]) -> None:
    """Refuse what only a single run can do."""
    show = runs[0].show
    odd = {
        "--init-from": options.init_from or runs[0].init_from,
        "--profile": options.profile,
        "--distributed": options.distributed == "on",
        "--compare": options.compare is not None or show.compare,
        "--mesh": runs[0].mesh != MeshConfig(),
        "--show.tensorboard": show.tensorboard,
        "--show.wandb": show.wandb,
    }
    for name, asked in odd.items():
        if asked:
            raise ConfigError(f"{name} is not for lanes", fix="a single run, without --seeds")


def traced_numbers(runs: Sequence[RunConfig]) -> dict[str, list[float]]:
    """The numbers of the step that differ between lanes, by dotted name, with each lane's.

    Raises:
      ConfigError: Something else differs.
    """
    keys = [d.partition(":")[0] for run in runs[1:] for d in differences(runs[0], run)]
    numbers = {}
    for key in dict.fromkeys(keys):
        if key in SEEDS or key == "model.init" or key.startswith("model.init."):
            continue  # of the start, or of batches: the step does not know it
        values = [value_at(run, key) for run in runs]
        if not key.startswith(("optim.", "train.")) or {type(v) for v in values} != {float}:
            raise ConfigError(f"{key} cannot differ between lanes", fix=MAY_DIFFER)
        numbers[key] = values
    return numbers


def value_at(run: RunConfig, key: str) -> Any:
    """The value of a dotted name."""
    value: Any = run
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _plain(value: Any) -> Any:
    return short_name(type(value)) if isinstance(value, Box) else value


def _split(key: str, text: str | None) -> list[str]:
    values = [value.strip() for value in (text or "").strip("[]").split(",")]
    if not all(values):
        raise ConfigError(f"--lanes.{key}={text or ''} has no values", fix="as 1e-3,2e-3,4e-3")
    return values


def _titles(values: Mapping[str, Any]) -> Iterator[str]:
    """What the name of a lane's folder is made of: `lr0.001`, `seed3`, `residual_zero`."""
    short = {key: key.rpartition(".")[2] for key in values}
    for key, value in values.items():
        name = short[key] if list(short.values()).count(short[key]) == 1 else key
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{name}{value:g}" if isinstance(value, float) else f"{name}{value}"
        else:
            yield re.sub(r"[^\w.-]", "_", f"{name}_{value}")
