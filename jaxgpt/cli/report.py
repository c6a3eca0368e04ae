# SPDX-License-Identifier: Apache-2.0
"""The report command: a run as one page of HTML, which needs nothing beside it."""

import dataclasses
import datetime
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.command import Parser, emit, interrupt_ends, run_command, start_jax
from jaxgpt.cli.stored import find_run, load_params
from jaxgpt.config import RunConfig, differences, to_yaml
from jaxgpt.errors import JaxgptError
from jaxgpt.model import ModelConfig
from jaxgpt.presets import RUNS
from jaxgpt.presets.runs import finetune
from jaxgpt.shapes import Params
from jaxgpt.train.runfolder import RunFolder

if TYPE_CHECKING:
    from jaxgpt.study.page_results import Seen

HELP = """\
usage: jaxgpt report [RUN] [options]

Writes one page of HTML about a run, and prints where it is: what it is, its configuration, curves,
samples over time, attention, speed, memory, evaluation, events, versions and devices. The page is
one file that loads nothing else. A run that is still training may be shown too.

  RUN                         a run below runs/, or a path with a slash; the newest by default
  --out FILE                  where to (default: report.html in the run's folder)
  --text TEXT                 what the model reads for the attention maps; the first tokens of the
                              validation text by default
  --layers N ...              layers of the maps, from 0 (default: the first and the last)
  --heads N ...               heads of the maps, from 0 (default: 0 1)
  --no-attention              no maps: no checkpoint is read
  --checkpoint WHICH          latest (default), best (lowest validation loss), or a step
  --device cpu|gpu|tpu        the best there is by default
  --help                      this

  jaxgpt report tiny --out tiny.html
"""


def report_main(argv: Sequence[str]) -> int:
    """`jaxgpt report`: write the page of a run.

    Args:
      argv: Words after the command's name.

    Returns:
      The exit code; see `jaxgpt.errors`.
    """
    with interrupt_ends():
        return run_command(lambda: _report(list(argv)), less_memory="--no-attention")


@dataclasses.dataclass(frozen=True)
class Look:
    """Of what the attention maps are; the defaults are as for `draw_attention`."""

    text: str = ""
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    checkpoint: str = "latest"


PLAIN = Look()


def _report(argv: list[str]) -> None:
    options = _parser().parse_args(argv)
    if options.help:
        emit(HELP)
        return
    folder, run = find_run(options.run)
    start_jax(options.device)
    look = Look(options.text, options.layers, options.heads, options.checkpoint)
    params = None
    if not options.no_attention:
        params = lambda model: load_params(folder, model, look.checkpoint, run.lora)  # noqa: E731
    emit(f"{write_report(folder, run, params, out=options.out, look=look)}\n")


def write_report(
    folder: RunFolder,
    run: RunConfig,
    params: Callable[[ModelConfig], Params] | None,
    *,
    out: Path | None = None,
    look: Look = PLAIN,
) -> Path:
    """Write the page of a run.

    Args:
      folder: The run.
      run: Its configuration.
      params: Gives the parameters of its model, for attention; None: no maps.
      out: The file; None: `report.html` in the folder.
      look: What to show of attention. Where it is not the default, what cannot be shown is an
        error; else it is left out, with the reason.

    Returns:
      The file.

    Raises:
      ConfigError: run.json is damaged, matplotlib is missing, or what was to be looked at.
      CheckpointError: The checkpoint that was asked for is not there.
      ResourceError: The file cannot be written.
    """
    # Slow to import, and not needed for --help.
    from jaxgpt.study import page, page_parts, page_results
    from jaxgpt.train.files import read_metrics, write_atomic
    from jaxgpt.train.rundata import read_facts

    facts, name = read_facts(folder), folder.path.name
    model, seen = _looked(folder, run, facts, params, look)
    records = read_metrics(folder.metrics_path)
    shown = page_parts.Run(name, model, run.optim, run.train, run.lora, records, facts)
    preset, changes = nearest(run)
    origin = [("closest preset", f"{preset}, but for {len(changes)} settings")]
    origin += [("began with", run.init_from)] if run.init_from else []
    again = f"python train.py --config={shlex.quote(str(folder.config_path))} --run=AGAIN"
    sections = {
        "The model": page_parts.about(shown, origin),
        "Configuration": _configuration(run, preset, changes),
        "Curves": page_parts.curves(shown),
        "Evaluation": page_results.evaluation(shown, folder.path),
        "Samples": page_results.samples(read_metrics(folder.path / "samples.jsonl")),
        "Attention": page_results.attention(seen),
        "Speed": page_parts.speed(shown),
        "Memory": page_parts.memory(shown),
        "Events": page_parts.health(shown),
        "Environment": page_results.environment(shown, again),
    }
    made = datetime.datetime.now(datetime.UTC).isoformat(" ", timespec="minutes")
    end = f"Made by jaxgpt report at {made} from {folder.path}"
    out = folder.path / "report.html" if out is None else out
    write_atomic(out, page.whole(f"Run {name}", page_parts.lead(shown), sections, end))
    return out


