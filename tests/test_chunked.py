# SPDX-License-Identifier: Apache-2.0
"""The chunked kernel's own affairs: blocks, memory, dropout, dtypes. Values: test_dispatch.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.kernels import chunked, reference
from jaxgpt.kernels.chunked import BLOCK_BYTES, block_length
from jaxgpt.masks import Visibility
from jaxgpt.model import forward, param_shapes
from jaxgpt.testing import quick_jit, tiny

DOUBLING = 2.2  # at most, of memory, where T doubles


def draw(B, T, n, width, seed, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (B, T, n, width), dtype)


def temporary_bytes(fn, *args):
    """Scratch memory of a compiled function; nothing is computed."""
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


def attention_bytes(kernel, T, **visibility):
    """Forward and backward of attention over T tokens."""

    def grads(*qkv):
        seen = Visibility.full(1, T).replace(**visibility)
        run = functools.partial(kernel.attend, visibility=seen, scale=0.25)
        return jax.grad(lambda *qkv: (run(*qkv) ** 2).sum(), (0, 1, 2))(*qkv)

    shapes = [jax.ShapeDtypeStruct((1, T, n, 16), jnp.float32) for n in (2, 1, 1)]
    return temporary_bytes(grads, *shapes)


LENGTHS = (4096, 8192, 16_384)


@pytest.mark.parametrize(
    "visibility", [{}, {"window": 256}, {"plain": False}], ids=["causal", "window", "masked"]
)
def test_memory_of_training_grows_with_the_length(visibility):
    used = [attention_bytes(chunked, T, **visibility) for T in LENGTHS]
    assert used[1] < DOUBLING * used[0] and used[2] < DOUBLING * used[1]
    assert used[2] < attention_bytes(reference, LENGTHS[-1], **visibility) / 20


def test_memory_of_the_reference_grows_with_its_square():
    used = [attention_bytes(reference, T) for T in LENGTHS]
    assert used[1] > 3.8 * used[0] and used[2] > 3.8 * used[1]


def test_memory_of_training_a_model_grows_with_the_length():
    used = []
    for T in LENGTHS[1:]:
        cfg = tiny(context_length=T, n_layers=1, attention=GQA(n_heads=2))

        def loss(params, tokens_BT, cfg=cfg):
            return forward(cfg, params, tokens_BT, kernel="chunked").logits_BTV[..., :31].sum()

        tokens_BT = jax.ShapeDtypeStruct((1, T), jnp.int32)
        used.append(temporary_bytes(jax.grad(loss), param_shapes(cfg), tokens_BT))
    assert used[1] < DOUBLING * used[0]


def test_blocks_become_shorter_where_rows_are_long():
    assert [block_length(1, T) for T in (1, 100, 128, 5000)] == [1, 100, 128, 128]
    rows = BLOCK_BYTES // 4 // 128
    assert [block_length(n * rows, 5000) for n in (1, 2, 3, 8, 99)] == [128, 64, 32, 16, 16]


def test_real_blocks_give_what_the_reference_gives():
    """300 tokens are two whole blocks and a rest."""
    arrays = [draw(1, 300, n, 8, seed) for seed, n in enumerate((4, 2, 2))]
    for window in (None, 100):
        seen = Visibility.full(1, 300).replace(window=window)
        got, want = (
            quick_jit(functools.partial(kernel.attend, visibility=seen, scale=0.5))(*arrays)
            for kernel in (chunked, reference)
        )
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_a_window_reads_no_other_keys(monkeypatch):
    """Keys in front of the window may be anything, NaN included: their blocks are not read."""
    monkeypatch.setattr(chunked, "MOST", 4)
    monkeypatch.setattr(chunked, "FEWEST", 4)
    q, k, v = (draw(1, 32, 1, 8, seed) for seed in range(3))
    seen = Visibility.full(1, 32).replace(window=3)
    want = chunked.attend(q, k, v, seen, scale=1.0)[:, 28:]
    broken = v.at[:, :26].set(jnp.nan)  # the last block, 28..31, sees 26..31
    assert np.array_equal(chunked.attend(q, k, broken, seen, scale=1.0)[:, 28:], want)


def test_dropout_is_drawn_again_alike_in_the_backward_pass(monkeypatch):
    """y is linear in v: <dy/dv(g), v> = <g, y> holds only if both passes drop the same."""
    monkeypatch.setattr(chunked, "MOST", 8)
    monkeypatch.setattr(chunked, "FEWEST", 8)
    q, k, v, g = (draw(2, 32, 4, 8, seed) for seed in range(4))
    seen = Visibility.full(2, 32).replace(plain=False)

    def run(v, key):
        drop = dict(dropout_rate=0.5, dropout_key=key)
        return chunked.attend(q, k, v, seen, scale=0.3, **drop)

    @quick_jit
    def both(v, key):
        y, back = jax.vjp(lambda v: run(v, key), v)
        return y, back(g)[0]

    drawn = [both(v, jax.random.key(seed)) for seed in range(60)]
    y, grad = drawn[0]
    np.testing.assert_allclose((grad * v).sum(), (g * y).sum(), rtol=1e-4)
    assert np.array_equal(y, both(v, jax.random.key(0))[0])
    assert not np.allclose(y, drawn[1][0], atol=0.1)
    mean = np.mean([y for y, _ in drawn], axis=0)
    assert np.abs(mean - reference.attend(q, k, v, seen, scale=0.3)).mean() < 0.06
    even = seen.replace(causal=False)
    drop = dict(scale=0.0, dropout_rate=0.5, dropout_key=jax.random.key(0))
    blocks = chunked.attend(q, k, jnp.ones_like(v), even, **drop)[..., 0].reshape(2, 4, 8, 4)
    assert (blocks[:, 0] != blocks[:, 1]).any(), "all blocks drop the same"


def test_gradients_of_keys_are_summed_in_float32(monkeypatch):
    """In bfloat16 a sum over many blocks would stop growing at 256 times its terms."""
    monkeypatch.setattr(chunked, "MOST", 1)
    monkeypatch.setattr(chunked, "FEWEST", 1)
    T = 600
    seen = Visibility.full(1, T).replace(causal=False)
    q, k, v = (jnp.zeros((1, n, 1, 8), jnp.bfloat16) for n in (T, T, T))
    grad = jax.jit(jax.grad(lambda v: chunked.attend(q, k, v, seen, scale=1.0).sum()))(v)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(grad.astype(jnp.float32), 1.0, rtol=0.02)
