# SPDX-License-Identifier: Apache-2.0
"""What a site promises: what is captured there is what the model goes on with."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxgpt.model import ModelConfig, Output, forward
from jaxgpt.shapes import Params
from jaxgpt.study.inside import site_shapes
from jaxgpt.testing.tools import LENGTH, TOLERANCE, assert_close, logits, quick_jit, tokens


def check_sites(cfg: ModelConfig, params: Params) -> None:
    """Looking changes nothing but rounding, and a captured value put back changes no bit.

    Another value at a site, NaN, reaches the logits.
    """
    tokens_BT, pos_BT = tokens(padded=True)

    def put(values: dict[str, Any], place: int) -> tuple[np.ndarray, dict[str, Array]]:
        out = jit_put_back(cfg, params, tokens_BT, pos_BT, values, place)
        return np.asarray(out.logits_BTV)[..., : cfg.vocab_size], out.captured

    shapes = known_sites(cfg)
    looked, values = put({site: np.zeros(x.shape, x.dtype) for site, x in shapes.items()}, -1)
    want = logits(cfg, params, tokens_BT, pos_BT=pos_BT)
    assert_close(looked, want, TOLERANCE, "what is computed with all sites captured")
    floats = {k: x for k, x in values.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    other = values | {site: np.full(x.shape, np.nan, x.dtype) for site, x in floats.items()}
    for place, site in enumerate(sorted(values)):
        back = put(values, place)[0]
        assert np.array_equal(back, looked, equal_nan=True), f"{site}, put back, changes the logits"
        if site in floats:
            assert np.isnan(put(other, place)[0]).any(), f"what is put at {site} is not used"


@functools.lru_cache(maxsize=1)
def known_sites(cfg: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The sites of a model for two rows of tokens, traced once for all checks."""
    return site_shapes(cfg, 2, LENGTH)


@functools.partial(quick_jit, static_argnames="cfg")
def jit_put_back(
    cfg: ModelConfig,
    params: Params,
    tokens_BT: Array,
    pos_BT: Array,
    values: dict[str, Array],
    place: Array | int,
) -> Output:
    """The model with one of its sites replaced, by the place of its name among all, sorted.

    One program for all sites: there are dozens in a model. A place of -1 replaces none.
    """

    def patch(i: int, value: Array, x: Array) -> Array:
        return jnp.where(place == i, value, x)

    put = {site: functools.partial(patch, i, values[site]) for i, site in enumerate(sorted(values))}
    return forward(cfg, params, tokens_BT, pos_BT=pos_BT, capture=("*",), patch=put)
