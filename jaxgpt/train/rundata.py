# SPDX-License-Identifier: Apache-2.0
"""What a run began with, and that it still has it: text, tokenizer, and the facts in run.json."""

import dataclasses
import datetime
import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from jaxgpt.data.config import DataConfig
from jaxgpt.data.corpus import Corpus
from jaxgpt.data.source import is_hub, read_source
from jaxgpt.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from jaxgpt.data.tokens import TokenFile, open_tokens, prepare_tokens
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig
from jaxgpt.train.files import write_atomic
from jaxgpt.train.runfolder import RunFolder, Signals
from jaxgpt.train.stepfolder import step_folders

BLOCK = 1 << 24  # ids that are looked at together


def read_facts(folder: RunFolder) -> dict[str, Any]:
    """What run.json says of a started run; {} for a new one.

    Raises:
      ConfigError: The file is damaged.
    """
    try:
        facts = json.loads(folder.facts_path.read_bytes())
        if isinstance(facts, dict):
            return facts
    except FileNotFoundError:
        return {}
    except ValueError:
        pass
    fix = "restore the file, or begin another --run"
    raise ConfigError("run.json is damaged", where=str(folder.facts_path), fix=fix)


def open_data(
    folder: RunFolder, data: DataConfig, facts: dict[str, Any], signals: Signals
) -> tuple[TokenFile, Tokenizer]:
    """The run's tokens and tokenizer: made at its first start, checked against it afterwards.

    A local text is read again at every start, for it may have been edited. One of the hub is not as
    long as the run has its tokens; without them it is read at the commit that the run began with.

    Raises:
      ConfigError: The text or the tokenizer has changed since the run began.
      ResourceError: The hub or the storage refused.
      Interrupted: A signal came.
    """
    stop = functools.partial(signals.check, "while the data was prepared")
    if is_hub(data.path) and (prepared := _prepared(folder, data, facts)):
        return prepared
    corpus = _read_source(data, facts, stop)
    check_source(facts, corpus.fingerprint, str(data.path or "built-in corpus"))
    stop()
    tokenizer = own_tokenizer(folder, facts)
    if tokenizer is None:
        tokenizer = train_tokenizer(data.tokenizer, corpus, data.vocab_size)
        tokenizer.save(folder.tokenizer_path)
    check_tokenizer(folder, tokenizer, facts)
    stop()
    for left in folder.tokens_path.glob(".*.tmp"):  # by a preparation that was killed
        left.unlink()
    tokens = prepare_tokens(corpus, tokenizer, tokens_file(folder), val_fraction=data.val_fraction)
    stop()
    return tokens, tokenizer


def own_tokenizer(folder: RunFolder, facts: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer that a started run has; None where it has none yet."""
    # One from a start that failed may be that of another text.
    begun = "tokenizer" in facts or step_folders(folder.checkpoints_path)
    if begun and folder.tokenizer_path.exists():
        return load_tokenizer(folder.tokenizer_path)
    return None


def check_source(facts: dict[str, Any], found: str | dict[str, str], where: str) -> None:
    """See that the text is the run's, and note it in the facts of a new run.

    Args:
      facts: Of the run.
      found: The fingerprint of the text, or of each text of a mixture by name.
      where: What the text is called.

    Raises:
      ConfigError: It is another one.
    """
    known = facts.setdefault("source", found)
    if known == found:
        return
    if isinstance(known, dict) and isinstance(found, dict):
        where = next(name for name in found if known.get(name) != found[name])
        known, found = known.get(where), found[where]
    raise ConfigError(
        f"the text has changed since this run began: {str(known)[:12]} -> {str(found)[:12]}",
        where=where,
        fix="restore the text, or begin another --run",
    )


def tokens_file(folder: RunFolder) -> Path:
    """Where the ids of a run's own text are."""
    return folder.tokens_path / "tokens.bin"


def _read_source(data: DataConfig, facts: dict[str, Any], stop: Callable[[], None]) -> Corpus:
    """The text; of which commit of the hub it is goes into the facts."""
    corpus, revision = read_source(data, revision=facts.get("revision"), check=stop)
    if revision is not None:
        facts["revision"] = revision
    return corpus


def _prepared(
    folder: RunFolder, data: DataConfig, facts: dict[str, Any]
) -> tuple[TokenFile, Tokenizer] | None:
    """What the run has ready of the very text that it began with, if it has all of it."""
    if not {"source", "tokenizer"} <= facts.keys():
        return None
    try:
        tokenizer = load_tokenizer(folder.tokenizer_path)
        tokens = open_tokens(tokens_file(folder), tokenizer=tokenizer)
    except ConfigError:
        return None
    check_tokenizer(folder, tokenizer, facts)
    same = (tokens.source, tokens.val_fraction) == (facts["source"], data.val_fraction)
    return (tokens, tokenizer) if same else None


def check_tokenizer(folder: RunFolder, tokenizer: Tokenizer, facts: dict[str, Any]) -> None:
    """See that the tokenizer is the run's, and note it in the facts of a new run.

    Raises:
      ConfigError: It is another one.
    """
    known = facts.setdefault("tokenizer", tokenizer.fingerprint)
    if known != tokenizer.fingerprint:
        raise ConfigError(
            f"the run's tokenizer is not the one it was trained with: {known[:12]} -> "
            f"{tokenizer.fingerprint[:12]}, {tokenizer.vocab_size} tokens",
            where=str(folder.tokenizer_path),
            fix="restore the file, or begin another --run",
        )


def with_vocabulary(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The model with its vocabulary known.

    A tokenizer may have control tokens behind the model's last row, as Gemma's for pictures: no
    text has them (`check_ids`).

    Raises:
      ConfigError: The tokenizer has more tokens than the model has rows.
    """
    if model.vocab_size is None:
        return dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    needed = set(range(model.vocab_size, tokenizer.vocab_size)) - _control_ids(tokenizer)
    if needed:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, model.vocab_size is "
            f"{model.vocab_size}",
            fix=f"--model.vocab_size={tokenizer.vocab_size}",
        )
    return model


def check_ids(vocab_size: int, parts: Iterable[Any], model: ModelConfig) -> None:
    """See that the model has a row for every token of the text.

    Args:
      vocab_size: Of the tokenizer.
      parts: Arrays of all ids, which are looked at where the tokenizer has more than the model.
      model: Its vocabulary is known.

    Raises:
      ConfigError: It has none for a control token that a chat template wrote.
    """
    rows = model.vocab_size or 0
    if vocab_size > rows:
        blocks = (part[i : i + BLOCK] for part in parts for i in range(0, len(part), BLOCK))
        largest = max((int(block.max()) for block in blocks), default=-1)
        if largest >= rows:
            raise ConfigError(f"the text has the token {largest}, model.vocab_size is {rows}")


def _control_ids(tokenizer: Tokenizer) -> frozenset[int]:
    controls = getattr(tokenizer, "controls", None)
    return frozenset() if controls is None else controls.ids


def note_session(folder: RunFolder, facts: dict[str, Any], start: int) -> None:
    """Write run.json: what the run began with, and versions and devices of each start."""
    from jaxgpt import __version__

    facts.setdefault("sessions", []).append(
        {
            "from_step": start,
            "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "jaxgpt": __version__,
            "jax": jax.__version__,
            "devices": [device.device_kind for device in jax.devices()],
        }
    )
    write_atomic(folder.facts_path, json.dumps(facts, indent=2) + "\n")
