# SPDX-License-Identifier: Apache-2.0
"""A model by the name that a person types: an architecture, a recipe, or a Hugging Face folder."""

import dataclasses
import difflib
from pathlib import Path

from jaxgpt.config import RunConfig
from jaxgpt.errors import ConfigError
from jaxgpt.presets import MODELS, RUNS

VOCABULARIES = {"gpt2": 50_257, "byte": 257}
CHARACTERS = 128
NAMES = (*MODELS, *(name for name in RUNS if name not in MODELS))


def named_run(name: str) -> RunConfig:
    """The recipe of that name, or the default one with the model of that name.

    Args:
      name: Of `MODELS` or of `RUNS`, or a folder with a model.

    Raises:
      ConfigError: There is none.
    """
    if name in MODELS:
        return RunConfig(model=MODELS[name]())
    if name in RUNS:
        return RUNS[name]()
    if name and Path(name).is_dir():
        from jaxgpt.interop.pretrained import read_model  # slow to import

        return RunConfig(model=read_model(Path(name)))
    near = difflib.get_close_matches(name, NAMES, n=1)
    fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(NAMES)}"
    raise ConfigError(f"no model {name!r}", fix=fix)


def known_vocabulary(run: RunConfig) -> RunConfig:
    """The recipe with a vocabulary, where it is the tokenizer's and there is no text.

    That of a tokenizer of characters is taken to be 128.
    """
    if run.model.vocab_size is not None:
        return run
    kind = run.data.tokenizer
    known = run.data.vocab_size if kind == "bpe" else VOCABULARIES.get(kind, CHARACTERS)
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=known))
