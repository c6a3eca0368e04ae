# SPDX-License-Identifier: Apache-2.0
"""Parameters for decoding: cast once, joined where one input meets several matrices, quantised.

What comes out is a tree of parameters for the same model: `forward`, captures and sampling take it
like any other. Left out: training with it, and saving it.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxgpt.boxes.dense import Dense
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.weights import Cast, Int4, Int8, Weight
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig, forward, init_params
from jaxgpt.shapes import Key, Params

GROUP = 32  # inputs that share a factor in int4
STORED = "float32", "bfloat16", "int8", "int4"
"""How matrices may be stored."""


def for_decoding(
    cfg: ModelConfig,
    params: Params,
    *,
    dtype: DTypeLike | None = None,
    weights: str | None = None,
) -> Params:
    """The same parameters, stored so that a step of decoding reads as few bytes as it can.

    Norms, biases, routers and what else is a vector stay as they are; kernels of experts and of
    boxes that read their own are arrays in the dtype. A LoRA has to be merged before.

    Args:
      cfg: The model.
      params: As `init_params` returns them, or what this function returned.
      dtype: Of matrices, and so of the computation; None: their own.
      weights: Of `STORED`: the dtype is then that of the computation alone. "int8": whole numbers
        and a factor for each output. "int4": for each output and 32 inputs, the embedding and an
        untied head excepted, which are int8. None: matrices are in the dtype.

    Raises:
      ConfigError: `weights` is none of these.

    Numerics: without int8 and int4, what `forward` gives with this dtype and the parameters
    themselves, but for the order of sums; the change with those: docs/sampling.md.
    """
    if weights not in (None, *STORED):
        raise ConfigError(f"weights={weights!r}", fix=f"None or one of {', '.join(STORED)}")
    if weights in ("float32", "bfloat16"):
        dtype, weights = weights, None
    params = _joined(cfg, params)
    kernels, tables = _matrices(cfg)

    def store(path: tuple, x: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if isinstance(x, Weight) or x.ndim < 2 or name.endswith("/router/kernel"):
            return x
        kind = weights
        if name in tables or name == "head/out/kernel":
            kind = "int8" if weights else None
        if name in kernels or name in tables:
            return _stored(x, jnp.dtype(dtype or x.dtype), kind, name in kernels)
        return x.astype(dtype or x.dtype)

    return jax.tree_util.tree_map_with_path(store, params, is_leaf=lambda x: isinstance(x, Weight))


@functools.partial(jax.jit, static_argnames=("dtype", "kind", "turn"))
def _stored(x: Array, dtype: Any, kind: str | None, turn: bool) -> Array | Weight:
    """A kernel [in, out], which is turned, or a table [rows, columns]."""
    w_OI = x.T if turn else x
    if kind == "int4" and w_OI.shape[1] % 2 == 0:
        return Int4.of(w_OI, dtype, GROUP)
    if kind is not None:
        return Int8.of(w_OI, dtype)
    if jax.default_backend() != "gpu" and dtype.itemsize >= 4:  # a plain product reads it as fast
        return x.astype(dtype)
    return Cast.of(w_OI, dtype)


def _joined(cfg: ModelConfig, params: Params) -> Params:
    """With the products joined that the boxes of each layer know to be of one input."""
    params = dict(params)
    for i, layer in enumerate(cfg.layers):
        block = dict(params[f"block_{i}"])
        for name, box in (("attention", layer.attention), ("ffn", layer.ffn)):
            if isinstance(block.get(name), dict):
                block[name] = box.joined(block[name])
        params[f"block_{i}"] = block
    return params


@functools.lru_cache(maxsize=16)
def _matrices(cfg: ModelConfig) -> tuple[frozenset[str], frozenset[str]]:
    """Paths of the kernels and of the tables whose modules take a `Weight` in their place.

    The modules say so themselves, in a call of the model that computes nothing; kernels are there
    alone and joined.
    """
    kernels, tables = set(), set()

    def watch(call: Any, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        path = "/".join(module.path)
        if isinstance(module, Dense):
            kernels.add(f"{path}/kernel")
        elif isinstance(getattr(module, "box", None), Embed):
            tables.add(f"{path}/embedding")
        return call(*args, **kwargs)

    def look(key: Key) -> Array:
        with nn.intercept_methods(watch):
            params = _joined(cfg, init_params(cfg, key))
            return forward(cfg, params, jnp.zeros((1, 1), jnp.int32)).logits_BTV

    jax.eval_shape(look, jax.random.key(0))
    return frozenset(kernels), frozenset(tables)
