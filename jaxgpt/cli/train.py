# SPDX-License-Identifier: Apache-2.0
"""The train command: argv to a configuration and a run folder, then `jaxgpt.train.loop.fit`."""

import argparse
import contextlib
import dataclasses
import difflib
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxgpt.cli.command import Parser, emit, run_command, start_jax
from jaxgpt.cli.help import long_help, short_help
from jaxgpt.config import FREE, RunConfig, differences, from_yaml, resolve, said_in, to_yaml
from jaxgpt.errors import ConfigError
from jaxgpt.presets import RUNS
from jaxgpt.presets.runs import finetune
from jaxgpt.train import joining, processes
from jaxgpt.train.files import write_atomic
from jaxgpt.train.profiling import profiled_steps
from jaxgpt.train.report import process_age_s
from jaxgpt.train.runfolder import RunFolder, open_run, run_path
from jaxgpt.train.stepfolder import step_folders

if TYPE_CHECKING:
    from jaxgpt.cli.origin import Origin

DEFAULT, FINETUNE = "tiny", "finetune"
NAMES = (
    *("preset", "config", "init-from", "run", "device", "distributed", "profile"),
    *("seeds", "compare"),
    *("print_config", "help", "help-all"),
)


def train_main(argv: Sequence[str] | None = None) -> int:
    """`python train.py`: train, or go on with, a run.

    Args:
      argv: Words after the command's name; None: those of this process.

    Returns:
      The exit code; see `jaxgpt.errors`.
    """
    try:
        code = run_command(lambda: _train(sys.argv[1:] if argv is None else list(argv)))
    except Exception:
        if not processes.several():
            raise
        traceback.print_exc()
        code = 1
    return joining.end(code)


def _train(argv: list[str]) -> None:
    options, rest = _parser().parse_known_args(argv)
    if options.help or options.help_all:
        show = long_help if options.help_all else short_help
        preset = options.preset or DEFAULT
        emit(show(preset_run(preset), preset, RUNS))
        return
    from jaxgpt.cli.lanes import asks_for_lanes, train_lanes  # which imports from here

    if asks_for_lanes(options, rest):
        train_lanes(options, rest)
        return
    profile = None if options.profile is None else profiled_steps(options.profile)
    name, run, origin = _resolve(options, rest)
    if options.print_config:
        emit(to_yaml(run))
        return
    joining.join(options.distributed or "auto")
    with joining.one_run():
        joining.check_same(to_yaml(run), lambda text: differences(from_yaml(text), run))
        path = run_path(name)
        folder = open_run(path) if processes.leads() else RunFolder(path)
        start_jax(options.device, heavy=True)
        _fit(folder, run, origin, profile)


def _fit(
    folder: RunFolder, run: RunConfig, origin: "Origin | None", profile: tuple[int, int] | None
) -> None:
    leads, data, weights = processes.leads(), run.data, None
    if origin is not None:
        origin.check(run.model)
        data, weights = origin.data(data), origin.weights(run.model)
    with folder.lock() if leads else contextlib.nullcontext():
        if processes.several():
            joining.check_shared(folder)
        if leads:
            settle(folder, run)
            if origin is not None:
                origin.write_down(folder)
        from jaxgpt.cli.show import shown
        from jaxgpt.train.loop import fit

        with shown(folder, run if leads else without_loggers(run)) as shows:
            begin = {"lora": run.lora, "mesh": run.mesh, "weights": weights}
            more = {"profile": profile, "began": time.monotonic() - process_age_s()}
            fit(folder, run.model, data, run.optim, run.train, **begin, **more, **shows)
        processes.meet("done")


def without_loggers(run: RunConfig) -> RunConfig:
    """For a process that writes no records."""
    show = dataclasses.replace(run.show, tensorboard=False, wandb=None, compare=None)
    return dataclasses.replace(run, show=show)


def _parser() -> Parser:
    parser = Parser()
    parser.add_argument("--preset")
    parser.add_argument("--config", action="append", type=Path, default=[])
    parser.add_argument("--init-from", "--init_from")
    parser.add_argument("--run")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--compare", nargs="?", const="")
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"))
    parser.add_argument("--distributed", choices=("auto", "on", "off"), nargs="?", const="on")
    parser.add_argument("--profile")
    parser.add_argument("--print_config", "--print-config", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--help-all", "--help_all", action="store_true")
    return parser


def preset_run(name: str) -> RunConfig:
    """The recipe of that name.

    Raises:
      ConfigError: There is none.
    """
    if name not in RUNS:
        near = difflib.get_close_matches(name, RUNS, n=1)
        fix = f"did you mean --preset={near[0]}?" if near else f"one of {', '.join(RUNS)}"
        raise ConfigError(f"no preset {name!r}", fix=fix)
    return RUNS[name]()


def _resolve(
    options: argparse.Namespace, rest: list[str]
) -> "tuple[str, RunConfig, Origin | None]":
    """Name and configuration of the run, and the model that it is about to begin with, if any."""
    init_from = options.init_from
    if init_from is not None:
        rest = [*rest, f"--init_from={init_from}"]
    elif (said := said_in(options.config, "init_from")) is not None:
        init_from = str(said)
    if options.compare is not None:
        rest = [*rest, f"--show.compare={options.compare or options.preset or DEFAULT}"]
    name = options.preset or ("run" if options.config else DEFAULT)
    name = name if init_from is None else FINETUNE
    name = name if options.run is None else options.run
    folder = RunFolder(run_path(name))
    stored = stored_run(folder)
    began = stored is not None and bool(step_folders(folder.checkpoints_path))
    recipe = preset_run(options.preset) if options.preset else None
    origin = None
    if init_from is None:
        base = recipe or (RunConfig() if options.config else stored) or preset_run(DEFAULT)
    elif stored is not None and began:
        base = finetune(init_from, stored.model, recipe)
    else:
        origin = _origin(init_from, folder)
        base = finetune(init_from, origin.model(), recipe)
    run = resolve(base, options.config, rest, known=NAMES)
    if origin is None and run.init_from is not None and not began:  # a start that did not come far
        origin = _origin(run.init_from, folder)
    return name, run, origin


def _origin(name: str, folder: RunFolder) -> "Origin":
    from jaxgpt.cli.origin import Origin  # slow to import

    return Origin.find(name, folder)


def stored_run(folder: RunFolder) -> RunConfig | None:
    """The configuration that a run folder was started with; None if it has none.

    Raises:
      ConfigError: The file cannot be read, or is no configuration.
    """
    try:
        text = folder.config_path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read {folder.config_path}: {error}") from error
    return from_yaml(text, where=str(folder.config_path))


def settle(folder: RunFolder, run: RunConfig) -> None:
    """Write the configuration of a new run, or see that a started run has the same.

    `config.yaml` stays as the run was first started, also where `FREE` keys change later. A run
    without a checkpoint has nothing to lose and may be given other values.

    Args:
      folder: The run's folder, locked.
      run: What was asked for.

    Raises:
      ConfigError: The run was started with other values; they are listed.
    """
    old = stored_run(folder) if folder.config_path.exists() else None
    if old is not None and step_folders(folder.checkpoints_path):
        changed = [d for d in differences(old, run) if d.partition(":")[0] not in FREE]
        if changed:
            raise ConfigError(
                f"the run was started with other values: {', '.join(changed)}",
                where=str(folder.path),
                fix="--run=ANOTHER_NAME",
            )
        return
    if old is not None and old != run:  # what was made for the other values
        folder.tokenizer_path.unlink(missing_ok=True)
        folder.facts_path.unlink(missing_ok=True)
    write_atomic(folder.config_path, to_yaml(run))
