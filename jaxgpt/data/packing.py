# SPDX-License-Identifier: Apache-2.0
"""Documents in a row of ids: where each begins, read from the ids themselves.

A window of a long text holds the end of one document, whole ones, and the beginning of another.
With a `Boundary` they do not see each other, positions count from 0 in each, and the pair of the
last id of one and the first of the next is not trained.
"""

from dataclasses import dataclass

import numpy as np

from jaxgpt.data.base import Tokenizer, begin_ids
from jaxgpt.errors import ConfigError


@dataclass(frozen=True)
class Boundary:
    """A document begins behind the id `end`, and before the id `begin`.

    Where both are one id, a document begins between two of them: the first ends a document, the
    second begins the next.

    Attributes:
      end: The id that ends a document, and belongs to it; None: there is none.
      begin: The id that begins one (BOS); None: there is none.
    """

    end: int | None
    begin: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Boundary":
        """That of a tokenizer's token files.

        Raises:
          ConfigError: It has neither an end-of-text token nor a BOS.
        """
        boundary = cls(tokenizer.eot_id, next(iter(begin_ids(tokenizer)), None))
        if boundary == cls(None, None):
            raise ConfigError(
                f"mask_documents needs a token between documents, and the {tokenizer.kind} "
                "tokenizer has neither an end of text nor a BOS",
                fix="--data.tokenizer=bpe, or that of a public model",
            )
        return boundary

    def begins(self, ids_BT: np.ndarray) -> np.ndarray:
        """True where a document begins; a row's first id always begins one."""
        first_BT = np.ones(ids_BT.shape, bool)
        behind_end, before_begin = ids_BT[:, :-1] == self.end, ids_BT[:, 1:] == self.begin
        one = self.end == self.begin
        first_BT[:, 1:] = behind_end & before_begin if one else behind_end | before_begin
        return first_BT

    def split(self, ids_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The document of each id, counted from 1 in each row, and its position in it; int32."""
        first_BT, place_T = self.begins(ids_BT), np.arange(ids_BT.shape[1], dtype=np.int32)
        begin_BT = np.maximum.accumulate(np.where(first_BT, place_T, 0), axis=1)
        return first_BT.cumsum(1, dtype=np.int32), place_T - begin_BT
