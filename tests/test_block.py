# SPDX-License-Identifier: Apache-2.0
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxgpt.boxes.block import PostNorm, PreNorm
from jaxgpt.masks import Visibility
from jaxgpt.testing import quick_jit, tiny

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 16)), jnp.float32)
FULL = Visibility.full(2, 6)


@functools.cache
def parts(block, dropout=0.25):
    cfg = tiny(block=block, dropout=dropout)
    layer, dims = cfg.layers[0], cfg.dims(cfg.layers[0])
    module = cfg.build_block(0)
    params = quick_jit(module.init)(jax.random.key(0), X, FULL)["params"]

    def attend(x):
        return layer.attention.build(dims).apply({"params": params["attention"]}, x, FULL)[0]

    def feed(x):
        return layer.ffn.build(dims).apply({"params": params["ffn"]}, x, FULL.valid_BT)[0]

    return quick_jit(module.apply), params, attend, feed


def norm(x):
    return jnp.asarray(reference.layer_norm(np.asarray(x, float)), jnp.float32)


def test_pre_norm_wiring():
    apply, params, attend, feed = parts(PreNorm())
    x = X + attend(norm(X))
    want = x + feed(norm(x))
    y, cache, aux = apply({"params": params}, X, FULL)
    assert cache is None and aux == {}
    np.testing.assert_allclose(y, want, atol=1e-5)


def test_post_norm_wiring():
    apply, params, attend, feed = parts(PostNorm())
    x = norm(X + attend(X))
    np.testing.assert_allclose(apply({"params": params}, X, FULL)[0], norm(x + feed(x)), atol=1e-5)


@pytest.mark.parametrize("block", [PreNorm(), PostNorm()], ids=repr)
def test_parameters_have_the_same_names_in_every_placement(block):
    params = parts(block)[1]
    assert sorted(params) == ["attention", "attention_norm", "ffn", "ffn_norm"]


@pytest.mark.parametrize("block", [PreNorm(), PostNorm()], ids=repr)
def test_dropout_at_each_site_of_its_own(block):  # T09
    apply, params, *_ = parts(block, 0.5)
    still = {"params": params}
    calm = apply(still, X, FULL)[0]
    a, b = (apply(still, X, FULL, None, jax.random.key(seed))[0] for seed in (1, 2))
    assert not np.allclose(a, calm) and not np.allclose(a, b)
    assert np.array_equal(a, apply(still, X, FULL, None, jax.random.key(1))[0])


def test_the_masks_of_the_two_branches_differ():  # T09
    """With branches that give ones, what each adds to the stream is its mask."""
    apply, params, *_ = parts(PreNorm(), 0.5)
    ones = jax.tree.map(jnp.zeros_like, params)
    seen = []
    for branch, last in (("attention", "out"), ("ffn", "down")):
        p = jax.tree.map(lambda a: a, ones)
        p[branch][last]["bias"] = jnp.ones(16)
        seen.append(apply({"params": p}, X, FULL, None, jax.random.key(0))[0] - X)
    for added in seen:
        np.testing.assert_allclose(np.minimum(abs(added), abs(added - 2)), 0, atol=1e-5)
    assert (abs(seen[0] - seen[1]) > 1).mean() > 0.3
