# SPDX-License-Identifier: Apache-2.0
"""The plan command: what a run will take on some devices, before it is paid for."""

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxgpt.cli.command import Parser, emit, interrupt_ends, run_command, start_jax
from jaxgpt.cli.named import known_vocabulary, named_run
from jaxgpt.config import RunConfig, resolve
from jaxgpt.configlib import options_in
from jaxgpt.errors import ConfigError
from jaxgpt.presets import RUNS

if TYPE_CHECKING:
    from jaxgpt.study.planning.chips import Chip
    from jaxgpt.study.planning.setting import Setting
    from jaxgpt.study.planning.timing import Efficiency

HELP = """\
usage: jaxgpt plan [--preset NAME | --model FOLDER] [--device NAME] [options]

Says what a run will take on devices that need not be there: memory of a device by kind, the
largest batch that fits, the time of a step, days and cost. Nothing is allocated. The formulas, and
how far they were off where they were measured: docs/planning.md.

  --preset NAME               a recipe of train.py or an architecture such as gpt3-175b (`jaxgpt
                              params` has all names; default: tiny)
  --model FOLDER              a Hugging Face folder instead
  --NAME=VALUE ...            any option of train.py: --mesh.fsdp=64 --mesh.tensor=8
                              --train.batch_size=512 --train.remat=full --model.n_layers=8
  --device NAME               v100, a100-40, a100-80, h100 (default), h200, b200, rtx-4090, tpu-v4,
                              tpu-v5e, tpu-v5p, tpu-v6e; cpu: this machine, measured now
  --memory-gib X              of a device, instead of what its maker says
  --reserve SHARE             of it, left alone (default: 0.1)
  --efficiency SHARE          of the rate of large products that a step reaches (default: 0.74)
  --tokens N                  to train on: days
  --price X                   of a device for an hour: cost
  --decode BATCH CONTEXT      plan decoding instead: rows, and tokens of each
  --weights int8|int4         in which decoding keeps the weights (default: as --train.dtype)
  --compile                   compile the real step too, for fake CPU devices: what XLA takes
  --json                      print JSON instead of the table
  --help                      this

Without --train.batch_size an architecture gets the largest batch that fits, and bfloat16.

  jaxgpt plan --preset gpt3-175b --mesh.fsdp=64 --mesh.tensor=8 --train.remat=full \\
    --train.scan=true --tokens 300e9 --price 2.5
"""
NAMES = (
    *("preset", "model", "device", "memory-gib", "reserve", "efficiency", "tokens", "price"),
    *("decode", "weights", "compile", "json", "help"),
)
GIB = 2.0**30


def plan_main(argv: Sequence[str]) -> int:
    """`jaxgpt plan`: plan a run.

    Args:
      argv: Words after the command's name.

    Returns:
      The exit code; see `jaxgpt.errors`.
    """
    with interrupt_ends():
        return run_command(lambda: _plan(list(argv)), less_memory="a smaller model")


