# SPDX-License-Identifier: Apache-2.0
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxgpt.boxes.block import OutputNorm, Parallel, PostNorm, PreNorm, Sandwich
from jaxgpt.masks import Visibility
from jaxgpt.testing import quick_jit, tiny

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 16)), jnp.float32)
FULL = Visibility.full(2, 6)


@functools.cache
def built(block, dropout=0.25):
    """The block as a compiled function, and parameters of which no two norms are alike."""
    module = tiny(block=block, dropout=dropout).build_block(0)
    shapes = jax.eval_shape(module.init, jax.random.key(0), X, FULL)["params"]
    rng = np.random.default_rng(1)
    draw = jax.tree.map(lambda p: jnp.asarray(rng.normal(0, 0.4, p.shape), "f4"), shapes)
    return quick_jit(module.apply), draw


# Each wiring in NumPy; `norm` takes the name of its parameters.


def pre_norm(x, attend, feed, norm):
    x = x + attend(norm("attention_norm", x))
    return x + feed(norm("ffn_norm", x))


def post_norm(x, attend, feed, norm):
    x = norm("attention_norm", x + attend(x))
    return norm("ffn_norm", x + feed(x))


def sandwich(x, attend, feed, norm):
    x = x + norm("attention_out_norm", attend(norm("attention_norm", x)))
    return x + norm("ffn_out_norm", feed(norm("ffn_norm", x)))


def output_norm(x, attend, feed, norm):
    x = x + norm("attention_out_norm", attend(x))
    return x + norm("ffn_out_norm", feed(x))


def parallel(x, attend, feed, norm):
    return x + attend(norm("attention_norm", x)) + feed(norm("ffn_norm", x))


def parallel_one_norm(x, attend, feed, norm):
    return x + attend(norm("attention_norm", x)) + feed(norm("attention_norm", x))


WIRINGS = {
    PreNorm(): pre_norm,
    PostNorm(): post_norm,
    Sandwich(): sandwich,
    OutputNorm(): output_norm,
    Parallel(): parallel,
    Parallel(one_norm=True): parallel_one_norm,
}


@pytest.mark.parametrize("block", WIRINGS, ids=repr)
def test_wiring_equals_numpy(block):
    apply, params = built(block)
    p = jax.tree.map(lambda a: np.asarray(a, float), params)
    used = {"attention", "ffn"}

    def norm(name, x):
        used.add(name)
        return reference.layer_norm(x, **p[name])

    def attend(x):
        return reference.multi_head(p["attention"], x, 4)

    def feed(x):
        return reference.mlp(p["ffn"], x)

    want = WIRINGS[block](np.asarray(X, float), attend, feed, norm)
    y, cache, aux = apply({"params": params}, X, FULL)
    assert cache is None and aux == {} and used == set(params)
    np.testing.assert_allclose(y, want, atol=2e-6 * np.abs(want).max())


def test_one_norm_is_two_norms_that_are_alike():
    (two, params), (one, _) = built(Parallel()), built(Parallel(one_norm=True))
    params = params | {"ffn_norm": params["attention_norm"]}
    want = two({"params": params}, X, FULL)[0]
    params.pop("ffn_norm")
    np.testing.assert_allclose(one({"params": params}, X, FULL)[0], want, atol=1e-5)


@pytest.mark.parametrize("block", WIRINGS, ids=repr)
def test_dropout_at_each_site_of_its_own(block):  # T09
    apply, params = built(block, 0.5)
    still = {"params": params}
    calm = apply(still, X, FULL)[0]
    a, b = (apply(still, X, FULL, None, jax.random.key(seed))[0] for seed in (1, 2))
    assert not np.allclose(a, calm) and not np.allclose(a, b)
    assert np.array_equal(a, apply(still, X, FULL, None, jax.random.key(1))[0])


def added_by(branch, last, block):
    """What a branch that gives ones adds to the stream at a dropout of one half: its mask."""
    apply, params = built(block, 0.5)
    params = jax.tree.map(jnp.zeros_like, params)
    params[branch][last]["bias"] = jnp.ones(16)
    for name in params.keys() & {f"{branch}_out_norm"}:  # of a branch that gives what it likes
        params[name]["bias"] = jnp.ones(16)
    return apply({"params": params}, X, FULL, None, jax.random.key(0))[0] - X


@pytest.mark.parametrize("block", [PreNorm(), Sandwich(), OutputNorm(), Parallel()], ids=repr)
def test_the_masks_of_the_two_branches_differ(block):  # T09
    seen = [added_by("attention", "out", block), added_by("ffn", "down", block)]
    for added in seen:  # nothing, or twice: dropout comes after the norm of an output
        np.testing.assert_allclose(np.minimum(abs(added), abs(added - 2)), 0, atol=1e-5)
    assert (abs(seen[0] - seen[1]) > 1).mean() > 0.3
