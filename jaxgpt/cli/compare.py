# SPDX-License-Identifier: Apache-2.0
"""The compare command: by how much one run is better than another, and how sure that is."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.command import Parser, emit, interrupt_ends, note, run_command, start_jax
from jaxgpt.cli.stored import find_run, load_params
from jaxgpt.config import RunConfig
from jaxgpt.errors import ConfigError
from jaxgpt.study.lanes import LaneRun, read_lanes, read_notes
from jaxgpt.train.files import write_atomic
from jaxgpt.train.runfolder import RunFolder, run_path

if TYPE_CHECKING:
    from jaxgpt.study.student import Paired

HELP = """\
usage: jaxgpt compare RUN_A RUN_B [options]

The validation loss of the second run minus that of the first, in nats per token, with its standard
error, 95% interval and p-value, by a paired t-test. Two runs are paired over windows of the first
one's validation text, which both score; two folders of lanes over the seeds that both have.

  RUN_A, RUN_B                runs, or folders of lanes (train.py --seeds 8), below runs/ or paths
  --window N                  tokens that are taken together (default: the longer context). Windows
                              are taken as independent; where a text is in long documents, as long
                              as one is more cautious
  --checkpoint WHICH          latest (default), best (lowest validation loss), or a step
  --json FILE                 write the result there
  --device cpu|gpu|tpu        the best there is by default
  --help                      this

Over windows the question is whether these two models differ on texts like this one; over seeds,
whether the two ways of training do.
"""


def compare_main(argv: Sequence[str]) -> int:
    """`jaxgpt compare`: two runs.

    Args:
      argv: Words after the command's name.

    Returns:
      The exit code; see `jaxgpt.errors`.
    """
    with interrupt_ends():
        return run_command(lambda: _compare(list(argv)), less_memory="--device=cpu")


def _compare(argv: list[str]) -> None:
    parser = Parser()
    parser.add_argument("runs", nargs="*", metavar="RUN")
    parser.add_argument("--window", type=int)
    parser.add_argument("--checkpoint", default="latest")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"))
    parser.add_argument("--help", "-h", action="store_true")
    options = parser.parse_args(argv)
    if options.help:
        emit(HELP)
        return
    if len(options.runs) != 2:
        raise ConfigError(f"{len(options.runs)} runs", fix="jaxgpt compare RUN_A RUN_B")
    if options.window is not None and options.window < 1:
        raise ConfigError(f"--window={options.window} must be at least 1")
    paths = [run_path(name) for name in options.runs]
    of_lanes = [read_notes(path) is not None for path in paths]
    if any(of_lanes) and not all(of_lanes):
        one, other = options.runs if of_lanes[0] else options.runs[::-1]
        what = f"{one} is a folder of lanes, and {other} is a run"
        raise ConfigError(what, fix=f"a lane, as {paths[of_lanes.index(True)]}/seed0")
    if all(of_lanes):
        found, over = _lanes(paths)
    else:
        start_jax(options.device, heavy=True)
        found, over = _runs(options.runs, options.checkpoint, options.window)
    emit(f"{_line(options.runs, found, over)}\n")
    if options.json is not None:
        record = {"first": options.runs[0], "second": options.runs[1], "paired_over": over}
        record |= {"unit": "nats per token", **dataclasses.asdict(found)}
        write_atomic(options.json, json.dumps(record, indent=1) + "\n")


def _lanes(paths: Sequence[Path]) -> "tuple[Paired, str]":
    from jaxgpt.study.compare import over_seeds

    lanes: list[list[LaneRun]] = [read_lanes(path) for path in paths]
    firsts = [find_run(str(path / own[0].name)) for path, own in zip(paths, lanes, strict=True)]
    _same_texts(*firsts, strict=True)
    return over_seeds(*lanes), "seeds"


def _runs(names: Sequence[str], checkpoint: str, window: int | None) -> "tuple[Paired, str]":
    import numpy as np

    from jaxgpt.data.packing import Boundary
    from jaxgpt.data.tokenizer import load_tokenizer
    from jaxgpt.study.compare import over_windows, token_nats, validation_ids
    from jaxgpt.train.rundata import with_vocabulary

    runs = [find_run(name) for name in names]
    _same_texts(*runs, strict=False)
    folder, run = runs[0]
    tokenizer = load_tokenizer(folder.tokenizer_path)
    texts = validation_ids(folder, run.data, tokenizer)
    boundary = Boundary.of(tokenizer) if run.data.mask_documents else None
    nats, weights, length = [], np.zeros(0), 1
    for own, config in runs:
        model = with_vocabulary(config.model, tokenizer)
        params = load_params(own, model, checkpoint, config.lora)
        more: Any = {"dtype": config.train.dtype}
        parts = [token_nats(model, params, *text, boundary, **more) for text in texts]
        nats.append(np.concatenate([each for each, _ in parts]))
        weights = np.concatenate([each for _, each in parts])
        length = max(length, model.context_length)
    length = window or length
    return over_windows(nats[0], nats[1], weights, length), f"windows of {length} tokens"


def _same_texts(
    first: tuple[RunFolder, RunConfig], second: tuple[RunFolder, RunConfig], *, strict: bool
) -> None:
    """See that losses can be compared: by token, and, where each has its own text, on the same.

    Raises:
      ConfigError: They cannot.
    """
    from jaxgpt.train.rundata import read_facts

    (one, run), (other, config) = first, second
    ours, theirs = read_facts(one), read_facts(other)
    if ours.get("tokenizer") != theirs.get("tokenizer"):
        what = f"{one.path.name} and {other.path.name} have different tokenizers"
        raise ConfigError(f"{what}: nats per token do not compare", fix="jaxgpt evaluate each")
    split = (ours.get("source"), run.data.val_fraction)
    if split != (theirs.get("source"), config.data.val_fraction):
        what = f"{other.path.name} was trained on another text, or another part, than "
        what += f"{one.path.name}"
        if strict:
            raise ConfigError(what, fix="seeds of both on the same text")
        note(f"warning: {what}: it may have seen what is scored")


def _line(names: Sequence[str], found: "Paired", over: str) -> str:
    p = f"{found.p_value:.2g}" if found.p_value > 1e-12 else "below 1e-12"
    return (
        f"{names[1]} - {names[0]}: {found.difference:+.4f} nats/token, standard error "
        f"{found.standard_error:.4f}, 95% interval {found.low:+.4f} to {found.high:+.4f}, p = {p} "
        f"(paired t over {found.n} {over})"
    ).replace("p = below", "p below")
