# SPDX-License-Identifier: Apache-2.0
"""The evaluate command: how good a model is, on texts of one's own and on the known tasks."""

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.command import Parser, emit, interrupt_ends, note, run_command, start_jax
from jaxgpt.cli.sources import Source, named_source
from jaxgpt.errors import ConfigError, JaxgptError, ResourceError
from jaxgpt.train.files import write_atomic

if TYPE_CHECKING:
    from jaxgpt.study.evaluation import Result

HELP = """\
usage: jaxgpt evaluate RUN_OR_MODEL [--data FILE ...] [--tasks NAME ...] [options]

Scores texts by perplexity, bits per byte and bits per character, and the tasks of the GPT-2 paper
and HellaSwag by accuracy or perplexity. See docs/evaluation.md for what the numbers mean.

  RUN_OR_MODEL                a run below runs/, a Hugging Face folder, OWNER/NAME of its hub, or a
                              short name such as gpt2
  --data FILE ...             a text; a .jsonl or .parquet with a document in each row (column
                              text); a folder of texts, or one that jaxgpt prepare made
  --tasks NAME ...            lambada, hellaswag, wikitext2, wikitext103, ptb, 1bw, cbt-cn, cbt-ne,
                              of the hub; or enwik8, text8. NAME=FILE takes a local file

  --context N                 tokens of a window of a text (default: the model's, at most 2048)
  --stride N                  from one window to the next (default: as --context, no overlap)
  --limit N                   only the first N questions, documents, or lines of one text
  --batch-size N              rows side by side (default: as many as have 4,096 tokens on a CPU,
                              65,536 elsewhere)
  --dtype float32|bfloat16    of computation (default: float32)
  --out FILE                  write everything as JSON there
  --examples                  with --out: what the model thinks of each question, too
  --device cpu|gpu|tpu        the best there is by default
  --help                      this

  jaxgpt evaluate gpt2 --tasks lambada hellaswag wikitext2 --limit 500 --out results.json
"""
LESS_MEMORY = "lower --batch-size or --context, or --dtype=bfloat16"
SAY_S = 30  # seconds between two lines of progress


def evaluate_main(argv: Sequence[str]) -> int:
    """`jaxgpt evaluate`: score a model.

    Args:
      argv: Words after the command's name.

    Returns:
      The exit code; see `jaxgpt.errors`. Not 0 if a text or a task could not be scored; the others
      are all the same.
    """
    with interrupt_ends():
        return run_command(lambda: _evaluate(list(argv)), less_memory=LESS_MEMORY)


def _evaluate(argv: list[str]) -> None:
    options = _parser().parse_args(argv)
    if options.help:
        emit(HELP)
        return
    _check(options)
    source = named_source(options.model, options.dtype)
    start_jax(options.device, heavy=True)
    _check_windows(options, source)
    params = source.params()
    how = {name: getattr(options, name) for name in ("batch_size", "dtype", "context", "stride")}
    results: list[dict[str, Any]] = []
    failed: list[JaxgptError] = []
    for name, score in _work(options, source, params, how):
        began = time.perf_counter()
        try:
            found = score(_Progress(name))
        except (ConfigError, ResourceError) as error:  # of the data: the others go on
            fix = error.fix and error.fix.replace("--data.path=", "--data ")
            failed.append(type(error)(f"{name} not scored: {error.what}", fix=fix))
            continue
        results.append(_entry(found, time.perf_counter() - began, options.examples))
    if results:
        record = _record(options, source, params, results, failed)
        emit(_table(record))
        if options.out is not None:
            write_atomic(options.out, json.dumps(_finite(record), indent=1) + "\n")
    for error in failed[:-1]:
        note(f"error: {error}")
    if failed:
        raise failed[-1]


Scoring = Callable[["_Progress"], "Result"]


def _work(
    options: argparse.Namespace, source: Source, params: Any, how: dict[str, Any]
) -> list[tuple[str, Scoring]]:
    """What is to be scored: names, and functions that do it."""
    from jaxgpt.study.evaluation import run_task, score_data

    model = source.model, params, source.tokenizer

    def data(path: str) -> Scoring:
        return lambda say: score_data(path, *model, limit=options.limit, progress=say, **how)

    def task(name: str, file: str | None) -> Scoring:
        return lambda say: run_task(
            name, *model, file=file, limit=options.limit, progress=say, **how
        )

    texts = [(path, data(path)) for path in options.data]
    return texts + [(name, task(name, file)) for name, file in _tasks(options)]


