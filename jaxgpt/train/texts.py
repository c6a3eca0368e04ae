# SPDX-License-Identifier: Apache-2.0
"""What a run trains on: one text, or several token folders in fixed shares.

A text is made into a token file in the run's folder (`rundata.py`); a folder of prepared tokens is
used where it is, and only its fingerprint and its tokenizer are kept with the run.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxgpt.data.batches import Batch, Batches
from jaxgpt.data.config import DataConfig
from jaxgpt.data.mixture import MixedBatches, Pattern
from jaxgpt.data.order import Sizes
from jaxgpt.data.packing import Boundary
from jaxgpt.data.shardedids import ShardedIds
from jaxgpt.data.shards import TokenFolder, is_token_folder, open_token_folder
from jaxgpt.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from jaxgpt.data.tokens import TokenFile, open_tokens
from jaxgpt.errors import ConfigError
from jaxgpt.losses import Score
from jaxgpt.model import ModelConfig
from jaxgpt.train.evaluate import evaluate
from jaxgpt.train.rundata import (
    check_ids,
    check_source,
    check_tokenizer,
    open_data,
    own_tokenizer,
    tokens_file,
    with_vocabulary,
)
from jaxgpt.train.runfolder import RunFolder, Signals

PLAIN = DataConfig()
OF_FOLDERS = ("path", "mixture", "mask_documents", "tokenizer", "hub_timeout")
"""The knobs that mean something for prepared tokens; the others say how a text is read."""


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """The ids of one text.

    Attributes:
      name: For messages.
      train: Training ids.
      val: Validation ids; may be empty.
      train_weights: 0 or 1 for each training id; None: all are trained.
      val_weights: The same of the validation ids.
    """

    name: str
    train: np.ndarray | ShardedIds
    val: np.ndarray | ShardedIds
    train_weights: np.ndarray | None = None
    val_weights: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Texts:
    """All that a run trains on and is scored by.

    Attributes:
      texts: One, or those of a mixture.
      vocab_size: Of the tokenizer, which all have in common.
      pattern: The shares of a mixture; None: there is one text.
      boundary: What keeps documents apart; None: they see each other.
    """

    texts: tuple[Text, ...]
    vocab_size: int
    pattern: Pattern | None = None
    boundary: Boundary | None = None

    def batches(self, context_length: int, sizes: Sizes, seed: int) -> Batches | MixedBatches:
        """The training batches.

        Raises:
          ConfigError: A text is shorter than a window.
        """
        parts = []
        for number, text in enumerate(self.texts):
            # Texts of one length would else be read in one order; seeds are below 2**32.
            own = seed + (number << 32)
            try:
                parts.append(
                    Batches(
                        text.train, context_length, sizes, own, text.train_weights, self.boundary
                    )
                )
            except ConfigError as error:
                where = text.name if self.pattern else None
                raise ConfigError(error.what, where=where, fix=error.fix) from None
        return parts[0] if self.pattern is None else MixedBatches(parts, self.pattern, sizes)

    @property
    def scored(self) -> bool:
        """Whether there is anything to validate by."""
        return any(len(text.val) > 1 for text in self.texts)

    def evaluate(
        self,
        nats_of: Callable[[Batch], np.ndarray],
        tokenizer: Tokenizer,
        context_length: int,
        batch_size: int,
        *,
        stop: Callable[[], bool],
        say: Callable[[str], None],
    ) -> Score | None:
        """The score of all validation ids together, as `evaluate`; None also where there are none.

        Every token counts alike, whatever the shares of a mixture: `say` is called with the loss
        of each of its texts.
        """
        scores: list[Score] = []
        for text in (text for text in self.texts if len(text.val) > 1):
            score = evaluate(
                nats_of,
                text.val,
                tokenizer,
                context_length=context_length,
                batch_size=batch_size,
                weights=text.val_weights,
                boundary=self.boundary,
                stop=stop,
            )
            if score is None:
                return None
            if score.n_tokens:
                scores.append(score)
            if score.n_tokens and self.pattern:
                say(f"{text.name}: validation {score.nats_per_token:.4f} nats/token")
        totals = zip(*map(dataclasses.astuple, scores), strict=True)
        return Score(*map(sum, totals)) if scores else None

    def vocabulary_of(self, model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
        """The model with its vocabulary known.

        Raises:
          ConfigError: The model has no row for a token of the tokenizer, or of the texts.
        """
        model = with_vocabulary(model, tokenizer)
        check_ids(self.vocab_size, (ids for t in self.texts for ids in (t.train, t.val)), model)
        return model

    def lines(self, tokenizer: Tokenizer) -> Iterator[str]:
        """What there is, for people."""
        shares = self.pattern.shares if self.pattern else (None,)
        for text, share in zip(self.texts, shares, strict=True):
            yield (
                f"{text.name}: {len(text.train):,} training and {len(text.val):,} validation tokens"
                + (f", {share:.4%} of the samples" if share else "")
                + f", {tokenizer.kind} vocabulary of {tokenizer.vocab_size:,}"
            )


def open_texts(
    folder: RunFolder, data: DataConfig, facts: dict[str, Any], signals: Signals
) -> tuple[Texts, Tokenizer]:
    """The run's ids and tokenizer: made or found at its first start, checked against it afterwards.

    Raises:
      ConfigError: Text, folders or tokenizer have changed since the run began or do not fit
        together, or an option does not apply to them.
      ResourceError: The hub or the storage refused.
      Interrupted: A signal came.
    """
    if data.mixture is not None:
        texts, tokenizer = _open_folders(folder, data, facts, data.mixture)
    elif data.path is not None and is_token_folder(data.path):
        texts, tokenizer = _open_folders(folder, data, facts, {data.path: 1.0})
        texts = dataclasses.replace(texts, pattern=None)
    else:
        file, tokenizer = open_data(folder, data, facts, signals)
        texts = Texts((_text(file),), file.vocab_size)
    boundary = Boundary.of(tokenizer) if data.mask_documents else None
    return dataclasses.replace(texts, boundary=boundary), tokenizer


def first_ids(run: RunFolder, data: DataConfig, tokenizer: Tokenizer, n: int) -> list[int]:
    """The first n validation ids of a started run's first text; without any, training ids.

    Raises:
      ConfigError: They are not there any more.
    """
    names = sorted(map(str, data.mixture)) if data.mixture else [data.path]
    if is_token_folder(names[0]):
        found = open_token_folder(str(names[0]), tokenizer)
    else:
        found = open_tokens(tokens_file(run), tokenizer=tokenizer)
    return [int(i) for i in (found.val if len(found.val) > 1 else found.train)[:n]]


def _text(file: TokenFile) -> Text:
    return Text(file.path.name, file.train, file.val, file.train_weights, file.val_weights)


def _open_folders(
    run: RunFolder, data: DataConfig, facts: dict[str, Any], weights: Mapping[str, float]
) -> tuple[Texts, Tokenizer]:
    """Token folders by name, in the order of their names: that of the configuration is no fact."""
    _check_options(data)
    weights = {str(name): weight for name, weight in weights.items()}
    names = sorted(weights)
    tokenizer = own_tokenizer(run, facts)
    if tokenizer is None and data.tokenizer != PLAIN.tokenizer:
        bytes_ = data.tokenizer == "byte"
        tokenizer = ByteTokenizer() if bytes_ else load_tokenizer(data.tokenizer)
    folders: list[TokenFolder] = []
    for name in names:
        if not is_token_folder(name):
            raise ConfigError(
                f"{name} is no folder of prepared tokens",
                where="data.mixture",
                fix=f"jaxgpt prepare {name} --data.path=TEXT",
            )
        folders.append(open_token_folder(name, tokenizer))
    first = folders[0]
    for other in folders[1:]:
        if other.tokenizer.fingerprint != first.tokenizer.fingerprint:
            raise ConfigError(
                f"{first.path} has the {first.tokenizer.kind} tokenizer "
                f"{first.tokenizer.fingerprint[:12]}, {other.path} the {other.tokenizer.kind} "
                f"tokenizer {other.tokenizer.fingerprint[:12]}",
                fix="prepare both with one --data.tokenizer",
            )
    sources = {name: found.source for name, found in zip(names, folders, strict=True)}
    check_source(facts, first.source if data.mixture is None else sources, str(first.path))
    if tokenizer is None or not run.tokenizer_path.exists():
        first.tokenizer.save(run.tokenizer_path)
    check_tokenizer(run, first.tokenizer, facts)
    texts = [Text(n, _shared(f.train), _shared(f.val)) for n, f in zip(names, folders, strict=True)]
    pattern = Pattern.of([weights[name] for name in names])
    return Texts(tuple(texts), first.vocab_size, pattern), first.tokenizer


def _shared(ids: np.ndarray | ShardedIds) -> ShardedIds:
    """Ids of files that are not the run's: where one shrinks, it must not say to delete it."""
    return ids if isinstance(ids, ShardedIds) else ShardedIds((ids,))


def _check_options(data: DataConfig) -> None:
    """Refuse what says how a text is read: it would be ignored, and the user not know it."""
    names = [field.name for field in dataclasses.fields(data) if field.name not in OF_FOLDERS]
    odd = [name for name in names if getattr(data, name) != getattr(PLAIN, name)]
    if data.tokenizer == "bpe":  # is trained on a text
        odd.append("tokenizer")
    if odd:
        said = ", ".join(f"{name}={getattr(data, name)}" for name in odd)
        values = [(name, getattr(PLAIN, name)) for name in odd]
        raise ConfigError(
            f"{said}: of no use with prepared tokens, which are read as they are",
            where=str(data.path or "data.mixture"),
            fix=" ".join(f"--data.{k}={'null' if v is None else v}" for k, v in values),
        )
