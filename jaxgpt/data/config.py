# SPDX-License-Identifier: Apache-2.0
"""What to train on: the knobs of a run's data."""

import dataclasses

from jaxgpt.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text, its tokenizer, and how it is split. The order of batches follows `train.seed`."""

    path: str | None = None  # text file or folder; None: the language reference inside CPython
    tokenizer: str = "char"  # char, byte, bpe (trained on the text), or a tokenizer.json
    vocab_size: int = 4096  # of a bpe tokenizer that is trained here
    val_fraction: float = 0.1  # the last part of the text, by characters, is for validation
    encoding: str = "utf-8"  # of the text's files
    errors: str = "strict"  # undecodable bytes: strict (an error), replace or ignore

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise ConfigError(f"val_fraction={self.val_fraction} must be between 0 and 1")
        if self.vocab_size < 257:
            raise ConfigError(f"vocab_size={self.vocab_size} is below 257: 256 bytes, end of text")
        if self.errors not in ("strict", "replace", "ignore"):
            raise ConfigError(f"errors={self.errors!r}", fix="strict, replace or ignore")
