# SPDX-License-Identifier: Apache-2.0
"""cuDNN: what it is asked for, computed by XLA in its place; on an NVIDIA GPU, cuDNN itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.kernels import attend, fused, reference
from jaxgpt.masks import Visibility


@pytest.fixture
def asked(monkeypatch):
    """Arguments of JAX's attention, with XLA instead of cuDNN: both have the same meaning."""
    calls, original = [], jax.nn.dot_product_attention

    def stand_in(*arrays, implementation, **options):
        calls.append({"implementation": implementation, **options})
        return original(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    return calls


def arrays(T=8, dtype=jnp.float32):
    draw = jax.random.normal(jax.random.key(0), (3, 2, T, 4, 8), dtype)
    return draw[0], draw[1, :, :, :2], draw[2, :, :, :2, :6]  # values narrower than keys


@pytest.mark.parametrize(
    "window, left", [(None, None), (1, (0, 0)), (4, (3, 0)), (8, None), (100, None)]
)
def test_cudnn_is_asked_for_the_window_that_we_mean(asked, window, left):  # N07
    seen = Visibility.full(2, 8).replace(window=window)
    y = fused.cudnn(*arrays(), seen, scale=0.3)
    options = dict(scale=0.3, is_causal=True, local_window_size=left)
    assert asked == [{"implementation": "cudnn", **options}]
    np.testing.assert_allclose(y, reference.attend(*arrays(), seen, scale=0.3), atol=1e-5)


def test_cudnn_without_causality_has_no_window(asked):
    seen = Visibility.full(2, 8).replace(window=4, causal=False)
    y = fused.cudnn(*arrays(), seen, scale=0.3)
    assert asked[0]["local_window_size"] is None and not asked[0]["is_causal"]
    np.testing.assert_allclose(y, reference.attend(*arrays(), seen, scale=0.3), atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_cudnn_equals_the_reference(window):
    """On the GPU, in bfloat16, values and gradients."""
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU")
    results = {}
    for kernel in ("cudnn", "reference"):
        seen = Visibility.full(2, 64).replace(window=window, kernel=kernel)
        run = functools.partial(attend, visibility=seen, scale=0.3)
        loss = jax.grad(lambda *qkv, run=run: (run(*qkv).astype(jnp.float32) ** 2).sum(), (0, 1, 2))
        qkv = arrays(64, jnp.bfloat16)
        results[kernel] = jax.tree.map(np.float32, (run(*qkv), *loss(*qkv)))
    for got, want in zip(results["cudnn"], results["reference"], strict=True):
        np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())
