# SPDX-License-Identifier: Apache-2.0
"""The command `jaxgpt` and its first words; what train.py and sample.py call is here too."""

import difflib
import sys
from collections.abc import Sequence

from jaxgpt.cli.bench import bench_main
from jaxgpt.cli.command import emit, run_command
from jaxgpt.cli.export import export_main
from jaxgpt.cli.help import summary
from jaxgpt.cli.named import NAMES, named_run
from jaxgpt.cli.plot import plot_main
from jaxgpt.cli.prepare import prepare_main
from jaxgpt.cli.sample import sample_main
from jaxgpt.cli.train import train_main
from jaxgpt.config import resolve
from jaxgpt.errors import ConfigError
from jaxgpt.flops import count_active_params, count_params
from jaxgpt.presets import MODELS, RUNS

__all__ = [
    "bench_main",
    "export_main",
    "main",
    "params_main",
    "plot_main",
    "prepare_main",
    "sample_main",
    "train_main",
]

USAGE = """\
usage: jaxgpt train ...               train a model (train.py)
       jaxgpt sample ...              print text from a trained one (sample.py)
       jaxgpt prepare OUT ...         encode a text of any size into a folder of token files
       jaxgpt export RUN OUT ...      write a model as a folder that transformers loads
       jaxgpt plot ...                draw a run's losses and attention
       jaxgpt bench WHAT ...          measure training, prefill or decoding on this machine
       jaxgpt params NAME [options]   count the parameters of a preset or a Hugging Face folder,
                                      --model.name=value as in train
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `jaxgpt`.

    Args:
      argv: Words after the command's name; None: those of this process.

    Returns:
      The exit code; see `jaxgpt.errors`.
    """
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    commands = {
        "train": train_main,
        "sample": sample_main,
        "prepare": prepare_main,
        "export": export_main,
        "plot": plot_main,
        "bench": bench_main,
        "params": params_main,
    }
    if command in commands:
        return commands[command](rest)
    return run_command(lambda: _other(command, list(commands)))


def _other(command: str, commands: list[str]) -> None:
    if command in ("--help", "-h", "help"):
        emit(USAGE)
        return
    near = difflib.get_close_matches(command, commands, n=1)
    fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(commands)}"
    raise ConfigError(f"no command {command!r}", fix=fix)


def params_main(argv: Sequence[str]) -> int:
    """`jaxgpt params NAME`: the parameters of a model by box, and their exact number.

    Args:
      argv: A name of `MODELS` or `RUNS`, or a folder, then options as for train.

    Returns:
      The exit code.
    """
    return run_command(lambda: _params(list(argv)))


def _params(argv: list[str]) -> None:
    name, *options = argv or [""]
    if name in ("--help", "-h", ""):
        made = {**RUNS, **MODELS}
        emit(USAGE + "names:\n" + "".join(f"  {key:17} {summary(made[key])}\n" for key in NAMES))
        return
    base = named_run(name)
    cfg = resolve(base, (), options).model
    counts, active = count_params(cfg), count_active_params(cfg)
    total = sum(counts.values())
    lines = [f"{box:18} {n:>15,} {n / total:>7.1%}" for box, n in counts.items()]
    lines.append(f"{'total':18} {total:>15,}")
    if active < total:
        lines.append(f"{'used by one token':18} {active:>15,} {active / total:>7.1%}")
    emit("\n".join(lines) + "\n")
