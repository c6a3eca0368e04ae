# SPDX-License-Identifier: Apache-2.0
"""What a box is: the contracts between the boxes and the skeleton.

A box is a frozen dataclass of its own knobs; `build` makes a Flax linen module from it. Subclass a
kind below in any file: nothing is registered. `jaxgpt.testing` checks the contracts of all boxes.
What people may want to see or change inside a box is a site, `jaxgpt.taps.tap`.

| kind        | its module's call                                                            |
| ----------- | ---------------------------------------------------------------------------- |
| NormBox     | `x -> x`                                                                     |
| PositionBox | `(x_BTD, pos_BT) -> x_BTD`, once, after the embedding; see also its methods  |
| AttentionBox| `(x_BTD, visibility, cache, dropout_key) -> (y_BTD, cache)`; owns its cache  |
| FFNBox      | `(x_BTD, valid_BT, dropout_key) -> (y_BTD, aux)`                             |
| BlockBox    | `(x_BTD, visibility, cache, dropout_key) -> (x_BTD, cache, aux)`             |
| EmbedBox    | `(tokens_BT, dtype) -> x_BTD`; `attend(x_BTD) -> logits_BTV` for a tied head   |
| HeadBox     | `x_BTD -> logits_BTV`                                                        |
| InitBox     | builds no module: initialisers for the parameters of the others              |
| RopeScaling | builds no module: what a rotary position box does beyond the trained length  |

Modules compute in the dtype of `x`, keep parameters in float32 and cast them where they are used.
Mode is a call argument: a `dropout_key` means training, no `cache` means no cache. A box that
cannot do something raises; it never ignores an argument. `aux` is a small dict: an entry whose name
ends in `_loss` is added to the training loss, the others are metrics.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import flax.linen as nn
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxgpt.errors import ConfigError
from jaxgpt.shapes import Params

if TYPE_CHECKING:
    from jaxgpt.layers import Layer


@dataclasses.dataclass(frozen=True)
class Dims:
    """All that a box may know of the model around it.

    Attributes:
      d_model: Width of the residual stream.
      n_layers: Number of blocks.
      vocab_size: Number of tokens, without padding.
      padded_vocab_size: Rows of the embedding table.
      context_length: Longest sequence, in tokens.
      dropout: Rate at each of GPT-2's dropout sites.
      init: Where initialisers come from.
      position: Attention calls its `rotate`, `score_scale` and `bias`, and nothing else of it.
      width_ratio: d_model over `mup_base`; 1 without muP.
    """

    d_model: int
    n_layers: int
    vocab_size: int
    padded_vocab_size: int
    context_length: int
    dropout: float
    init: "InitBox"
    position: "PositionBox"
    width_ratio: float = 1.0

    def fan_at_base(self, fan_in: int) -> int:
        """Inputs of a kernel at the width where muP begins; `fan_in` without muP."""
        return max(1, round(fan_in / self.width_ratio))


class Box:
    """Base of all boxes; checks are in `__post_init__` (own knobs) and `check` (the model)."""

    def check(self, dims: Dims) -> None:
        """Raise `jaxgpt.errors.ConfigError` if the box does not fit into this model."""

    def joined(self, params: Params) -> Params:
        """Its parameters for decoding, products of one input in one; usually as they are."""
        return params


class InitBox(Box):
    """Initialisers by the role of a parameter; see `boxes/init.py`."""

    def kernel(self, dims: Dims, *, residual: bool) -> Initializer:
        """For [in, out] matrices; `residual` marks those that write to the residual stream.

        Their variance goes with 1/in, or with 1/dims.width_ratio.
        """
        raise NotImplementedError

    def bias(self, fan_in: int) -> Initializer:
        """For the bias beside a kernel with `fan_in` inputs."""
        raise NotImplementedError

    def embedding(self) -> Initializer:
        """For [rows, d_model] tables of tokens and positions."""
        raise NotImplementedError


class NormBox(Box):
    """Normalises the last axis."""

    def build(self, name: str | None = None) -> nn.Module:
        """The module `x -> x`, of the same shape and dtype."""
        raise NotImplementedError


class PositionBox(Box):
    """Where order enters the model: into the embedding, the queries and keys, or the scores.

    A layer edit may change everything but `build`, which the model calls once.
    """

    def build(self, dims: Dims, name: str | None = None) -> nn.Module:
        """The module `(x_BTD, pos_BT) -> x_BTD` behind the embedding; the identity by default."""
        return _Unchanged(name=name)

    def rotate(
        self, x_BTNH: Float[Array, "B T N H"], pos_BT: Int[Array, "B T"]
    ) -> Float[Array, "B T N H"]:
        """Queries or keys with their positions in them; unchanged by default."""
        return x_BTNH

    def check_head(self, head_dim: int) -> None:
        """Raise `jaxgpt.errors.ConfigError` if heads of this width cannot be rotated."""

    def score_scale(self) -> float:
        """A further factor on the scores."""
        return 1.0

    def bias(self, n_heads: int) -> Any:
        """Scores to add, a function `(q_pos_BT, k_pos_BS) -> (B, N, T, S)`, or None."""
        return None

    def at(self, length: int) -> "PositionBox":
        """This box for a call that declares its longest position, in tokens; usually itself."""
        return self


class RopeScaling(Box):
    """How a rotary position box serves contexts longer than those it was trained on."""

    def rates(self, rate_I: Float[Array, " I"], theta: float) -> Float[Array, " I"]:
        """Radians per token of each pair of channels, from those of the plain rope."""
        return rate_I

    def magnitude(self) -> float:
        """Factor on the rotated queries and keys."""
        return 1.0

    def score_scale(self) -> float:
        """Factor on the scores."""
        return 1.0

    def at(self, length: int) -> "RopeScaling":
        """This box for a call that declares its longest position, in tokens; usually itself."""
        return self


class _Unchanged(nn.Module):
    @nn.compact
    def __call__(
        self, x_BTD: Float[Array, "B T D"], pos_BT: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        return x_BTD


class AttentionBox(Box):
    """Mixes tokens. What its cache holds is its own affair: the skeleton only passes it on."""

    def build(self, dims: Dims, name: str | None = None) -> nn.Module:
        """The module `(x_BTD, visibility, cache, dropout_key) -> (y_BTD, cache)`."""
        raise NotImplementedError

    def init_cache(self, dims: Dims, batch: int, length: int, dtype: DTypeLike) -> Any:
        """An empty cache for `length` tokens, a pytree.

        Raises:
          NotImplementedError: By default: this attention cannot decode with a cache.
        """
        raise NotImplementedError(f"{type(self).__name__} has no cache and cannot be sampled from")


class FFNBox(Box):
    """Works on each token for itself."""

    def build(self, dims: Dims, name: str | None = None) -> nn.Module:
        """The module `(x_BTD, valid_BT, dropout_key) -> (y_BTD, aux)`."""
        raise NotImplementedError

    def update(self, params: Params, aux: Mapping[str, Array]) -> Params:
        """Parameters after a training step that follow a rule instead of a gradient; usually none.

        Args:
          params: Those of one layer's FFN, after the optimizer's update.
          aux: What its module returned, summed over the micro-batches of the step.
        """
        return params


class BlockBox(Box):
    """How attention, FFN and norms are wired to the residual stream."""

    def build(self, dims: Dims, layer: "Layer", name: str | None = None) -> nn.Module:
        """The module `(x_BTD, visibility, cache, dropout_key) -> (x_BTD, cache, aux)`."""
        raise NotImplementedError


class EmbedBox(Box):
    """Tokens to vectors."""

    def build(self, dims: Dims, name: str | None = None) -> nn.Module:
        """The module `(tokens_BT, dtype) -> x_BTD`, with `attend(x_BTD) -> logits_BTV`."""
        raise NotImplementedError


class HeadBox(Box):
    """Vectors to logits; those of padding rows are -inf."""

    def build(self, dims: Dims, embed: nn.Module, name: str | None = None) -> nn.Module:
        """The module `x_BTD -> logits_BTV`; a tied head uses the table of `embed`."""
        raise NotImplementedError


def check_positive(**values: int | float | None) -> None:
    """Raise `ConfigError` unless each value is positive; None passes."""
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value} must be positive")


def check_choices(box: Any) -> None:
    """Raise `ConfigError` where a field, here or in a box inside, is none of its type's words."""
    hints = typing.get_type_hints(type(box))
    for name in (field.name for field in dataclasses.fields(box)):
        value, hint, words = getattr(box, name), hints[name], typing.get_args(hints[name])
        if isinstance(value, Box):
            check_choices(value)
        elif typing.get_origin(hint) is typing.Literal and value not in words:
            raise ConfigError(f"{name}={value!r} is not known", fix=f"one of {list(words)}")
