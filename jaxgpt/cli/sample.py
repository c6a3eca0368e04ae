# SPDX-License-Identifier: Apache-2.0
"""The sample command: text from a run folder, to the terminal as it comes."""

import argparse
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.cli.command import Parser, emit, interrupt_ends, note, run_command, start_jax
from jaxgpt.cli.train import stored_run
from jaxgpt.config import RunConfig
from jaxgpt.errors import CheckpointError, ConfigError
from jaxgpt.train.runfolder import RunFolder, newest_run, run_path

HELP = """\
usage: python sample.py [--run NAME] [--prompt TEXT] [options]

Prints the prompt and how the model goes on. The same seed prints the same text.

  --run NAME                  a run below runs/, or a path with a slash; the newest by default
  --checkpoint WHICH          latest (default), best (lowest validation loss), or a step

  --prompt TEXT               where the text begins. The default is an empty prompt: the model
                              starts from its end-of-text token, or where the tokenizer has none
                              from a newline, or from the tokenizer's first character
  --prompt-file FILE          the same from a file, taken exactly; - is stdin
  --max-new-tokens N          at most so many tokens (default: 200)
  --num-samples N             so many texts, with lines between them (default: 1)
  --stop TEXT                 end a text before this string; may be repeated
  --past-context roll|error   past the model's context: go on over the last tokens (default), or
                              refuse before anything is computed

  --temperature X             1 is the model's own distribution, 0 is greedy (default: 0.8)
  --greedy                    always the likeliest token
  --top-k N                   only among the N likeliest tokens
  --top-p X                   only among the likeliest tokens that have this probability together
  --min-p X                   only tokens with this share of the likeliest one's probability
  --repetition-penalty X      above 1, tokens already seen are less likely (default: 1)
  --seed N                    of the noise (default: 0)

  --dtype float32|bfloat16    of computation (default: float32)
  --device cpu|gpu|tpu        the best there is by default
  --raw                       do not escape control characters on a terminal
  --help                      this
"""
SEPARATOR = "-" * 40
LESS_MEMORY = "lower --num-samples or --max-new-tokens, or --dtype=bfloat16"


