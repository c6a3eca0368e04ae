# SPDX-License-Identifier: Apache-2.0
"""From texts to the ids that are scored, as transformers' tokenizers and lm-evaluation-harness do.

* Context and continuation are encoded together, and the continuation is what stands behind as many
  ids as the context has by itself: a word is spelled as it is in running text. White space at the
  end of a context belongs to the continuation (" word" is one token, "word" another).
* What the tokenizer puts before every text (BOS) stands before the context.
* Names of control tokens in a text are these tokens, as in transformers.
* An empty context is the BOS token, else the end of text: what a text begins behind.

Source: `TemplateLM._encode_pair` of https://github.com/EleutherAI/lm-evaluation-harness (0.4).
"""

from collections.abc import Callable

import numpy as np

from jaxgpt.data.base import Tokenizer, begin_ids
from jaxgpt.errors import ConfigError
from jaxgpt.sample.text import start_ids


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text, names of control tokens included, nothing put in front.

    Raises:
      ConfigError: The tokenizer cannot encode all of it.
    """
    encode_all: Callable[[str], np.ndarray]
    encode_all = getattr(tokenizer, "encode_controls", tokenizer.encode)
    return [int(i) for i in encode_all(text)] if text else []


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Ids of a context, and of what comes behind it; see the module's rules.

    Raises:
      ConfigError: The continuation has no token of its own, or cannot be encoded.
    """
    stripped = context.rstrip()
    continuation, context = context[len(stripped) :] + continuation, stripped
    begin = list(begin_ids(tokenizer))
    if context:
        whole, before = encode(tokenizer, context + continuation), encode(tokenizer, context)
        ids = begin + before, whole[len(before) :]
    else:
        start, found = start_ids(tokenizer), encode(tokenizer, continuation)
        ids = (found[:1], found[1:]) if start == found[:1] else (start, found)
    if not ids[1]:
        raise ConfigError(
            f"{continuation[:40]!r} behind {context[-40:]!r} has no token of its own",
            fix="another continuation",
        )
    return ids
