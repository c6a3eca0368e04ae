# SPDX-License-Identifier: Apache-2.0
"""The export command: a run, or a public model, as a folder that transformers loads."""

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.command import Parser, emit, note, run_command, start_jax
from jaxgpt.cli.stored import check_average, find_run, load_params
from jaxgpt.errors import ConfigError, Interrupted
from jaxgpt.train.runfolder import RunFolder, Signals, run_path

if TYPE_CHECKING:
    from jaxgpt.interop.save import Saved

HELP = """\
usage: jaxgpt export RUN_OR_MODEL OUT [options]

Writes a Hugging Face folder: weights as safetensors, config.json, tokenizer. It is read back and
compared before it takes its place.

  RUN_OR_MODEL                a run below runs/, or a path with a slash; or a public model: a
                              folder, OWNER/NAME of the hub, or a short name such as gpt2
  OUT                         the folder to make
  --checkpoint WHICH          of a run: latest (default), best (lowest validation loss), or a step
  --ema                       of a run with train.ema_decay: the moving average of its weights
  --dtype float32|bfloat16    of the weights (default: float32)
  --family NAME               as which model_type, such as llama; by default the first that has
                              such a model, or that of a public model
  --adapter                   of a run with --lora.rank: the adapters alone, for PEFT; without it
                              they are merged into the weights
  --force                     replace an earlier export
  --help                      this

  jaxgpt export my-run my-model
"""
LESS_MEMORY = "--dtype=bfloat16 for a public model, or a machine with more memory"


def export_main(argv: Sequence[str]) -> int:
    """`jaxgpt export`: write a model for others.

    Args:
      argv: Words after the command's name.

    Returns:
      The exit code; see `jaxgpt.errors`.
    """
    return run_command(lambda: _export(list(argv)), less_memory=LESS_MEMORY)


def _export(argv: list[str]) -> None:
    options = _parser().parse_args(argv)
    if options.help:
        emit(HELP)
        return
    if options.source is None or options.out is None:
        raise ConfigError("what to export, and where to, is missing", fix="jaxgpt export RUN OUT")
    from jaxgpt.interop.newfolder import check_place  # here as below: slow to import

    check_place(Path(options.out).expanduser(), force=options.force)
    start_jax("cpu")
    with Signals() as signals:
        export = _of_run if _is_run(options.source) else _of_model
        done = export(options, _stopper(signals))
    dtype = "float32" if options.adapter else options.dtype
    emit(f"{options.out}: {done.family}, {done.n_params:,} numbers, {dtype}\n")


def _parser() -> Parser:
    parser = Parser()
    parser.add_argument("source", nargs="?", metavar="RUN_OR_MODEL")
    parser.add_argument("out", nargs="?", metavar="OUT")
    parser.add_argument("--checkpoint")
    parser.add_argument("--ema", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--family")
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    return parser


def _is_run(name: str) -> bool:
    """Whether it is a run; ConfigError where it cannot be a model either."""
    from jaxgpt.interop.hub import SHORT_NAMES

    with contextlib.suppress(ConfigError):  # gpt2@REVISION is no name of a run
        if RunFolder(run_path(name)).config_path.exists():
            return True
    if "/" in name or "@" in name or name in SHORT_NAMES or Path(name).is_dir():
        return False
    runs = sorted(path.parent.name for path in Path("runs").glob("*/config.yaml"))
    raise ConfigError(
        f"{name!r} is neither a run below runs/ nor a public model",
        fix=f"one of {', '.join([*runs, *SHORT_NAMES])}, OWNER/NAME, or a folder",
    )


def _stopper(signals: Signals) -> Callable[[], None]:
    def check() -> None:
        if signals.pending is not None:
            what = f"stopped by {signal.Signals(signals.pending).name}; nothing was exported"
            raise Interrupted(what, signum=signals.pending)

    return check


def _of_run(options: Any, check: Callable[[], None]) -> "Saved":
    from jaxgpt.cli.origin import FACTS
    from jaxgpt.data.tokenizer import load_tokenizer
    from jaxgpt.interop.families import write_config
    from jaxgpt.interop.peft import save_adapter
    from jaxgpt.interop.save import save
    from jaxgpt.train.rundata import check_tokenizer, read_facts, with_vocabulary

    folder, run = find_run(options.source)
    if options.ema:
        check_average(run)
    tokenizer, facts = load_tokenizer(folder.tokenizer_path), read_facts(folder)
    check_tokenizer(folder, tokenizer, facts)
    model = with_vocabulary(run.model, tokenizer)
    how: dict[str, Any] = {"family": options.family, "force": options.force}
    which = options.checkpoint or "latest"
    if not options.adapter:
        write_config(model, options.family)  # before what may be large is read
        params = load_params(folder, model, which, run.lora, options.ema)
        return save(options.out, model, params, tokenizer, dtype=options.dtype, check=check, **how)
    base = _base(facts.get(FACTS))
    params = load_params(folder, model, which, run.lora, options.ema, merge=False)
    return save_adapter(options.out, model, params, run.lora, **base, **how)


def _base(origin: dict[str, Any] | None) -> dict[str, str | None]:
    """What adapters belong to: a hub id with its commit, or a folder."""
    from jaxgpt.data.hub import SCHEME
    from jaxgpt.interop.hub import SHORT_NAMES

    if origin is None:
        raise ConfigError("the run began with no --init-from that others have", fix="no --adapter")
    name, commit = origin["name"], origin["commit"]
    if commit is None:
        return {"base": os.path.abspath(os.path.expanduser(name))}
    name = name.removeprefix(SCHEME).partition("@")[0]
    return {"base": SHORT_NAMES.get(name, name), "revision": commit}


def _of_model(options: Any, check: Callable[[], None]) -> "Saved":
    from jaxgpt.data.pretrained import TOKENIZER, load_folder_tokenizer
    from jaxgpt.interop.families import write_config
    from jaxgpt.interop.hub import fetch_model
    from jaxgpt.interop.load import load
    from jaxgpt.interop.pretrained import read_model, skipped_lines
    from jaxgpt.interop.reading import read_json
    from jaxgpt.interop.save import save

    if options.checkpoint or options.adapter or options.ema:
        what = "--ema, --checkpoint and --adapter are for runs"
        raise ConfigError(f"{what}; {options.source} is a model")
    folder, _ = fetch_model(options.source, say=note)
    tokenizer = load_folder_tokenizer(folder) if (folder / TOKENIZER).exists() else None
    family = options.family or read_json(folder / "config.json").get("model_type")
    write_config(read_model(folder), family)
    found = load(folder, dtype=options.dtype)
    for line in skipped_lines(found.skipped):
        note(line)
    return save(
        options.out,
        found.config,
        found.params,
        tokenizer,
        family=family,
        dtype=options.dtype,
        force=options.force,
        check=check,
    )
