# SPDX-License-Identifier: Apache-2.0
"""The command `jaxgpt` and its first words; what train.py and sample.py call is here too."""

import difflib
import sys
from collections.abc import Sequence

from jaxgpt.cli.bench import bench_main
from jaxgpt.cli.command import emit, run_command
from jaxgpt.cli.compare import compare_main
from jaxgpt.cli.evaluate import evaluate_main
from jaxgpt.cli.export import export_main
from jaxgpt.cli.numbers import flops_main, params_main
from jaxgpt.cli.plan import plan_main
from jaxgpt.cli.plot import plot_main
from jaxgpt.cli.prepare import prepare_main
from jaxgpt.cli.report import report_main
from jaxgpt.cli.sample import sample_main
from jaxgpt.cli.train import train_main
from jaxgpt.errors import ConfigError

__all__ = [
    "bench_main",
    "compare_main",
    "evaluate_main",
    "export_main",
    "flops_main",
    "main",
    "params_main",
    "plan_main",
    "plot_main",
    "prepare_main",
    "report_main",
    "sample_main",
    "train_main",
]

USAGE = """\
usage: jaxgpt train ...               train a model (train.py)
       jaxgpt sample ...              print text from a trained one (sample.py)
       jaxgpt prepare OUT ...         encode a text of any size into a folder of token files
       jaxgpt export RUN OUT ...      write a model as a folder that transformers loads
       jaxgpt plot ...                draw a run's losses and attention
       jaxgpt report ...              write one page of HTML about a run
       jaxgpt evaluate MODEL ...      score texts, and the tasks of the GPT-2 paper
       jaxgpt compare RUN RUN         by how much a run is better, and how sure that is
       jaxgpt bench WHAT ...          measure training, prefill or decoding on this machine
       jaxgpt plan ...                memory, time, days and cost of a run on devices by name
       jaxgpt params NAME [options]   count the parameters of a preset, a run or a Hugging Face
                                      folder, --model.name=value as in train
       jaxgpt flops NAME [options]    and its FLOPs and bytes of training, prefill and decoding
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
        "compare": compare_main,
        "report": report_main,
        "bench": bench_main,
        "evaluate": evaluate_main,
        "plan": plan_main,
        "params": params_main,
        "flops": flops_main,
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
