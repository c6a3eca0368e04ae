# SPDX-License-Identifier: Apache-2.0
"""The bench command: how fast a model trains, reads and writes here, and how much is left."""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.command import Parser, emit, interrupt_ends, run_command, start_jax
from jaxgpt.cli.named import known_vocabulary, named_run
from jaxgpt.config import RunConfig, resolve
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig
from jaxgpt.sample.weights import STORED
from jaxgpt.train.files import write_atomic

if TYPE_CHECKING:
    from jaxgpt.costs import Cost
    from jaxgpt.study.bench import Timing

HELP = """\
usage: jaxgpt bench train|decode|prefill [--preset NAME | --model MODEL] [options]

Measures a model on this machine, on random tokens, and what the machine can do at most: products
of square matrices, and reading memory. See docs/speed.md for what the numbers mean.

  train                       optimizer steps, as the recipe says
  decode                      new tokens, one at a time behind a prompt
  prefill                     prompts, up to the first new token

  --preset NAME               a recipe of train.py (default: tiny)
  --model MODEL               a Hugging Face folder, with its weights; or an architecture such as
                              gpt2 (`jaxgpt params` has all names), with random ones
  --model.NAME=VALUE ...      any option of train.py: --model.n_layers=2 --train.dtype=bfloat16
  --batch-size N              rows (default: the recipe's to train, else 1)
  --prompt-tokens N           of each row, for decode and prefill (default: 128, at most half of
                              the context)
  --new-tokens N              of each row, for decode (default: 64)
  --dtype float32|bfloat16    of computation and caches (default: float32)
  --weights HOW               in which decode and prefill keep the weights: float32, bfloat16, int8
                              or int4 (default: as --dtype)
  --seconds X                 to measure for, once all is compiled (default: 10)
  --json FILE                 write everything that was measured there
  --device cpu|gpu|tpu        the best there is by default
  --help                      this
"""
LESS_MEMORY = "lower --batch-size or --model.context_length, or --dtype=bfloat16"
WHAT = ("train", "decode", "prefill")
NAMES = (
    *("preset", "model", "batch-size", "prompt-tokens", "new-tokens", "dtype", "weights"),
    *("seconds", "json", "device", "help"),
)


def bench_main(argv: Sequence[str]) -> int:
    """`jaxgpt bench`: measure a model.

    Args:
      argv: Words after the command's name.

    Returns:
      The exit code; see `jaxgpt.errors`.
    """
    with interrupt_ends():
        return run_command(lambda: _bench(list(argv)), less_memory=LESS_MEMORY)


def _bench(argv: list[str]) -> None:
    options, rest = _parser().parse_known_args(argv)
    if options.help or options.what is None:
        emit(HELP)
        return
    run, name = _run(options, rest)
    training = options.what == "train"
    if training and options.weights:
        raise ConfigError("--weights is for decode and prefill")
    start_jax(options.device, heavy=True)
    from jaxgpt.study import machine  # here as below: slow to import
    from jaxgpt.study.bench import compared

    began = time.perf_counter()
    timing, cost, said = (_train if training else _infer)(options, run)
    dtype = said["dtype"]
    limits = machine.measure_limits(dtype)
    record = {"what": options.what, "model": name, **said, "machine": machine.describe()}
    record["limits"] = dataclasses.asdict(limits)
    units = said["batch_size"] * said["tokens"]
    record["measured"] = compared(timing, cost, limits, units)
    record["wall_s"] = round(time.perf_counter() - began, 2)
    emit(_table(record))
    if options.json is not None:
        write_atomic(options.json, json.dumps(record, indent=1) + "\n")


def _train(options: argparse.Namespace, run: RunConfig) -> "tuple[Timing, Cost, dict[str, Any]]":
    from jaxgpt.costs import total, train_costs
    from jaxgpt.study.bench import Training, alternate

    rows = options.batch_size or run.train.batch_size
    train = dataclasses.replace(run.train, batch_size=rows, batch_sizes=None)
    steps = Training(run.model, run.optim, train)
    each = max(1, round(0.25 / steps.run(1)))
    timing = alternate({"": lambda: steps.run(each)}, seconds=options.seconds)[""]
    cost = total(train_costs(run.model, rows, dtype=train.dtype, causal=True))
    said = {"batch_size": rows, "tokens": run.model.context_length, "dtype": train.dtype}
    return timing, cost, said | {"compile_s": round(steps.compile_s, 2)}