def _looked(
    folder: RunFolder,
    run: RunConfig,
    facts: dict[str, Any],
    params: Callable[[ModelConfig], Params] | None,
    look: Look,
) -> "tuple[ModelConfig, Seen | str]":
    """The model, its vocabulary known if there is a tokenizer, and its attention or why none."""
    from jaxgpt.data.tokenizer import load_tokenizer
    from jaxgpt.study.page_results import Seen
    from jaxgpt.study.plots import attention_figure
    from jaxgpt.study.runs import first_heads, read_attention
    from jaxgpt.train.rundata import check_tokenizer, with_vocabulary

    model = run.model
    try:
        tokenizer = load_tokenizer(folder.tokenizer_path)
        check_tokenizer(folder, tokenizer, dict(facts))
        model = with_vocabulary(model, tokenizer)
        if params is None:
            return model, "they were not asked for"
        maps, tokens = read_attention(
            folder, model, params(model), data=run.data, text=look.text, layers=look.layers
        )
        heads = first_heads(maps) if look.heads is None else look.heads
        figure = attention_figure(maps, tokens, heads=heads, name=folder.path.name)
        return model, Seen(figure, list(maps), tokens, look.checkpoint)
    except JaxgptError as error:
        if look != PLAIN:
            raise
        return model, str(error)


def nearest(run: RunConfig) -> tuple[str, list[str]]:
    """The recipe that a run differs least from, and how: `key: theirs -> its own`."""
    recipes = {name: make() for name, make in RUNS.items()}
    if run.init_from is not None:
        recipes["finetune"] = finetune(run.init_from, run.model)
    changes = {name: differences(recipe, run) for name, recipe in recipes.items()}
    name = min(changes, key=lambda name: len(changes[name]))
    return name, changes[name]


def _configuration(run: RunConfig, preset: str, changes: Sequence[str]) -> list:
    """What the run changes of a recipe, then of the defaults, then all of it."""
    from jaxgpt.study.page import folded, paragraph, preformatted

    parts = [_changes(changes, preset) if changes else paragraph(f"All is as in {preset}.")]
    others = _changes(differences(RunConfig(), run), "the defaults")
    parts.append(folded("What differs from the defaults of all settings", others))
    return [*parts, folded("All settings, as config.yaml has them", preformatted(to_yaml(run)))]


def _changes(lines: Sequence[str], base: str):
    from jaxgpt.study.page import table

    rows = []
    for line in lines:
        key, _, values = line.partition(": ")
        old, _, new = values.partition(" -> ")
        rows.append((key, new, old))
    return table(rows, ("setting", "this run", base))


def _parser() -> Parser:
    parser = Parser()
    parser.add_argument("run", nargs="?", metavar="RUN")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--text", default="")
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--heads", type=int, nargs="+")
    parser.add_argument("--no-attention", action="store_true")
    parser.add_argument("--checkpoint", default="latest")
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"))
    parser.add_argument("--help", "-h", action="store_true")
    return parser
