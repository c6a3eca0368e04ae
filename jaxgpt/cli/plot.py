# SPDX-License-Identifier: Apache-2.0
"""The plot command: pictures of a run's losses and of its attention, into the run folder."""

from collections.abc import Sequence

from jaxgpt.cli.command import Parser, emit, interrupt_ends, run_command, start_jax
from jaxgpt.cli.stored import find_run, load_params
from jaxgpt.study.lanes import read_notes
from jaxgpt.train.runfolder import run_path

HELP = """\
usage: jaxgpt plot [RUN] [options]

Draws loss.png and attention.png in the run's folder, and prints where they are. A run that is
still training may be drawn too. Of a folder of lanes (train.py --seeds 8) lanes.png is drawn, and
final.png where one number differs between them.

  RUN                         a run below runs/, or a path with a slash; the newest by default
  --text TEXT                 what the model reads for attention.png; the first tokens of the
                              validation text by default. One row and column for each token
  --layers N ...              layers, from 0: a row of maps each (default: the first and the last)
  --heads N ...               heads, from 0: a column of maps each (default: 0 1)
  --checkpoint WHICH          latest (default), best (lowest validation loss), or a step
  --device cpu|gpu|tpu        the best there is by default
  --help                      this

  jaxgpt plot tiny --text "def sample(self):" --layers 0 1 2 --heads 0 1 2 3
"""


def plot_main(argv: Sequence[str]) -> int:
    """`jaxgpt plot`: draw a run.

    Args:
      argv: Words after the command's name.

    Returns:
      The exit code; see `jaxgpt.errors`.
    """
    with interrupt_ends():
        return run_command(lambda: _plot(list(argv)), less_memory="a shorter --text")


def _plot(argv: list[str]) -> None:
    parser = Parser()
    parser.add_argument("run", nargs="?", metavar="RUN")
    parser.add_argument("--text", default="")
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--heads", type=int, nargs="+")
    parser.add_argument("--checkpoint", default="latest")
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"))
    parser.add_argument("--help", "-h", action="store_true")
    options = parser.parse_args(argv)
    if options.help:
        emit(HELP)
        return
    if options.run is not None and read_notes(run_path(options.run)) is not None:
        from jaxgpt.study.curveplots import draw_lanes  # as below

        emit(f"{draw_lanes(run_path(options.run))}\n")
        return
    folder, run = find_run(options.run)
    start_jax(options.device)
    # Not needed for --help, and slow to import.
    from jaxgpt.data.tokenizer import load_tokenizer
    from jaxgpt.study.runs import draw_attention, draw_losses
    from jaxgpt.train.rundata import check_tokenizer, read_facts, with_vocabulary

    tokenizer = load_tokenizer(folder.tokenizer_path)
    check_tokenizer(folder, tokenizer, read_facts(folder))
    model = with_vocabulary(run.model, tokenizer)
    tokenizer.encode(options.text)  # before anything is read that may be large
    emit(f"{draw_losses(folder)}\n")
    params = load_params(folder, model, options.checkpoint, run.lora)
    looked_at = dict(text=options.text, layers=options.layers, heads=options.heads)
    emit(f"{draw_attention(folder, model, params, data=run.data, **looked_at)}\n")