def _infer(options: argparse.Namespace, run: RunConfig) -> "tuple[Timing, Cost, dict[str, Any]]":
    from jaxgpt.costs import decode_costs, prefill_costs, total
    from jaxgpt.sample.weights import for_decoding
    from jaxgpt.study.bench import Decoding, alternate, bytes_per_number

    cfg, rows = run.model, options.batch_size or 1
    prompt = options.prompt_tokens or min(128, cfg.context_length // 2)
    new = min(options.new_tokens, cfg.context_length - prompt)
    if new < 2:
        raise ConfigError(
            f"a prompt of {prompt} leaves no room for new tokens in {cfg.context_length}",
            fix=f"--prompt-tokens of at most {cfg.context_length - 2}",
        )
    params = for_decoding(cfg, _params(options, cfg), dtype=options.dtype, weights=options.weights)
    kind = {"dtype": options.dtype, "weights": bytes_per_number(cfg, params)}
    text = Decoding(cfg, params, batch=rows, prompt_tokens=prompt, dtype=options.dtype)
    began = time.perf_counter()
    said = {"batch_size": rows, "dtype": options.dtype, "prompt_tokens": prompt}
    said["weights"] = options.weights or options.dtype
    if options.what == "prefill":
        text.prefill()
        turn, tokens = text.prefill, prompt
        cost = total(prefill_costs(cfg, rows, prompt, **kind))
    else:
        text.decode(new)
        turn, tokens = lambda: text.decode(new)[1], 1
        cost = total(decode_costs(cfg, rows, prompt + new // 2, **kind))
        said["new_tokens"] = new
    said |= {"tokens": tokens, "compile_s": round(time.perf_counter() - began, 2)}
    return alternate({"": turn}, seconds=options.seconds)[""], cost, said


def _run(options: argparse.Namespace, rest: list[str]) -> tuple[RunConfig, str]:
    """The recipe, its vocabulary a number, and what it is called."""
    if options.preset and options.model:
        raise ConfigError("--preset and --model exclude each other")
    if options.what not in WHAT:
        raise ConfigError(f"cannot measure {options.what!r}", fix=f"one of {', '.join(WHAT)}")
    for name in ("batch_size", "prompt_tokens", "new_tokens", "seconds"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')}={value} must be above 0")
    name = options.model or options.preset or "tiny"
    run = resolve(named_run(name), (), rest, known=NAMES)
    if options.dtype is None:
        options.dtype = run.train.dtype
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, dtype=options.dtype))
    return known_vocabulary(run), name


def _params(options: argparse.Namespace, cfg: ModelConfig) -> Any:
    """A folder's weights, or random ones."""
    if options.model and Path(options.model).is_dir():
        from jaxgpt.interop.load import load

        return load(options.model).params
    from jaxgpt.study.bench import random_params

    return random_params(cfg)


def _table(record: dict[str, Any]) -> str:
    """What was measured, for people."""
    found, limits, machine = record["measured"], record["limits"], record["machine"]
    about = [f"batch size {record['batch_size']}", record["dtype"]]
    if "weights" in record:
        about += [f"{record['weights']} weights", f"prompt {record['prompt_tokens']} tokens"]
    else:
        about += [f"{record['tokens']} tokens a row"]
    unit = "prompt batch" if record["what"] == "prefill" else "step"
    rows = [
        (f"tokens/s ({record['what']})", f"{found['tokens_per_s']:,.4g}", "", ""),
        (f"ms a {unit}, median", f"{found['ms_median']:.4g}", *_of("ms_median", found)),
        (f"ms a {unit}, best of {found['rounds']}", f"{found['ms_best']:.4g}", "", ""),
        _rate("GFLOP/s", found, "gflops", "share_of_matrix_rate", limits["flops_per_s"]),
        _rate("GB/s", found, "gbytes", "share_of_read_rate", limits["read_bytes_per_s"]),
    ]
    lines = [
        f"{record['model']}: {', '.join(about)}",
        f"{machine['devices']}, {machine['cpu']}, {machine['cores']} cores, jax {machine['jax']}",
        "",
        f"{'':30} {'measured':>12} {'limit':>12} {'share':>7}",
        *(
            f"{name:30} {value:>12} {limit:>12} {share:>7}".rstrip()
            for name, value, limit, share in rows
        ),
        "",
        f"{found['gflops']:.4g} GFLOP and {found['gbytes']:.4g} GB a {unit}; "
        f"compiled in {record['compile_s']:.1f} s",
    ]
    return "\n".join(lines) + "\n"


def _of(name: str, found: dict[str, Any]) -> tuple[str, str]:
    """The least time by the slower of the limits, and its share of what was measured."""
    share = found["share_of_limit"]
    return f"{found[name] * share:.4g}", f"{share:.0%}"


def _rate(
    name: str, found: dict[str, Any], what: str, share: str, limit: float
) -> tuple[str, str, str, str]:
    return name, f"{found[f'{what}_per_s']:,.4g}", f"{limit / 1e9:,.4g}", f"{found[share]:.0%}"


def _parser() -> Parser:
    parser = Parser()
    parser.add_argument("what", nargs="?")
    parser.add_argument("--preset")
    parser.add_argument("--model")
    for name in ("batch-size", "prompt-tokens"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--weights", choices=STORED)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"))
    parser.add_argument("--help", "-h", action="store_true")
    return parser
