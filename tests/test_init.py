# SPDX-License-Identifier: Apache-2.0
import jax
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.init import Normal, TorchDefault
from jaxgpt.errors import ConfigError
from jaxgpt.testing import jit_init, tiny


def fresh(init, n_layers=2):
    cfg = tiny(
        vocab_size=500,
        context_length=64,
        d_model=128,
        n_layers=n_layers,
        attention=GQA(n_heads=4, n_kv_heads=2),
        head=Untied(),
        init=init,
    )
    params = jit_init(cfg, jax.random.key(0))
    return {
        jax.tree_util.keystr(k, simple=True, separator="/"): np.asarray(v)
        for k, v in jax.tree.leaves_with_path(params)
    }


RESIDUAL = ("attention/out/kernel", "ffn/down/kernel")


@pytest.mark.parametrize("n_layers", [2, 3])
def test_gpt2_draws_small_normals_and_smaller_ones_into_the_stream(n_layers):
    for path, p in fresh(Normal(), n_layers).items():
        if path.endswith("bias") or path.endswith("scale"):
            assert (p == path.endswith("scale")).all(), path
            continue
        std = 0.02 * (2 * n_layers) ** -0.5 if path.endswith(RESIDUAL) else 0.02
        rows = p[:500] if path == "embed/embedding" else p[:, :500]
        assert abs(rows.std() / std - 1) < 0.03, path
        assert abs(rows.mean()) < 0.03 * std, path
        assert abs(rows).max() > 3 * std, path  # not truncated


@pytest.mark.parametrize(("residual", "factor"), [("same", 1.0), ("scaled", 0.5), ("zero", 0.0)])
def test_kernels_by_their_inputs(residual, factor):
    for path, p in fresh(Normal(std=None, embedding_std=1.0, residual=residual)).items():
        if path.endswith("kernel") and "head" not in path:
            std = p.shape[0] ** -0.5 * (factor if path.endswith(RESIDUAL) else 1.0)
            assert abs(p.std() - std) <= 0.03 * std, path
        if path == "position/embedding":
            assert abs(p.std() - 1) < 0.03


def test_torch_defaults_are_uniform_with_biases():
    for path, p in fresh(TorchDefault()).items():
        if path.endswith("embedding"):
            assert abs(p[:500].std() - 1) < 0.03
        elif path.endswith("kernel") and "head" not in path:
            bound = p.shape[0] ** -0.5
            assert 0.98 * bound < abs(p).max() <= bound, path
            assert abs(p.std() / bound - 3**-0.5) < 0.02, path
        elif path.endswith("attention/q/bias"):
            assert 0.9 * 128**-0.5 < abs(p).max() <= 128**-0.5


def test_layers_are_drawn_independently():  # T09
    params = fresh(Normal())
    for path, p in params.items():
        if path.startswith("block_0") and path.endswith("kernel"):
            assert abs(np.corrcoef(p.ravel(), params["block_1" + path[7:]].ravel())[0, 1]) < 0.05


def test_the_same_key_gives_the_same_parameters():
    a, b = (jit_init(tiny(), jax.random.key(3)) for _ in range(2))
    c = jit_init(tiny(), jax.random.key(4))
    assert jax.tree.all(jax.tree.map(np.array_equal, a, b))
    assert not np.array_equal(a["embed"]["embedding"], c["embed"]["embedding"])


def test_a_std_must_be_positive():
    with pytest.raises(ConfigError, match=r"std=0\.0 must be positive"):
        Normal(std=0.0)
    with pytest.raises(ConfigError, match=r"embedding_std=-1\.0"):
        Normal(embedding_std=-1.0)
