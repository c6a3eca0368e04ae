# SPDX-License-Identifier: Apache-2.0
"""What parts of the model say: layer by layer, head by head, and where heads look.

The logit lens reads the stream between the layers as if it were the last; direct logit attribution
splits a logit difference into what each head and FFN writes; the induction score finds the heads
that look for what came after an earlier occurrence. The pictures are in `plots_inside.py`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxgpt.boxes.norm import NoNorm
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig, forward
from jaxgpt.shapes import Key, Params
from jaxgpt.study.ablation import logit_difference
from jaxgpt.study.inside import site_shapes


@functools.partial(jax.jit, static_argnames="cfg")
def logit_lens(
    cfg: ModelConfig, params: Params, tokens_BT: Int[Array, "B T"]
) -> Float[Array, "depths B T V"]:
    """Logits that the final norm and the head read from the stream before each layer.

    Args:
      cfg: The model.
      params: Its parameters.
      tokens_BT: Token ids.

    Returns:
      A row for the stream before each layer, and the model's own logits as the last; without
      padding of the vocabulary.

    Source: nostalgebraist 2020,
      https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru/interpreting-gpt-the-logit-lens
    Cost: a forward pass, a readout for each layer, and 4 (L + 1) B T V bytes.
    """
    last = f"block_{cfg.n_layers - 1}/out"
    sites = [f"block_{i}/in" for i in range(cfg.n_layers)] + [last]
    streams = forward(cfg, params, tokens_BT, capture=sites).captured

    def read(x_BTD: Array) -> Array:  # all before the patch is computed for nobody: XLA drops it
        logits_BTV = forward(cfg, params, tokens_BT, patch={last: x_BTD}).logits_BTV
        return logits_BTV[..., : cfg.vocab_size]

    return jax.lax.map(read, jnp.stack([streams[site] for site in sites]))


class Attribution(NamedTuple):
    """A logit difference and what it is the sum of, for each row.

    Attributes:
      heads: By layer, of each head; none if the attention of some layer has no site `heads`.
      attention: By layer, of all heads together.
      ffn: By layer.
      embedding: Of the token embedding, with position vectors.
      bias: Of the biases of norms, output projections and head.
      total: The difference, before a soft cap of the head.
    """

    heads: tuple[Float[Array, "B N"], ...]
    attention: Float[Array, "L B"]
    ffn: Float[Array, "L B"]
    embedding: Float[Array, " B"]
    bias: Float[Array, " B"]
    total: Float[Array, " B"]


@functools.partial(jax.jit, static_argnames="cfg")
def direct_attribution(
    cfg: ModelConfig,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    answer_B: Int[Array, " B"],
    other_B: Int[Array, " B"],
) -> Attribution:
    """What each head and FFN writes to a logit difference at the last token by itself.

    What the norms of the stream multiply with is held as it is in this call. Then the difference is
    a sum of what every part adds to the stream, and of a constant; what a part does by way of later
    ones counts as theirs.

    Args:
      cfg: The model.
      params: Its parameters.
      tokens_BT: Prompts.
      answer_B: A next token of each.
      other_B: Another one.

    Raises:
      ConfigError: The final norm has no site `rate` to be held at.

    Source: Elhage et al. 2021, "Logit contributions",
      https://transformer-circuits.pub/2021/framework/index.html
    Numerics: the parts add up to `total` within the rounding of their sum.
    Cost: three forward passes and a backward pass.
    """
    linear = _uncapped(cfg)
    known = site_shapes(cfg, *tokens_BT.shape)
    if "final_norm/rate" not in known and not isinstance(cfg.final_norm, NoNorm):
        name = type(cfg.final_norm).__name__
        raise ConfigError(f"{name} is not linear", fix='tap_of(self, "rate") as in LayerNorm')
    layers = [f"block_{i}" for i in range(cfg.n_layers)]
    by_head = all(f"{layer}/attention/heads" in known for layer in layers)
    read = [f"{layer}/attention/{'heads' if by_head else 'out'}" for layer in layers]
    parts = ["position/out", *read, *(f"{layer}/ffn/out" for layer in layers)]
    rates = [site for site in known if site.endswith("/rate")]
    found = forward(linear, params, tokens_BT, capture=[*parts, *rates]).captured
    frozen = {site: found[site] for site in rates}

    def differ(values: dict[str, Array]) -> tuple[Array, Array]:
        # Every part is put in its place, so that none depends on another: what is left of the
        # model is linear, up to a constant.
        logits_BTV = forward(linear, params, tokens_BT, patch={**frozen, **values}).logits_BTV
        difference_B = logit_difference(logits_BTV, answer_B, other_B)
        return difference_B.sum(), difference_B

    values = {site: found[site] for site in parts}
    slopes, total_B = jax.grad(differ, has_aux=True)(values)
    share = {site: (values[site] * slopes[site]).sum(-1).sum(1) for site in parts}
    zeros = jax.tree.map(jnp.zeros_like, values)
    whole = [share[site].reshape(len(tokens_BT), -1).sum(1) for site in read]
    return Attribution(
        heads=tuple(share[site] for site in read) if by_head else (),
        attention=jnp.stack(whole),
        ffn=jnp.stack([share[f"{layer}/ffn/out"] for layer in layers]),
        embedding=share["position/out"],
        bias=differ(zeros)[1],
        total=total_B,
    )


@functools.partial(jax.jit, static_argnames=("cfg", "length", "batch", "lowest", "begin_ids"))
def induction_scores(
    cfg: ModelConfig,
    params: Params,
    key: Key,
    *,
    length: int = 25,
    batch: int = 8,
    lowest: int = 0,
    begin_ids: tuple[int, ...] = (),
) -> Float[Array, "L N"]:
    """How much each head attends to the token that followed the same token before.

    Rows are random tokens, said twice. The score is the mean, over the second time, of the
    attention probability from each token to the one behind its first occurrence; of a head that
    looks at all tokens alike it is about 0.7 / length.

    Args:
      cfg: The model.
      params: Its parameters.
      key: Draws the tokens.
      length: Of what is repeated, in tokens.
      batch: Rows.
      lowest: The first id that may be drawn; those below are control tokens.
      begin_ids: In front of each row, where the model wants it: the BOS token.

    Returns:
      From 0 to 1; NaN for heads that a layer does not have.

    Raises:
      ConfigError: A row is longer than the context, or no id is left to draw.

    Source: Olsson et al. 2022, "prefix matching score", https://arxiv.org/abs/2209.11895
    Cost: a forward pass of rows of 2 * length tokens, with the probabilities of all layers.
    """
    total, vocab_size = len(begin_ids) + 2 * length, cfg.dims().vocab_size
    if total > cfg.context_length or not 0 <= lowest < vocab_size:
        raise ConfigError(
            f"{total} tokens with ids from {lowest} on",
            fix=f"at most {cfg.context_length} tokens, ids below {vocab_size}",
        )
    half_BT = jax.random.randint(key, (batch, length), lowest, vocab_size)
    begin_BT = jnp.tile(jnp.array(begin_ids, half_BT.dtype), (batch, 1))
    tokens_BT = jnp.concatenate([begin_BT, half_BT, half_BT], 1)
    sites = [f"block_{i}/attention/probs" for i in range(cfg.n_layers)]
    found = forward(cfg, params, tokens_BT, capture=sites).captured
    query_T = len(begin_ids) + length + jnp.arange(length)
    means = [found[site][:, :, query_T, query_T - length + 1].mean((0, 2)) for site in sites]
    return rows(means)


def rows(parts: Sequence[Float[Array, " n"]]) -> Float[Array, "L N"]:
    """Vectors as the rows of a matrix, filled up with NaN."""
    most = max(map(len, parts))
    return jnp.stack([jnp.pad(p, (0, most - len(p)), constant_values=jnp.nan) for p in parts])


def _uncapped(cfg: ModelConfig) -> ModelConfig:
    """The model without the soft cap of its head."""
    if getattr(cfg.head, "softcap", None) is None:
        return cfg
    return dataclasses.replace(cfg, head=dataclasses.replace(cfg.head, softcap=None))  # type: ignore[call-arg]
