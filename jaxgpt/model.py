# SPDX-License-Identifier: Apache-2.0
"""The skeleton: embed, L blocks, final norm, head. It only stacks; refinements edit a box.

`ModelConfig` names the boxes, `GPT` is the Flax module, and `forward` is the model as a pure
function of its parameters.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import (
    AttentionBox,
    BlockBox,
    Dims,
    EmbedBox,
    FFNBox,
    HeadBox,
    InitBox,
    NormBox,
    PositionBox,
    check_choices,
    check_positive,
)
from jaxgpt.boxes.block import PreNorm
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import MLP
from jaxgpt.boxes.head import Tied
from jaxgpt.boxes.init import Normal
from jaxgpt.boxes.norm import LayerNorm
from jaxgpt.boxes.position import Learned
from jaxgpt.errors import ConfigError
from jaxgpt.kernels import dropout
from jaxgpt.layers import Layer, LayerEdit
from jaxgpt.masks import Visibility
from jaxgpt.placing import place
from jaxgpt.readout import read_out
from jaxgpt.shapes import Key, Params
from jaxgpt.stack import Remat, Stack, fold, used
from jaxgpt.taps import tap, tapping


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer, a box for each part of the picture; checked when it is made."""

    vocab_size: int | None = 50_257  # tokens; None: as many as the tokenizer has
    context_length: int = 1024  # longest sequence, in tokens
    d_model: int = 768  # width of the residual stream
    n_layers: int = 12  # blocks
    dropout: float = 0.0  # rate behind the embedding, on attention probabilities, on each branch
    embed: EmbedBox = Embed()
    position: PositionBox = Learned()
    block: BlockBox = PreNorm()
    norm: NormBox = LayerNorm()
    attention: AttentionBox = GQA()
    ffn: FFNBox = MLP()
    final_norm: NormBox = LayerNorm()
    head: HeadBox = Tied()
    init: InitBox = Normal()
    edits: tuple[LayerEdit, ...] = ()  # for mixed stacks
    vocab_multiple: int = 128  # the table is padded to a multiple of it; 1: no padding
    mup_base: int | None = None  # muP: the d_model at which the rates were tuned; None: no muP

    def __post_init__(self) -> None:
        names = "vocab_size", "context_length", "d_model", "n_layers", "vocab_multiple", "mup_base"
        check_positive(**{name: getattr(self, name) for name in names})
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout} must be in [0, 1)")
        for edit in self.edits:
            if edit.start >= self.n_layers:
                raise ConfigError(f"a layer edit starts at {edit.start} of {self.n_layers} layers")
        for box in (self.embed, self.position, self.final_norm, self.head, self.init):
            check_choices(box)
            box.check(self.dims())
        first_of = {id(layer): i for i, layer in reversed([*enumerate(self.layers)])}
        for index in sorted(first_of.values()):  # equal layers without edits are one object
            layer = self.layers[index]
            for box in vars(layer).values():
                try:
                    check_choices(box)
                    box.check(self.dims(layer))
                except ConfigError as error:
                    raise ConfigError(error.what, where=f"layer {index}", fix=error.fix) from None

    @functools.cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The boxes of each block, after the edits."""
        base = Layer(self.block, self.norm, self.attention, self.ffn, self.position)
        return tuple(
            functools.reduce(lambda layer, edit: edit.apply(layer, i), self.edits, base)
            for i in range(self.n_layers)
        )

    def dims(self, layer: Layer | None = None) -> Dims:
        """What the boxes (of one layer) may know of the model."""
        vocab_size = self.vocab_size or 1
        return Dims(
            d_model=self.d_model,
            n_layers=self.n_layers,
            vocab_size=vocab_size,
            padded_vocab_size=-(-vocab_size // self.vocab_multiple) * self.vocab_multiple,
            context_length=self.context_length,
            dropout=self.dropout,
            init=self.init,
            position=self.position if layer is None else layer.position,
            width_ratio=self.d_model / (self.mup_base or self.d_model),
        )

    def build_block(
        self, index: int, name: str | None = None, rope_length: int | None = None
    ) -> nn.Module:
        """One block as a module, also for use inside a module of your own."""
        layer = self.layers[index]
        position = layer.position.at(rope_length or self.context_length)
        layer = dataclasses.replace(layer, position=position)
        return layer.block.build(self.dims(layer), layer, name=name)

    def init_caches(self, batch: int, length: int, dtype: DTypeLike = jnp.float32) -> tuple:
        """Empty caches for `length` tokens, one for each layer."""
        return tuple(
            layer.attention.init_cache(self.dims(layer), batch, length, dtype)
            for layer in self.layers
        )


class Output(NamedTuple):
    """What a call of the model returns.

    Attributes:
      logits_BTV: In the compute dtype; V is the padded vocabulary, padding is -inf.
      caches: The extended caches, one for each layer, or None without caches.
      aux: For each layer, `block_i`, the FFN's dict.
      captured: Values of the sites asked for, by path.
    """

    logits_BTV: Float[Array, "B T V"]
    caches: tuple | None
    aux: dict[str, dict[str, Array]]
    captured: dict[str, Array]


class GPT(nn.Module):
    """embed -> L x block -> final norm -> head. Edit boxes, not this class."""

    cfg: ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens_BT: Int[Array, "B T"] | None = None,
        *,
        embeddings_BTD: Float[Array, "B T D"] | None = None,
        pos_BT: Int[Array, "B T"] | None = None,
        segment_BT: Int[Array, "B T"] | None = None,
        prefix_B: Int[Array, " B"] | None = None,
        caches: tuple | int | None = None,
        dropout_key: Key | None = None,
        dtype: DTypeLike | None = None,
        rope_length: int | None = None,
        kernel: str = "auto",
        remat: Remat = "none",
        scan: bool = False,
        last_only: bool = False,
        headless: bool = False,
    ) -> Output:
        """Logits of the next token at every position; see `forward` for the arguments."""
        cfg, dims = self.cfg, self.cfg.dims()
        embed = cfg.embed.build(dims, name="embed")
        if (tokens_BT is None) == (embeddings_BTD is None):
            raise ValueError("give either tokens_BT or embeddings_BTD")
        x_BTD = embeddings_BTD if embeddings_BTD is not None else embed(tokens_BT, dtype)
        x_BTD = x_BTD.astype(dtype or x_BTD.dtype)
        visibility = Visibility.full(*x_BTD.shape[:2])
        if pos_BT is None and (segment_BT is not None or isinstance(caches, tuple)):
            raise ValueError("segments and caches need pos_BT, the position of each token")
        if any(given is not None for given in (pos_BT, segment_BT, prefix_B)):
            pos_BT = visibility.q_pos_BT if pos_BT is None else pos_BT
            visibility = Visibility.of(pos_BT, segment_BT, prefix_B)
        visibility = dataclasses.replace(visibility, kernel=kernel)
        if isinstance(caches, int):
            visibility, batch = visibility.first(), len(x_BTD)
            caches = cfg.init_caches(batch, caches, x_BTD.dtype)
        x_BTD = cfg.position.build(dims, name="position")(x_BTD, visibility.q_pos_BT)
        x_BTD = tap(self, "position/out", x_BTD)
        # Layers fold their index into the key; the embedding's site comes after the last of them.
        x_BTD = place(dropout(x_BTD, cfg.dropout, fold(dropout_key, cfg.n_layers)), "BTD")
        x_BTD, caches, aux = self._blocks(
            x_BTD, visibility, caches, dropout_key, rope_length, remat, scan
        )
        x_BTD = cfg.final_norm.build(name="final_norm")(x_BTD[:, -1:] if last_only else x_BTD)
        x_BTD = tap(self, "final_norm/out", x_BTD)
        return Output(x_BTD if headless else read_out(cfg, embed, x_BTD), caches, aux, {})

    def _blocks(
        self,
        x_BTD: Array,
        visibility: Visibility,
        caches: tuple | None,
        dropout_key: Key | None,
        rope_length: int | None,
        remat: Remat,
        scan: bool,
    ) -> tuple[Array, tuple | None, dict[str, dict[str, Array]]]:
        """The stack: unrolled and named, or called as functions of their parameters."""
        names = [f"block_{i}" for i in range(self.cfg.n_layers)]
        build = functools.partial(self.cfg.build_block, rope_length=rope_length)
        blocks = [build(i, name) for i, name in enumerate(names)]
        if (remat != "none" or scan) and not self.is_initializing():
            if caches is not None:
                raise ValueError("remat and scan are for training; caches need neither")
            params = [self.variables["params"][name] for name in names]
            stack = Stack(build, params, visibility, dropout_key, remat)
            x_BTD, aux = stack.run(x_BTD, self.cfg.layers if scan else None)
            return x_BTD, None, dict(zip(names, aux, strict=True))
        new_caches, aux = [], {}
        for i, block in enumerate(blocks):
            cache = None if caches is None else caches[i]
            x_BTD, cache, aux[names[i]] = block(x_BTD, visibility, cache, fold(dropout_key, i))
            x_BTD = place(x_BTD, "BTD")
            new_caches.append(cache)
        return x_BTD, None if caches is None else tuple(new_caches), aux


def forward(
    cfg: ModelConfig,
    params: Params,
    tokens_BT: Int[Array, "B T"] | None = None,
    *,
    capture: Sequence[str] = (),
    patch: Mapping[str, Any] | None = None,
    **call: Any,
) -> Output:
    """The model as a pure function.

    Args:
      cfg: The model.
      params: As `init_params` returns them.
      tokens_BT: Token ids in [0, vocab_size), or None with `embeddings_BTD`.
      capture: Patterns of sites to return in `captured`: "block_*/attention/probs".
      patch: By pattern of sites, values to put in their place or functions of what is there;
        see `jaxgpt.taps.Taps`.
      **call: Arguments of the module:
        embeddings_BTD: In place of the embedded tokens.
        pos_BT: Position of each token, -1 for padding; None: 0..T-1. Required with caches that
          exist and with segments.
        segment_BT: Document of each token in a packed row; documents do not see each other.
        prefix_B: Length of each row's prefix, seen by all of the row: a prefix-LM, which is a
          different model (`jaxgpt.masks`).
        caches: From `cfg.init_caches`, or a number of slots for new ones, in the compute dtype,
          whose first tokens these are and see no others; returned extended.
        dropout_key: Turns training mode on, dropout above all; the same key gives the same masks.
        dtype: Compute dtype; None: that of the embedding table.
        rope_length: The longest position that calls with these weights and caches will see, for
          ropes that follow it (dynamic NTK); None: context_length.
        kernel: Attention kernel, "auto" to choose (`jaxgpt.kernels`).
        remat: What the backward pass computes again: none, dots or full (`jaxgpt.stack`).
        scan: Scan over the repeating layers: less compile time for deep models.
        last_only, headless: Logits of the last position alone; none, but what the head reads.

    Raises:
      ValueError: A site that is not there, sites together with remat or scan, or arguments that
        exclude each other.

    Cost: capture changes no value, and without capture and patch no site costs anything.
    """
    params = used(params, **call)
    if not capture and not patch:
        return cast(Output, GPT(cfg).apply({"params": params}, tokens_BT, **call))
    if call.get("scan") or call.get("remat", "none") != "none":
        raise ValueError("capture and patch run unrolled: drop remat and scan")
    with tapping(capture, patch) as taps:
        output = cast(Output, GPT(cfg).apply({"params": params}, tokens_BT, **call))
    taps.check()
    return output._replace(captured=taps.captured)


def init_params(cfg: ModelConfig, key: Key) -> Params:
    """Fresh parameters in float32, a nested dict; jit it with out_shardings to create them sharded.

    Raises:
      ConfigError: `vocab_size` is None.
    """
    if cfg.vocab_size is None:
        raise ConfigError("vocab_size is None", fix="set model.vocab_size, or train on a text")
    return GPT(cfg).init(key, jnp.zeros((1, 1), jnp.int32))["params"]


def param_shapes(cfg: ModelConfig) -> Params:
    """The shapes of `init_params` without computing anything, whatever the size."""
    return jax.eval_shape(functools.partial(init_params, cfg), jax.random.key(0))
