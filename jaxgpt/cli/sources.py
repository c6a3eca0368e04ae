# SPDX-License-Identifier: Apache-2.0
"""Where the sample command's models come from: runs and public models, with their tokenizers."""

from collections.abc import Callable
from typing import NamedTuple

from jaxgpt.cli.command import note
from jaxgpt.cli.stored import check_average, find_run, load_params
from jaxgpt.data.base import Tokenizer
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig
from jaxgpt.shapes import Params
from jaxgpt.train.runfolder import RunFolder, run_path


class Source(NamedTuple):
    """What text comes from; the parameters are read when they are needed."""

    model: ModelConfig
    tokenizer: Tokenizer
    params: Callable[[], Params]

    def stored(self, dtype: str, weights: str | None) -> Params:
        """The parameters as decoding wants them.

        Args:
          dtype: Of the computation.
          weights: How matrices are stored; see `for_decoding`.
        """
        from jaxgpt.sample.weights import for_decoding

        return for_decoding(self.model, self.params(), dtype=dtype, weights=weights)


def run_source(name: str | None, which: str | None = None, ema: bool = False) -> Source:
    """A run.

    Args:
      name: As `--run`; None: the newest.
      which: `latest`, `best` or a step; None: the latest.
      ema: The moving average of the weights.

    Raises:
      ConfigError: No possible name, a damaged file, or no moving average.
      CheckpointError: There is no such run.
    """
    folder, run = find_run(name)
    if ema:
        check_average(run)
    from jaxgpt.data.tokenizer import load_tokenizer
    from jaxgpt.train.rundata import check_tokenizer, read_facts, with_vocabulary

    tokenizer = load_tokenizer(folder.tokenizer_path)
    check_tokenizer(folder, tokenizer, read_facts(folder))
    model = with_vocabulary(run.model, tokenizer)
    stored = folder, model, which or "latest", run.lora, ema
    return Source(model, tokenizer, lambda: load_params(*stored))


def model_source(name: str, dtype: str) -> Source:
    """A public model.

    Args:
      name: A folder, or a name of the hub.
      dtype: Of the parameters.

    Raises:
      ConfigError: There is no such model, or it cannot be read.
      CheckpointError: See `fetch_model`.
      ResourceError: The hub cannot be reached.
    """
    from jaxgpt.data.tokenizer import load_folder_tokenizer
    from jaxgpt.interop.hub import fetch_model
    from jaxgpt.interop.load import load
    from jaxgpt.interop.pretrained import read_model, skipped_lines

    folder, _ = fetch_model(name, say=note)
    model, tokenizer = read_model(folder), load_folder_tokenizer(folder)

    def params() -> Params:
        found = load(folder, dtype=dtype)
        for line in skipped_lines(found.skipped):
            note(line)
        return found.params

    return Source(model, tokenizer, params)


def named_source(name: str, dtype: str) -> Source:
    """A run where there is one of that name, else a public model; see those for the rest."""
    try:
        is_run = RunFolder(run_path(name)).config_path.is_file()
    except ConfigError:  # no possible name of a run
        is_run = False
    return run_source(name) if is_run else model_source(name, dtype)


def draft_source(name: str, dtype: str, tokens: int, source: Source) -> Source:
    """What drafts for `source`.

    Args:
      name: A run or a model.
      dtype: Of a public model's parameters.
      tokens: Drafted in a round.
      source: The model that it drafts for.

    Raises:
      ConfigError: There is neither; or it cannot draft for the model.
      CheckpointError: As `model_source`.
      ResourceError: As `model_source`.
    """
    from jaxgpt.sample.speculative import Draft

    try:
        small = named_source(name, dtype)
        Draft(small.model, {}, tokens).check(source.model)
    except ConfigError as error:
        where = error.where or f"--draft {name}"
        raise ConfigError(error.what, where=where, fix=error.fix) from error
    ours, theirs = small.tokenizer, source.tokenizer
    if ours.fingerprint != theirs.fingerprint and _tokens(ours) != _tokens(theirs):
        raise ConfigError(
            "the draft's tokenizer is not the model's: ids stand for other texts",
            where=f"--draft {name}",
            fix="a draft trained with the model's tokenizer",
        )
    return small


def _tokens(tokenizer: Tokenizer) -> list[bytes]:
    """What each id stands for: models that know the same ones may differ in how a text is cut."""
    return [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
