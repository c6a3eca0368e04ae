# SPDX-License-Identifier: Apache-2.0
"""Gradients of matrix products, in the order that a CPU is fast in."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.dense import Dense
from jaxgpt.kernels import reference
from jaxgpt.masks import Visibility
from jaxgpt.products import narrow_first
from jaxgpt.testing import tiny

X, W, DY = (
    jnp.asarray(np.random.default_rng(i).normal(size=shape), jnp.float32)
    for i, shape in enumerate(((24, 6), (6, 2), (24, 2)))
)


def product(x, w):
    return jnp.tanh(x @ w)


def ordered(x, w):
    return jnp.tanh(x @ narrow_first(w))


def test_only_the_order_changes():
    assert np.array_equal(ordered(X, W), product(X, W))
    for way in (jax.jit, lambda f: f):
        for order in (lambda f: jax.grad(lambda *a: (f(*a) * DY).sum(), (0, 1)), jax.jacfwd):
            got, want = (way(order(f))(X, W) for f in (ordered, product))
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want
            )
    second = [jax.hessian(lambda w, f=f: (f(X, w) * DY).sum())(W) for f in (ordered, product)]
    np.testing.assert_allclose(*second, rtol=1e-4, atol=1e-5)


def test_it_maps_over_rows_of_parameters():
    many = jnp.stack([W, 2 * W])
    got = jax.vmap(jax.grad(lambda w: (ordered(X, w) * DY).sum()))(many)
    want = jnp.stack([jax.grad(lambda w: (product(X, w) * DY).sum())(w) for w in many])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def shapes_of_products(f, *args):
    """Of the results in what is compiled, as they lie in memory: {1,0} means row by row."""
    text = str(jax.jit(f).lower(*args).compile().as_text())
    found = re.findall(r"f32\[([\d,]+)\]\{([\d,]+)\}[^\n]*? dot\(", text)
    both = [[list(map(int, part.split(","))) for part in pair] for pair in found]
    return {tuple(shape[axis] for axis in reversed(layout)) for shape, layout in both}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the order matters on a CPU")
def test_gradients_of_a_layer_and_of_attention_have_it():
    dense = Dense(8, tiny().dims())
    x, tall = jnp.ones((32, 64)), jnp.ones((64, 8))
    params = {"params": {"kernel": tall, "bias": jnp.ones(8)}}

    def layer(params):
        y: Any = dense.apply(params, x)
        return y.sum() ** 2

    found = shapes_of_products(jax.grad(layer), params)
    assert (8, 64) in found and (64, 8) not in found

    q = jnp.ones((2, 16, 3, 4))

    def attention(q, k, v):
        visible = Visibility.full(2, 16)
        return (reference.attend(q, k, v, visible, scale=0.5) ** 2).sum()

    found = shapes_of_products(jax.grad(attention, (1, 2)), q, q, q)
    assert (6, 4, 16) in found