def sample_main(argv: Sequence[str] | None = None) -> int:
    """`python sample.py`: print text that a trained model makes.

    Args:
      argv: Words after the command's name; None: those of this process.

    Returns:
      The exit code; see `jaxgpt.errors`. Not 0 if a part of the output was lost.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    with interrupt_ends():
        return run_command(lambda: _sample(words), less_memory=LESS_MEMORY)


def _sample(argv: list[str]) -> None:
    options = _parser().parse_args(argv)
    if options.help:
        emit(HELP)
        return
    prompt = _prompt(options)
    folder, run = find_run(options.run)
    start_jax(options.device)
    # Not needed for --help, and slow to import.
    from jaxgpt.data.tokenizer import load_tokenizer
    from jaxgpt.sample.filters import Sampling
    from jaxgpt.sample.text import stream_text
    from jaxgpt.train.rundata import check_tokenizer, read_facts, with_vocabulary

    sampling = Sampling(
        temperature=0.0 if options.greedy else options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
    )
    tokenizer = load_tokenizer(folder.tokenizer_path)
    check_tokenizer(folder, tokenizer, read_facts(folder))
    model = with_vocabulary(run.model, tokenizer)
    tokenizer.encode(prompt)  # before the checkpoint is read: it may be large
    pieces = stream_text(
        model,
        load_params(folder, model, options.checkpoint),
        tokenizer,
        prompt,
        samples=options.num_samples,
        stop=options.stop,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        seed=options.seed,
        past_context=options.past_context,
        dtype=options.dtype,
    )
    terminal = sys.stdout is not None and sys.stdout.isatty()
    for text in in_order(pieces, prompt, options.num_samples):
        emit(escape_controls(text) if terminal and not options.raw else text)


def _parser() -> Parser:
    parser = Parser()
    parser.add_argument("--run")
    parser.add_argument("--checkpoint", default="latest")
    parser.add_argument("--prompt", default=None)
    parser.add_argument("--prompt-file", default=None)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--num-samples", type=int, default=1)
    parser.add_argument("--stop", action="append", default=[])
    parser.add_argument("--past-context", choices=("roll", "error"), default="roll")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"))
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    return parser


def _prompt(options: argparse.Namespace) -> str:
    """The prompt's text.

    Raises:
      ConfigError: It is given twice, cannot be read, or is not UTF-8.
    """
    path = options.prompt_file
    if path is None:
        prompt = options.prompt or ""
        if any(0xD800 <= ord(char) < 0xE000 for char in prompt):  # how argv spells stray bytes
            raise ConfigError("the prompt is not valid UTF-8", where="--prompt")
        return prompt
    if options.prompt is not None:
        raise ConfigError("--prompt and --prompt-file exclude each other")
    try:
        if path == "-":
            content = b"" if sys.stdin is None else sys.stdin.buffer.read()
        else:
            content = Path(path).read_bytes()
        return content.decode()
    except OSError as error:
        raise ConfigError(f"cannot read the prompt: {error.strerror}", where=path) from error
    except UnicodeDecodeError as error:
        what = f"the prompt is not valid UTF-8: byte {error.start}"
        raise ConfigError(what, where=path) from None


def find_run(name: str | None) -> tuple[RunFolder, RunConfig]:
    """A run and its configuration; None: the newest with a checkpoint.

    Raises:
      ConfigError: No possible name, or a damaged configuration.
      CheckpointError: There is no such run.
    """
    folder = RunFolder(newest_run() if name is None else run_path(name))
    run = stored_run(folder)
    if run is None:
        runs = sorted(path.parent.name for path in Path("runs").glob("*/config.yaml"))
        fix = f"--run with one of {', '.join(runs)}" if runs else "python train.py"
        raise CheckpointError("no run there: no config.yaml", where=str(folder.path), fix=fix)
    return folder, run


def load_params(folder: RunFolder, model: Any, which: str) -> Any:
    """The verified parameters of a checkpoint, on the first device.

    Args:
      folder: The run.
      model: Its model, the vocabulary known.
      which: `latest`, `best`, or a step.

    Raises:
      ConfigError: `which` is none of these.
      CheckpointError: No such checkpoint, or not a sound one.
    """
    import jax

    from jaxgpt.model import param_shapes
    from jaxgpt.train.checkpoint import Checkpoints

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        param_shapes(model),
    )
    warn = lambda line: note(f"warning: {line}")  # noqa: E731
    with Checkpoints(folder.checkpoints_path, read_only=True, warn=warn) as checkpoints:
        if which == "latest":
            return checkpoints.restore_params(abstract).params
        if which == "best":
            step = checkpoints.best_step()
            if step is None:
                where = str(folder.checkpoints_path)
                raise CheckpointError("no checkpoint has a validation loss", where=where)
        elif which.isdecimal():
            step = int(which)
        else:
            raise ConfigError(f"--checkpoint {which!r}", fix="latest, best or the number of a step")
        return checkpoints.restore_params(abstract, step=step).params


def in_order(pieces: Iterable[Any], prompt: str, samples: int) -> Iterator[str]:
    """Whole texts one after the other, each piece of the one in turn as soon as it comes.

    Args:
      pieces: `jaxgpt.sample.text.Piece`s of samples that grow side by side.
      prompt: Stands before each text.
      samples: How many there are.
    """
    waiting: dict[int, list[Any]] = {}
    turn = 0
    yield prompt
    for piece in pieces:
        waiting.setdefault(piece.sample, []).append(piece)
        while turn in waiting:
            ready = waiting.pop(turn)
            yield "".join(each.text for each in ready)
            if not ready[-1].last:
                break
            turn += 1
            yield "\n" if turn == samples else f"\n{SEPARATOR}\n{prompt}"


def escape_controls(text: str) -> str:
    """The text with control characters spelled out, newlines and tabs excepted."""
    return "".join(
        repr(char)[1:-1] if unicodedata.category(char) == "Cc" and char not in "\n\t" else char
        for char in text
    )
