# SPDX-License-Identifier: Apache-2.0
"""The params and flops commands: what a model has and what its passes cost, without computing any.

Beside the exact figures stand the rules of thumb, with how far off they are. Left out: the records
as text for people (`numbertext.py`), and what a machine makes of such figures (`bench.py`).
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxgpt.cli.command import Parser, emit, run_command
from jaxgpt.cli.help import summary
from jaxgpt.cli.named import NAMES, named_run
from jaxgpt.cli.numbertext import flops_text, params_text
from jaxgpt.cli.stored import find_run
from jaxgpt.config import RunConfig, resolve
from jaxgpt.configlib import short_name
from jaxgpt.costs import (
    BYTES,
    Cost,
    cost_rules,
    decode_costs,
    kv_bytes_per_token,
    prefill_costs,
    total,
    train_costs,
)
from jaxgpt.errors import ConfigError
from jaxgpt.flops import (
    LayerKind,
    Rule,
    count_active_params,
    count_layers,
    count_params,
    param_rules,
)
from jaxgpt.model import ModelConfig
from jaxgpt.presets import MODELS, RUNS
from jaxgpt.train.runfolder import RunFolder, run_path

PARAMS_HELP = """\
usage: jaxgpt params NAME|RUN|FOLDER [options]

Counts the parameters of a model by box, exactly, whatever its size; nothing is allocated.

  NAME                        an architecture or a recipe, see below
  RUN                         a run below runs/, or a path with a slash
  FOLDER                      a Hugging Face folder
  --model.NAME=VALUE ...      any option of train.py: --model.n_layers=2 --model.ffn=GatedMLP
  --json                      for machines
  --help                      this

names:
"""
FLOPS_HELP = """\
usage: jaxgpt flops NAME|RUN|FOLDER [options]

Counts FLOPs and bytes of a training step, of reading a prompt (prefill) and of writing one token
(decode), box by box, exactly, whatever the size of the model; nothing is allocated. Bytes are the
least that must move; FLOPs are those of products, over the keys that queries see.

  NAME, RUN, FOLDER           as for jaxgpt params, which lists the names
  --model.NAME=VALUE ...      any option of train.py: --model.n_layers=2 --model.ffn=GatedMLP
  --batch N                   rows (default: 1)
  --tokens N                  of each row: trained, read, or there when a token is written, itself
                              included (default: the context length)
  --dtype NAME                float32, bfloat16 or float16, of computation and caches (default:
                              bfloat16)
  --weights NAME              how prefill and decode keep the weights: also int8, int4 (default: as
                              --dtype)
  --json                      for machines
  --help                      this

  jaxgpt flops gpt3-175b --batch 32 --tokens 1024
