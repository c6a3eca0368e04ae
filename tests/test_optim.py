# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig, init_params
from jaxgpt.train.config import OptimConfig, TrainConfig
from jaxgpt.train.optim import decay_mask, learning_rate, optimizer

T05 = {5: 5.0e-4, 10: 1.0e-3, 25: 9.397e-4, 55: 5.5e-4, 100: 1.0e-4, 150: 1.0e-4}


def test_warmup_and_cosine():
    """Case T05: the horizon includes the warmup, and the floor is reached at its end."""
    rate = learning_rate(OptimConfig(lr=1e-3, final_lr=1e-4, warmup_steps=10), horizon=100)
    for update, expected in T05.items():
        assert rate(update) == pytest.approx(expected, abs=1e-7)
    rates = np.array([rate(n) for n in range(1, 101)])
    assert (np.diff(rates[9:]) < 0).all() and rates[98] > 1e-4 and rates[0] == pytest.approx(1e-4)


def test_warmup_stable_decay():
    cfg = OptimConfig(lr=1e-3, final_lr=0.0, warmup_steps=10, schedule="wsd", decay_fraction=0.2)
    rate = learning_rate(cfg, horizon=100)
    expected = {5: 5e-4, 10: 1e-3, 80: 1e-3, 90: 5e-4, 100: 0.0, 120: 0.0}
    assert {n: float(rate(n)) for n in expected} == pytest.approx(expected, abs=1e-8)


def test_constant():
    rate = learning_rate(OptimConfig(lr=2e-4, schedule="constant", warmup_steps=0), horizon=10)
    assert [float(rate(n)) for n in (1, 5, 1000)] == pytest.approx([2e-4] * 3)


def test_only_matrices_decay():
    cfg = ModelConfig(vocab_size=7, d_model=8, n_layers=1, context_length=4, attention=GQA(2))
    mask = decay_mask(jax.eval_shape(lambda: init_params(cfg, jax.random.key(0))))
    decayed = {
        "/".join(k.key for k in path)
        for path, on in jax.tree_util.tree_leaves_with_path(mask)
        if on
    }
    block = [f"block_0/attention/{n}/kernel" for n in ("q", "k", "v", "out")]
    block += ["block_0/ffn/up/kernel", "block_0/ffn/down/kernel"]
    assert decayed == {"embed/embedding", "position/embedding", *block}


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_decay_by_hand(decay):
    """Without a gradient nothing moves but what decays: by lr * weight_decay of itself."""
    cfg = OptimConfig(lr=0.1, schedule="constant", warmup_steps=0, weight_decay=0.5, decay=decay)
    ones = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2), "norm": {"scale": jnp.ones(2)}}
    tx = optimizer(cfg, horizon=10)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, ones), tx.init(ones), ones)
    assert np.asarray(updates["kernel"]) == pytest.approx(-0.05)
    for update in (updates["bias"], updates["norm"]["scale"]):
        assert np.asarray(update) == pytest.approx(-0.05 if decay == "all" else 0.0)


def test_adamw_by_hand():
    """Two updates of clip -> Adam -> decoupled decay, written out."""
    cfg = OptimConfig(
        lr=0.1,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.5,
        clip=1.0,
        beta2=0.9,
        eps=1e-12,
    )
    params = {"kernel": jnp.array([[2.0]]), "scale": jnp.array([3.0])}
    grads = {"kernel": jnp.array([[3.0]]), "scale": jnp.array([4.0])}  # norm 5, clipped to 1
    tx = optimizer(cfg, horizon=10)
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    # Constant gradients: Adam's ratio is 1 whatever their size.
    assert params["kernel"][0, 0] == pytest.approx((2 - 0.1 * (1 + 1.0)) * 0.95 - 0.1, abs=1e-6)
    assert params["scale"][0] == pytest.approx(3 - 0.2, abs=1e-6)


def test_moments_are_float32():
    params = {"kernel": jnp.ones((2, 2))}
    state = optimizer(OptimConfig(), 10).init(params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32"}


@pytest.mark.parametrize(
    "knobs",
    [
        {"lr": 0.0},
        {"lr": -1.0},
        {"lr": float("nan")},
        {"beta1": 1.0},
        {"clip": 0.0},
        {"final_lr": -1.0},
        {"warmup_steps": -1},
        {"decay_fraction": 0.0},
        {"weight_decay": float("inf")},
    ],
)
def test_bad_knobs(knobs):
    with pytest.raises(ConfigError, match=next(iter(knobs))):
        OptimConfig(**knobs)


@pytest.mark.parametrize(
    "knobs", [{"steps": 0}, {"batch_size": -1}, {"keep": 0}, {"kernel": "flash"}]
)
def test_bad_sizes(knobs):
    with pytest.raises(ConfigError, match=next(iter(knobs))):
        TrainConfig(**knobs)


def test_accumulate_must_divide_the_batch():
    with pytest.raises(ConfigError, match=r"batch_size=6 .* accumulate=4; fix: .*\[1, 2, 3, 6\]"):
        TrainConfig(batch_size=6, accumulate=4)