def _tasks(options: argparse.Namespace) -> list[tuple[str, str | None]]:
    """Names and files of --tasks."""
    pairs = [word.partition("=") for word in options.tasks]
    return [(name, file if eq else None) for name, eq, file in pairs]


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError for what can be seen to be wrong before anything is read."""
    from jaxgpt.configlib import unknown
    from jaxgpt.study.evaluation import TASKS

    if not options.model:
        raise ConfigError("no model", fix="jaxgpt evaluate RUN_OR_MODEL --data FILE")
    if not options.data and not options.tasks:
        raise ConfigError("nothing to score", fix="--data FILE, or --tasks lambada")
    for name in ("limit", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}={value} must be at least 1")
    for name, _ in _tasks(options):
        if name not in TASKS:
            raise unknown(name, list(TASKS))
    if options.examples and options.out is None:
        raise ConfigError("--examples is for what --out writes", fix="--out FILE")


def _check_windows(options: argparse.Namespace, source: Source) -> None:
    from jaxgpt.study.evaluation.texts import window_size
    from jaxgpt.study.evaluation.windows import windows

    options.context = window_size(source.model, options.context)
    options.stride = options.context if options.stride is None else options.stride
    windows(1, options.context, options.stride)


class _Progress:
    """A line on stderr now and then."""

    def __init__(self, name: str):
        self._name, self._said = name, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """So much is done."""
        if time.monotonic() - self._said > SAY_S:
            self._said = time.monotonic()
            note(f"{self._name}: {done:,} of {total:,} rows")


def _entry(found: "Result", wall_s: float, examples: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": found.name, "scored": found.n, "unit": found.unit}
    entry["metrics"] = {key: dict(each._asdict()) for key, each in found.metrics.items()}
    entry |= {"data": dict(found.data), "wall_s": round(wall_s, 2)}
    if examples and found.answers:
        entry["examples"] = [vars(answer) for answer in found.answers]
    return entry


def _record(
    options: argparse.Namespace,
    source: Source,
    params: Any,
    results: list[dict[str, Any]],
    failed: list[JaxgptError],
) -> dict[str, Any]:
    """Everything that a result depends on, and the results."""
    from jaxgpt import __version__
    from jaxgpt.flops import count_params
    from jaxgpt.study.machine import describe
    from jaxgpt.train.digest import digest

    lines = "\n".join(f"{path} {value}" for path, value in sorted(digest(params).items()))
    names = ("context", "stride", "limit", "batch_size", "dtype")
    return {
        "model": options.model,
        "parameters": sum(count_params(source.model).values()),
        "parameters_digest": hashlib.sha256(lines.encode()).hexdigest()[:16],
        "tokenizer": source.tokenizer.fingerprint,
        "settings": {name: getattr(options, name) for name in names},
        "jaxgpt": __version__,
        "machine": describe(),
        "results": results,
        "failed": [str(error) for error in failed],
    }


def _table(record: dict[str, Any]) -> str:
    """The results, for people."""
    how = record["settings"]
    lines = [
        f"{record['model']}: {record['parameters']:,} parameters "
        f"({record['parameters_digest']}), {how['dtype']}, windows of {how['context']} tokens "
        f"every {how['stride']}",
        "",
        f"{'':16} {'':17} {'value':>10}   {'std. error':>10}   scored",
    ]
    for entry in record["results"]:
        name = entry["name"] if len(entry["name"]) <= 16 else "..." + entry["name"][-13:]
        scored = f"{entry['scored']:,} {entry['unit']}"
        if alone := entry["data"].get("unscored_tokens"):
            scored += f", {alone:,} with nothing before them not"
        for metric, each in entry["metrics"].items():
            error = "" if each["stderr"] is None else f"{each['stderr']:.4g}"
            label = metric.replace("_", " ")
            lines.append(f"{name:16} {label:17} {each['value']:>10.4f}   {error:>10}   {scored}")
            name = scored = ""
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parser() -> Parser:
    parser = Parser()
    parser.add_argument("model", nargs="?", metavar="RUN_OR_MODEL")
    parser.add_argument("--data", nargs="+", default=[])
    parser.add_argument("--tasks", nargs="+", default=[])
    for name in ("context", "stride", "limit", "batch-size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--examples", action="store_true")
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"))
    parser.add_argument("--help", "-h", action="store_true")
    return parser