"""
OWN = ("batch", "tokens", "dtype", "weights", "json", "help")


def params_main(argv: Sequence[str]) -> int:
    """`jaxgpt params NAME`: the parameters of a model by box, and their exact number.

    Args:
      argv: A name of `MODELS` or `RUNS`, a run or a folder, then options as for train.

    Returns:
      The exit code.
    """
    return run_command(lambda: _params(list(argv)))


def flops_main(argv: Sequence[str]) -> int:
    """`jaxgpt flops NAME`: FLOPs and bytes of training, prefill and decoding, by box.

    Args:
      argv: As for `params_main`, and options of its own.

    Returns:
      The exit code.
    """
    return run_command(lambda: _flops(list(argv)))


def _params(argv: list[str]) -> None:
    options = _parse(argv, PARAMS_HELP, ("json",))
    if options is None:
        made = {**RUNS, **MODELS}
        emit(PARAMS_HELP + "".join(f"  {key:17} {summary(made[key])}\n" for key in NAMES))
        return
    cfg = options.model
    record = _counted(options.name, cfg)
    record["formulas"] = [_rule(rule) for rule in param_rules(cfg)]
    emit(json.dumps(record, indent=1) + "\n" if options.json else params_text(record))


def _flops(argv: list[str]) -> None:
    options = _parse(argv, FLOPS_HELP, OWN[:-1])
    if options is None:
        emit(FLOPS_HELP)
        return
    cfg, rows, dtype = options.model, options.batch, options.dtype
    tokens = cfg.context_length if options.tokens is None else options.tokens
    if min(rows, tokens) < 1:
        raise ConfigError(f"--batch={rows} and --tokens={tokens} must be above 0")
    if tokens > cfg.context_length:
        raise ConfigError(
            f"--tokens={tokens} exceeds context_length={cfg.context_length}",
            fix=f"--model.context_length={tokens}",
        )
    kind = {"dtype": dtype, "weights": options.weights}
    passes = {
        "training": train_costs(cfg, rows, tokens, dtype=dtype, causal=True),
        "prefill": prefill_costs(cfg, rows, tokens, **kind),
        "decode": decode_costs(cfg, rows, tokens, **kind),
    }
    record = _counted(options.name, cfg)
    record |= {"batch": rows, "tokens": tokens, "dtype": dtype}
    record["weights"] = options.weights or dtype
    record |= {name: _costs(costs) for name, costs in passes.items()}
    all_keys = total(train_costs(cfg, rows, tokens, dtype=dtype)).flops
    record["training"]["flops_over_all_keys"] = all_keys
    record["cache_bytes_per_token"] = kv_bytes_per_token(cfg, dtype)
    record["formulas"] = [_rule(rule) for rule in cost_rules(cfg, rows, tokens, dtype=dtype)]
    emit(json.dumps(record, indent=1) + "\n" if options.json else flops_text(record))


def _parse(argv: list[str], usage: str, own: tuple[str, ...]) -> argparse.Namespace | None:
    """The options, the model among them; None: only help is wanted."""
    name, *words = argv or ["--help"]
    parser = Parser()
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--json", action="store_true")
    if "batch" in own:
        parser.add_argument("--batch", type=int, default=1)
        parser.add_argument("--tokens", type=int)
        parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
        parser.add_argument("--weights", choices=tuple(BYTES))
        parser.set_defaults(dtype="bfloat16")
    options, rest = parser.parse_known_args(words)
    if options.help or name in ("--help", "-h", ""):
        return None
    options.name, options.model = name, _model(name, rest, own)
    return options


def _model(name: str, words: list[str], own: tuple[str, ...]) -> ModelConfig:
    """Of an architecture, a run, a recipe or a folder, in this order; a run's vocabulary too."""
    folder, base = _run(name)
    cfg = resolve(base, (), words, known=own).model
    if cfg.vocab_size is None and folder is not None and folder.tokenizer_path.is_file():
        from jaxgpt.data.tokenizer import load_tokenizer  # slow to import

        tokenizer = load_tokenizer(folder.tokenizer_path)
        cfg = dataclasses.replace(cfg, vocab_size=tokenizer.vocab_size)
    return cfg


def _run(name: str) -> tuple[RunFolder | None, RunConfig]:
    if name not in MODELS:
        try:
            is_run = RunFolder(run_path(name)).config_path.is_file()
        except ConfigError:  # no possible name of a run
            is_run = False
        if is_run:
            return find_run(name)
    return None, named_run(name)


def _counted(name: str, cfg: ModelConfig) -> dict[str, Any]:
    """The record's beginning: the model's sizes and its parameters."""
    counts = count_params(cfg)
    sizes = ("n_layers", "d_model", "vocab_size", "context_length")
    kinds = zip(_differences(count_layers(cfg)), count_layers(cfg), strict=True)
    return {
        "model": name,
        **{field: getattr(cfg, field) for field in sizes},
        "parameters": counts,
        "total": sum(counts.values()),
        "active": count_active_params(cfg),
        "embedding_share": counts["embed"] / sum(counts.values()),
        "layers": [
            {"boxes": what, "n": one.n_layers, "parameters": one.n_params, "active": one.n_active}
            for what, one in kinds
        ],
    }


def _rule(rule: Rule) -> dict[str, Any]:
    return dataclasses.asdict(rule) | {"percent": rule.percent}


def _costs(costs: Mapping[str, Cost]) -> dict[str, Any]:
    def one(cost: Cost) -> dict[str, float]:
        return dataclasses.asdict(cost) | {"bytes": cost.bytes, "flops_per_byte": cost.intensity}

    return {"boxes": {box: one(cost) for box, cost in costs.items()}, "total": one(total(costs))}


def _differences(kinds: Sequence[LayerKind]) -> list[str]:
    """What tells kinds of layers apart: names of boxes, or fields of those of one class."""
    words: list[list[str]] = [[] for _ in kinds]

    def say(values: Sequence[Any], shown: Callable[[Any], str]) -> None:
        if len(set(map(shown, values))) > 1:
            for word, value in zip(words, values, strict=True):
                word.append(shown(value))

    for name in (field.name for field in dataclasses.fields(kinds[0].layer)):
        boxes = [getattr(kind.layer, name) for kind in kinds]
        if len({type(box) for box in boxes}) > 1:
            say(boxes, lambda box: short_name(type(box)))
            continue
        for knob in (field.name for field in dataclasses.fields(boxes[0])):
            say(boxes, lambda box, name=name, knob=knob: f"{name}.{knob}={getattr(box, knob)}")
    return [", ".join(word) or "all boxes" for word in words]
