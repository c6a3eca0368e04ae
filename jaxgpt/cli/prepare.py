# SPDX-License-Identifier: Apache-2.0
"""The prepare command: a text of any size to a folder of token files."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.cli.command import Parser, emit, note, run_command
from jaxgpt.config import RunConfig, resolve
from jaxgpt.configlib import unknown
from jaxgpt.data.config import BPE_SAMPLE_BYTES, SHARD_TOKENS
from jaxgpt.errors import ConfigError, ResourceError
from jaxgpt.train.files import size
from jaxgpt.train.runfolder import RunFolder, Signals

HELP = f"""\
usage: jaxgpt prepare OUT --data.path=TEXT --data.tokenizer=NAME [options]

Encodes a text of any size into a folder of token files, in bounded memory, for
train.py --data.path=OUT. The same command, run again after an interruption, goes on.

  OUT                         the folder to make
  --data.NAME=VALUE           the text and its tokenizer, as for train.py (see its --help-all)
  --shard-tokens N            the most tokens of a file (default: {SHARD_TOKENS:_})
  --workers N                 threads that encode (default: one for each core)
  --bpe-sample BYTES          with --data.tokenizer=bpe: what it is trained on, from the beginning
                              of the text (default: {BPE_SAMPLE_BYTES:_})
  --help                      this

  jaxgpt prepare data/edu --data.path=hf://HuggingFaceFW/fineweb-edu --data.subset=sample-10BT \\
      --data.rows=documents --data.stream=true --data.tokenizer=gpt2 --data.val_fraction=0.001
"""
LESS_MEMORY = "fewer --workers, or a smaller --bpe-sample"
NAMES = ("shard-tokens", "workers", "bpe-sample", "help")


def prepare_main(argv: Sequence[str]) -> int:
    """`jaxgpt prepare`: make a folder of prepared tokens.

    Args:
      argv: Words after the command's name.

    Returns:
      The exit code; see `jaxgpt.errors`.
    """
    return run_command(lambda: _prepare(list(argv)), less_memory=LESS_MEMORY)


def _prepare(argv: list[str]) -> None:
    options, rest = _parser().parse_known_args(argv)
    if options.help:
        emit(HELP)
        return
    from jaxgpt.data.prepare import prepare  # slow to import

    if options.out is None or options.out.startswith("--"):
        raise ConfigError("the folder to make is missing", fix="jaxgpt prepare OUT --data.path=...")
    for word in rest:
        if word.startswith("--") and not word.startswith("--data."):
            raise unknown(word.partition("=")[0], [*(f"--{name}" for name in NAMES), "--data.path"])
    data = resolve(RunConfig(), (), rest, known=NAMES).data
    out = Path(options.out).expanduser()
    workers = options.workers or os.cpu_count() or 1
    # The tokenizers library asks for it when it encodes first.
    os.environ.setdefault("RAYON_NUM_THREADS", str(workers))
    how: dict[str, Any] = {"shard_tokens": options.shard_tokens, "bpe_sample": options.bpe_sample}
    with Signals() as signals, _locked(out):

        def check() -> None:
            signals.check(f"while {out} was prepared, which keeps what was done")

        done = prepare(out, data, workers=workers, check=check, say=note, **how)
    emit(
        f"{out}: {done.tokens:,} tokens of {size(done.bytes)} text in {done.shards} files, "
        f"{done.val_tokens:,} of them for validation{'' if done.new else ' (nothing left to do)'}\n"
    )


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Alone in the folder; one that is not ours is not touched, `prepare` refuses it."""
    from jaxgpt.data.shards import MANIFEST, PROGRESS

    names = {"?"}
    with contextlib.suppress(OSError):  # likewise
        out.mkdir(parents=True, exist_ok=True)
        names = {file.name for file in out.iterdir()}
    with contextlib.ExitStack() as held:
        if not names or names & {".lock", MANIFEST, PROGRESS}:
            try:
                held.enter_context(RunFolder(out).lock())
            except ResourceError as error:
                what = error.what.replace("the run", str(out))
                raise ResourceError(what, fix="wait for it, or another folder") from error
        yield


def _parser() -> Parser:
    parser = Parser()
    parser.add_argument("out", nargs="?", metavar="OUT")
    parser.add_argument("--shard-tokens", "--shard_tokens", type=int, default=SHARD_TOKENS)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--bpe-sample", "--bpe_sample", type=int, default=BPE_SAMPLE_BYTES)
    parser.add_argument("--help", "-h", action="store_true")
    return parser
