# SPDX-License-Identifier: Apache-2.0
"""The sample command: text from a run or a public model, to the terminal as it comes."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from jaxgpt.cli.command import Parser, emit, interrupt_ends, note, run_command, start_jax
from jaxgpt.cli.sources import draft_source, model_source, run_source
from jaxgpt.cli.texts import escape_controls, in_order
from jaxgpt.data.base import Tokenizer
from jaxgpt.errors import ConfigError
from jaxgpt.sample.weights import STORED

HELP = """\
usage: python sample.py [--run NAME | --model MODEL] [--prompt TEXT] [options]

Prints the prompt and how the model goes on. The same seed prints the same text.

  --run NAME                  a run below runs/, or a path with a slash; the newest by default
  --checkpoint WHICH          latest (default), best (lowest validation loss), or a step
  --ema                       the moving average of the weights, of a run with train.ema_decay
  --model MODEL               a public model instead: a Hugging Face folder, OWNER/NAME or
                              OWNER/NAME@REVISION of its hub, or a short name such as gpt2

  --prompt TEXT               where the text begins. The default is an empty prompt: the model
                              starts from its begin-of-text or end-of-text token, or where the
                              tokenizer has none from a newline, or from its first character
  --prompt-file FILE          the same from a file, taken exactly; - is stdin
  --chat                      the prompt is a message: print the answer of a chat model
  --system TEXT               with --chat: what the system message says
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
  --weights HOW               stored as float32, bfloat16, int8 or int4 (default: as --dtype)
  --draft MODEL               a small model with the same tokenizer, a run or a public one, drafts
                              tokens, which are checked several at once: faster, as likely a text
  --draft-tokens N            so many at once (default: 4)
  --device cpu|gpu|tpu        the best there is by default
  --raw                       do not escape control characters on a terminal
  --help                      this
"""
LESS_MEMORY = "lower --num-samples or --max-new-tokens, or --dtype=bfloat16, or --weights=int8"


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
    _check(options)
    prompt = _prompt(options)
    if options.model is None:
        source = run_source(options.run, options.checkpoint, options.ema)
    else:
        source = model_source(options.model, options.dtype)
    small, n_drafted = None, 4 if options.draft_tokens is None else options.draft_tokens
    if options.draft is not None:
        small = draft_source(options.draft, options.dtype, n_drafted, source)
    start_jax(options.device, heavy=True)
    # Not needed for --help, and slow to import.
    from jaxgpt.sample.filters import Sampling
    from jaxgpt.sample.speculative import Draft
    from jaxgpt.sample.text import stream_text

    sampling = Sampling(
        temperature=0.0 if options.greedy else options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
    )
    given = _given(options, source.tokenizer, prompt)  # before what may be large is read
    drafted, draft = _Drafted(n_drafted), None
    stored = options.dtype, options.weights
    if small is not None:
        draft = Draft(small.model, small.stored(*stored), n_drafted)
    pieces = stream_text(
        source.model,
        source.stored(*stored),
        source.tokenizer,
        given,
        samples=options.num_samples,
        stop=options.stop,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        seed=options.seed,
        past_context=options.past_context,
        dtype=options.dtype,
        draft=draft,
        watch=drafted.add,
    )
    terminal = sys.stdout is not None and sys.stdout.isatty()
    for text in in_order(pieces, "" if options.chat else prompt, options.num_samples):
        emit(escape_controls(text) if terminal and not options.raw else text)
    if small is not None:
        note(drafted.summary())


class _Drafted:
    """How many drafted tokens were accepted."""

    def __init__(self, of: int):
        self._of, self._tokens, self._rounds = of, 0, 0

    def add(self, chunk: Any) -> None:
        """Count a chunk; one that was not drafted has no rounds."""
        if chunk.rounds_B is not None:
            self._tokens += int(chunk.lengths_B.sum())
            self._rounds += int(chunk.rounds_B.sum())

    def summary(self) -> str:
        """One line."""
        if not self._rounds:
            return "draft: not used, for the prompt leaves no room in the shorter context"
        accepted = self._tokens / self._rounds - 1  # one more is the model's own
        return f"draft: {accepted:.1f} of {self._of} tokens accepted a round"


def _given(options: argparse.Namespace, tokenizer: Tokenizer, prompt: str) -> str | list[int]:
    """The prompt, or the ids of a conversation; ConfigError where the tokenizer cannot write it."""
    if not options.chat:
        tokenizer.encode(prompt)
        return prompt
    messages = [{"role": "user", "content": prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    return [int(i) for i in cast(Any, tokenizer).chat(messages)]


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that exclude or need each other."""
    if options.model is not None:
        for name in ("run", "checkpoint", "ema"):
            if getattr(options, name):
                raise ConfigError(f"--model and --{name} exclude each other")
    if options.draft_tokens is not None and options.draft is None:
        raise ConfigError("--draft-tokens is for a draft", fix="--draft MODEL")
    if options.system is not None and not options.chat:
        raise ConfigError("--system is for conversations", fix="--chat")
    if options.chat and not (options.prompt or options.prompt_file):
        raise ConfigError("--chat answers a message, and there is none", fix="--prompt TEXT")


def _parser() -> Parser:
    parser = Parser()
    parser.add_argument("--run")
    parser.add_argument("--checkpoint")
    parser.add_argument("--ema", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--system")
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
    parser.add_argument("--weights", choices=STORED)
    parser.add_argument("--draft")
    parser.add_argument("--draft-tokens", type=int)
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
