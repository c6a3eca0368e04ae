# SPDX-License-Identifier: Apache-2.0
"""The next-token loss, in nats, and the arithmetic between nats, bits and perplexity."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxgpt.placing import active, place
from jaxgpt.shapes import wide


def token_nats(
    logits_BTV: Float[Array, "B T V"], targets_BT: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """-log p(target) of each token, in nats and float32.

    Args:
      logits_BTV: In any float dtype; padding of the vocabulary is -inf and takes no probability.
      targets_BT: Ids in [0, vocab_size); an id outside gives inf or the log-sum-exp, never another
        token's loss.

    Numerics: the target's logit is picked by comparing an iota with the label. A gather would put a
      scatter into a (B, T, V) array into the backward pass; the comparison fuses.
    """
    return token_terms(logits_BTV, targets_BT)[0]


def token_terms(
    logits_BTV: Float[Array, "B T V"], targets_BT: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`token_nats`, and the logarithm of the softmax's denominator that they were made with.

    The square of the second is the z-loss: it keeps the logits near to log-probabilities.

    Source: Chowdhery et al. 2022 (PaLM), section 5, https://arxiv.org/abs/2204.02311
    """
    logits_BTV = wide(logits_BTV)
    ids_V = jnp.arange(logits_BTV.shape[-1])
    hit_BTV = ids_V[None, None] == targets_BT[..., None]
    target_BT = jnp.where(hit_BTV, logits_BTV, 0.0).sum(-1)
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    return log_z_BT - target_BT, log_z_BT


def chunked_terms(
    logits: Callable[[Float[Array, "B t D"]], Float[Array, "B t V"]],
    x_BTD: Float[Array, "B T D"],
    targets_BT: Int[Array, "B T"],
    chunk: int,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`token_terms` with the logits of at most `chunk` tokens of each row at a time.

    Forward and backward pass make the logits of each chunk, so that there is no array (B, T, V);
    that is one more product with the head's matrix, whose gradient is added up in its own dtype. On
    a mesh each chunk sends that gradient: take as few chunks as memory allows.

    Tokens are chunked, not the vocabulary: a token's softmax stays in one piece, and so its loss is
    the same to rounding whatever the head does with logits (cap, bias, padding), the vocabulary can
    be split over devices besides, and the products stay large.

    Args:
      logits: The head: of some tokens, each by itself.
      x_BTD: What it reads.
      targets_BT: Ids in [0, vocab_size).
      chunk: Tokens of a row; rows are cut into equal pieces, the last one filled up.
    """
    layout, (B, T) = active(), targets_BT.shape
    parts = layout.size("context") if layout is not None else 1  # of T: each chunk has some of all
    T_part = T // parts
    n = -(-T_part // max(chunk // parts, 1))
    filler = -T_part % n

    def split(x: Array) -> Array:
        rest = x.shape[2:]
        x = x.reshape(B, parts, T_part, *rest)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, filler), *((0, 0) for _ in rest)))
        x = jnp.moveaxis(x.reshape(B, parts, n, -1, *rest), 2, 0)
        return x.reshape(n, B, -1, *rest)

    def joined(x: Array) -> Array:
        x = jnp.moveaxis(x.reshape(n, B, parts, -1), 0, 2).reshape(B, parts, -1)
        return x[..., :T_part].reshape(B, T)

    @jax.checkpoint
    def terms(piece: tuple[Array, Array]) -> tuple[Array, Array]:
        return token_terms(logits(place(piece[0], "BTD")), piece[1])

    nats, log_z = jax.lax.map(terms, (split(x_BTD), split(targets_BT)))
    return joined(nats), joined(log_z)


def next_token_loss(
    logits_BTV: Float[Array, "B T V"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Mean of `token_nats` over tokens, each counted by its weight (usually 0 or 1).

    With all weights zero the loss is 0, not NaN.
    """
    nats_BT = token_nats(logits_BTV, targets_BT)
    if weights_BT is None:
        return nats_BT.mean()
    return (nats_BT * weights_BT).sum() / jnp.maximum(weights_BT.sum(), 1.0)


def aux_loss(aux: dict[str, dict[str, Array]]) -> Array:
    """Sum of all entries of the layers' `aux` whose name ends in `_loss`; 0.0 without any."""
    terms = [v for layer in aux.values() for name, v in layer.items() if name.endswith("_loss")]
    return jnp.asarray(sum(terms, start=jnp.zeros(())))


def perplexity(nats: float, count: int) -> float:
    """exp(nats / count): per token or per word, by what is counted. Say which when you print it."""
    return math.exp(nats / count)


@dataclasses.dataclass(frozen=True)
class Score:
    """The loss of a text, with every denominator that it is quoted by.

    Attributes:
      nats: Summed over all scored tokens.
      n_tokens: Scored tokens.
      n_chars: Characters that these tokens stand for; special tokens stand for none.
      n_bytes: Bytes of UTF-8 that they stand for.
    """

    nats: float
    n_tokens: int
    n_chars: int
    n_bytes: int

    @property
    def nats_per_token(self) -> float:
        """The validation loss."""
        return self.nats / self.n_tokens

    def metrics(self) -> dict[str, float]:
        """All forms by their full names; inf where nothing was scored."""
        bits = self.nats / math.log(2)
        return {
            "val_nats_per_token": self.nats_per_token,
            "val_token_perplexity": perplexity(self.nats, self.n_tokens)
            if self.nats_per_token < 700
            else math.inf,
            "val_bits_per_char": bits / self.n_chars if self.n_chars else math.inf,
            "val_bits_per_byte": bits / self.n_bytes if self.n_bytes else math.inf,
        }
