# SPDX-License-Identifier: Apache-2.0
"""Looking inside: which sites a model has, gradients at them, and runs with one place changed.

`forward(capture=, patch=)` is the tool; these are the three loops around it that the others of this
folder use: `ablation.py` (what a part is good for) and `attribution.py` (what a part says).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxgpt.model import ModelConfig, Output, forward, param_shapes
from jaxgpt.shapes import Params


def site_shapes(
    cfg: ModelConfig,
    batch: int = 1,
    length: int = 1,
    *,
    capture: Sequence[str] = ("*",),
    **call: Any,
) -> dict[str, jax.ShapeDtypeStruct]:
    """The sites of a model with shape and dtype of their values; nothing is computed.

    Args:
      cfg: The model.
      batch: Rows of the call, B.
      length: Tokens of a row, T.
      capture: Patterns of the sites.
      **call: As for `jaxgpt.forward`.

    Raises:
      ValueError: A pattern fits no site.
    """
    look = functools.partial(forward, cfg, capture=capture, **call)
    tokens_BT = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return jax.eval_shape(look, param_shapes(cfg), tokens_BT).captured


def site_gradients(
    cfg: ModelConfig,
    params: Params,
    tokens_BT: Int[Array | np.ndarray, "B T"],
    loss: Callable[[Output], Float[Array, ""]],
    sites: Sequence[str],
    **call: Any,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Gradients of a loss with regard to the values at some sites.

    A value's gradient counts all that it does further on, at other sites of the list too. Sites of
    integers (a router's choice) are left out. Multiplied with the difference of two runs' values it
    is a first estimate of what `jaxgpt.study.ablation.activation_patching` computes (attribution
    patching).

    Args:
      cfg: The model.
      params: Its parameters.
      tokens_BT: Token ids.
      loss: From what `jaxgpt.forward` returns to a number.
      sites: Patterns.
      **call: As for `jaxgpt.forward`.

    Returns:
      The loss, and by site an array of the site's shape and dtype.

    Raises:
      ValueError: A pattern fits no site.

    Source: Simonyan et al. 2013, section 3, https://arxiv.org/abs/1312.6034 (gradients of an
      input); attribution patching: Nanda 2023,
      https://www.neelnanda.io/mechanistic-interpretability/attribution-patching
    Cost: a forward and a backward pass.
    """
    look, tokens_BT = functools.partial(forward, cfg, **call), jnp.asarray(tokens_BT)
    found = jax.eval_shape(functools.partial(look, capture=sites), params, tokens_BT).captured
    zeros = {
        site: jnp.zeros(x.shape, x.dtype)
        for site, x in found.items()
        if jnp.issubdtype(x.dtype, jnp.floating)
    }

    def moved(deltas: dict[str, Array]) -> Float[Array, ""]:
        add = {site: functools.partial(jnp.add, delta) for site, delta in deltas.items()}
        return loss(look(params, tokens_BT, patch=add))

    return jax.value_and_grad(moved)(zeros)


def sweep(
    cfg: ModelConfig,
    params: Params,
    tokens_BT: Int[Array | np.ndarray, "B T"],
    put: Mapping[str, Any],
    measure: Callable[..., Array],
    *args: Any,
    axis: int | None = None,
    at_once: int = 1,
) -> Float[Array, "sites slices ..."]:
    """What `measure` says of the model, run once for each place that is changed.

    Args:
      cfg: The model.
      params: Its parameters.
      tokens_BT: Token ids.
      put: By site the value that is put there, broadcast to it; a slice at a time.
      measure: From what `jaxgpt.forward` returns, and `args`, to an array. A function of a module,
        not a lambda: it is compiled once.
      *args: For `measure`.
      axis: Of the sites, along which slices of size one are taken; None: the whole value at once.
      at_once: Runs that are computed together: more of them need more memory.

    Returns:
      A row for each site, in the order of `put`; NaN where a site has no such slice.

    Raises:
      ValueError: There is no such site.

    Cost: a forward pass for each site and slice, in one compiled loop.
    """
    return _sweep(cfg, params, tokens_BT, (*put.values(),), args, (*put,), measure, axis, at_once)


@functools.partial(jax.jit, static_argnames=("cfg", "sites", "measure", "axis", "at_once"))
def _sweep(
    cfg: ModelConfig,
    params: Params,
    tokens_BT: Array,
    values: tuple,
    args: tuple,
    sites: tuple[str, ...],
    measure: Callable[..., Array],
    axis: int | None,
    at_once: int,
) -> Array:
    shapes = site_shapes(cfg, *tokens_BT.shape, capture=sites)
    sizes = [1 if axis is None else shapes[site].shape[axis] for site in sites]

    def run(place: tuple[Array, Array]) -> Array:
        which, where = place

        def patch(i: int, value: Any, x: Array) -> Array:
            here = (which == i).reshape((1,) * x.ndim)
            if axis is not None:
                along = [n if a == axis % x.ndim else 1 for a, n in enumerate(x.shape)]
                here &= (jnp.arange(x.shape[axis]) == where).reshape(along)
            return jnp.where(here, jnp.broadcast_to(value, x.shape).astype(x.dtype), x)

        put = {
            site: functools.partial(patch, i, value)
            for i, (site, value) in enumerate(zip(sites, values, strict=True))
        }
        found = measure(forward(cfg, params, tokens_BT, patch=put), *args)
        there = where < jnp.array(sizes)[which]
        return jnp.where(there, found, jnp.nan)

    places = jnp.meshgrid(jnp.arange(len(sites)), jnp.arange(max(sizes)), indexing="ij")
    many = at_once if at_once > 1 else None
    found = jax.lax.map(run, tuple(p.reshape(-1) for p in places), batch_size=many)
    return found.reshape(len(sites), max(sizes), *found.shape[1:])