def _plan(argv: list[str]) -> None:
    options, rest = _parser().parse_known_args(argv)
    if options.help:
        emit(HELP)
        return
    for name in ("memory_gib", "efficiency", "tokens", "price"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')}={value} must be above 0")
    if not 0 <= options.reserve < 1:
        raise ConfigError(f"--reserve={options.reserve} must be in [0, 1)")
    run, name = _run(options, rest)
    start_jax("cpu")
    from jaxgpt.study.planning.setting import Setting  # here as below: slow to import
    from jaxgpt.study.planning.timing import EFFICIENCY

    chip = _chip(options.device, run.train.dtype)
    setting = Setting(
        *(run.model, run.optim, run.train, run.mesh, chip, run.lora),
        packed=run.data.mask_documents,
    )
    efficiency = EFFICIENCY[chip.platform]
    if options.efficiency is not None:
        efficiency = dataclasses.replace(efficiency, products=options.efficiency)
    if options.decode:
        emit(_decode(options, setting, name, efficiency))
        return
    if "train.batch_size" not in dict(options_in(rest)) and name not in RUNS:
        setting = _largest(options, setting)
    emit(_train(options, run, setting, name, efficiency))


def _train(
    options: argparse.Namespace,
    run: RunConfig,
    setting: "Setting",
    name: str,
    efficiency: "Efficiency",
) -> str:
    from jaxgpt.study.planning.plan import make_plan
    from jaxgpt.study.planning.table import compiled_text, plan_text, record

    plan = make_plan(
        setting,
        memory_bytes=options.memory_gib and options.memory_gib * GIB,
        reserve=options.reserve,
        efficiency=efficiency,
        tokens=options.tokens,
        price=options.price,
    )
    text, data = plan_text(plan, name, efficiency, options.reserve), record(plan)
    if options.compile:
        from jaxgpt.cli.rehearsal import rehearse

        mesh = dataclasses.replace(run.mesh, data=setting.sizes["data"])
        found = rehearse(dataclasses.replace(run, train=setting.train, mesh=mesh), setting.devices)
        text += "\n" + compiled_text(found, plan.memory)
        data["compiled"] = {**dataclasses.asdict(found), "bytes": found.bytes}
    return json.dumps(data, indent=1) + "\n" if options.json else text


def _decode(
    options: argparse.Namespace, setting: "Setting", name: str, efficiency: "Efficiency"
) -> str:
    from jaxgpt.study.planning.memory import decode_memory
    from jaxgpt.study.planning.state import state_of
    from jaxgpt.study.planning.table import decode_text
    from jaxgpt.study.planning.timing import decode_time

    batch, context = options.decode
    if min(batch, context) < 1:
        raise ConfigError(f"--decode {batch} {context}: both must be at least 1")
    memory = decode_memory(setting, state_of(setting), batch, context, options.weights)
    step = decode_time(setting, batch, context, options.weights, efficiency)
    available = _available(options, setting)
    if options.json:
        data = {"memory_bytes": {**memory.kinds, "all": memory.bytes}, "available_bytes": available}
        data |= {"step_s": step.seconds, "tokens_per_s": step.tokens_per_s, "limit": step.limit}
        return json.dumps(data, indent=1) + "\n"
    return decode_text(setting, name, memory, available, step, context)


def _run(options: argparse.Namespace, rest: list[str]) -> tuple[RunConfig, str]:
    """The recipe or architecture with the options, and what it is called."""
    if options.preset and options.model:
        raise ConfigError("--preset and --model exclude each other")
    name = options.model or options.preset or "tiny"
    run = named_run(name)
    if name not in RUNS:
        run = dataclasses.replace(run, train=dataclasses.replace(run.train, dtype="bfloat16"))
    return known_vocabulary(resolve(run, (), rest, known=NAMES)), name


def _chip(name: str, dtype: str) -> "Chip":
    """The device of that name, or this machine."""
    from jaxgpt.study.planning.chips import chip, this_cpu

    if name != "cpu":
        return chip(name)
    from jaxgpt.study import machine

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return this_cpu(machine.measure_limits(dtype), float(memory))


def _available(options: argparse.Namespace, setting: "Setting") -> float:
    """Bytes of a device that may be used."""
    said = options.memory_gib and options.memory_gib * GIB
    return (said or setting.chip.memory_bytes) * (1 - options.reserve)


def _largest(options: argparse.Namespace, setting: "Setting") -> "Setting":
    """With the largest batch that fits, or one row on each device."""
    from jaxgpt.study.planning.plan import largest_rows
    from jaxgpt.study.planning.state import state_of

    found = largest_rows(setting, state_of(setting), _available(options, setting))
    return setting.at(max(1, found))


def _parser() -> Parser:
    parser = Parser()
    parser.add_argument("--preset")
    parser.add_argument("--model")
    parser.add_argument("--device", default="h100")
    for name in ("memory-gib", "efficiency", "tokens", "price"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--reserve", type=float, default=0.1)
    parser.add_argument("--decode", type=int, nargs=2, metavar=("BATCH", "CONTEXT"))
    parser.add_argument("--weights", choices=("int8", "int4"))
    for name in ("compile", "json"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    return parser
