# SPDX-License-Identifier: Apache-2.0
"""Tokenizers by name: those of public models, fetched from the hub into its cache (`hub.ask`).

Left out: any other model's; its folder will do.
"""

from collections.abc import Callable
from pathlib import Path

from jaxgpt.data.hub import ask
from jaxgpt.data.pretrained import PretrainedTokenizer, load_folder_tokenizer

NAMED = {"gpt2": "openai-community/gpt2"}
WORDS = {
    "type": "model",
    "weights": False,
    "noun": "tokenizer",
    "named": "OWNER/NAME",
    "local": "--data.tokenizer=FOLDER with its tokenizer.json",
    "patience": None,
}


def fetch_tokenizer(
    name: str, timeout_s: float = 10.0, *, check: Callable[[], None] = lambda: None
) -> PretrainedTokenizer:
    """The tokenizer of that name.

    Args:
      name: One of `NAMED`.
      timeout_s: Seconds without progress until the hub is given up.
      check: Called several times a second while the hub is waited for; what it raises ends that.

    Raises:
      ConfigError: The hub has it no longer.
      ResourceError: The hub cannot be reached, stalls, breaks off, or refuses for now.
    """
    *_, message = ask(WORDS | {"repo": NAMED[name], "revision": None}, timeout_s, check)
    return load_folder_tokenizer(Path(message["folder"]))
