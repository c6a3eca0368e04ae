# SPDX-License-Identifier: Apache-2.0
"""What to train on: the knobs of a run's data."""

import dataclasses

from jaxgpt.errors import ConfigError

SHARD_TOKENS = 100_000_000
"""The most tokens of a file of `jaxgpt prepare`."""

BPE_SAMPLE_BYTES = 50_000_000
"""What `jaxgpt prepare` trains a bpe tokenizer on."""

FORMATS = ("text", "chat", "prompt-completion")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text, its tokenizer, and how it is split. The order of batches follows `train.seed`."""

    path: str | None = None  # file, folder (of text or prepared tokens), hf://NAME; None: built in
    mixture: dict[str, float] | None = None  # {folder of prepared tokens: weight}, in place of path
    mask_documents: bool = False  # documents in one window do not see each other
    tokenizer: str = "char"  # char, byte, bpe (trained here), gpt2, pretrained, a file or folder
    vocab_size: int = 4096  # of a bpe tokenizer that is trained here
    format: str = "text"  # text, or rows of which answers are trained: chat, prompt-completion
    val_fraction: float = 0.1  # the last part of the text, by characters, is for validation
    encoding: str = "utf-8"  # of the text's files
    errors: str = "strict"  # undecodable bytes: strict (an error), replace or ignore
    max_chars: int | None = None  # take this much of the text, from its beginning
    column: str = "text"  # of parquet, jsonl and hub sets: where the text is
    rows: str = "lines"  # of such sets: lines of one document, or documents
    subset: str | None = None  # of a hub set: its configuration
    split: str = "train"  # of a hub set; its beginning trains here, its end validates
    stream: bool = False  # of a hub set: read what is needed, and store nothing
    hub_timeout: float = 10.0  # seconds without progress until the hub is given up

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise ConfigError(f"val_fraction={self.val_fraction} must be between 0 and 1")
        if self.vocab_size < 257:
            raise ConfigError(f"vocab_size={self.vocab_size} is below 257: 256 bytes, end of text")
        if self.errors not in ("strict", "replace", "ignore"):
            raise ConfigError(f"errors={self.errors!r}", fix="strict, replace or ignore")
        if self.rows not in ("lines", "documents"):
            raise ConfigError(f"rows={self.rows!r}", fix="--data.rows=lines or documents")
        if self.format not in FORMATS:
            raise ConfigError(f"format={self.format!r}", fix=f"--data.format={', '.join(FORMATS)}")
        if self.format != "text" and (self.column, self.rows) != ("text", "lines"):
            raise ConfigError(
                f"column and rows are for format=text; format={self.format} names its own columns",
                fix="leave them out",
            )
        if self.mask_documents and self.format == "chat":
            raise ConfigError(
                "mask_documents is for format=text and prompt-completion: a chat template may end "
                "every turn with the token that ends a document",
                fix="--data.mask_documents=false",
            )
        if self.mixture is not None:
            self._check_mixture()
        if self.max_chars is not None and self.max_chars < 1:
            raise ConfigError(f"max_chars={self.max_chars} must be at least 1")
        if not 0 < self.hub_timeout < float("inf"):
            raise ConfigError(f"hub_timeout={self.hub_timeout} must be a number above 0")

    def _check_mixture(self) -> None:
        if self.path is not None:
            raise ConfigError(
                f"data.path={self.path} and data.mixture exclude each other",
                fix="--data.path=null, or leave the mixture out",
            )
        weights = self.mixture or {}
        if not weights or not all(0 < weight < float("inf") for weight in weights.values()):
            raise ConfigError(
                f"data.mixture={weights} must give each folder a weight above 0",
                fix="--data.mixture='{FOLDER: 0.7, OTHER: 0.3}'",
            )
