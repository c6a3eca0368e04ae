# SPDX-License-Identifier: Apache-2.0
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.config import RunConfig, from_yaml, resolve, to_yaml
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig, init_params
from jaxgpt.train.config import OptimConfig, TrainConfig
from jaxgpt.train.digest import by_path
from jaxgpt.train.optim import decay_mask, learning_rate, optimizer
from jaxgpt.train.optimizers import SGD, Adafactor, AdamW, Lion, Muon

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


def test_inverse_square_root():
    """Vaswani et al. 2017, eq. 3: d^-0.5 min(n^-0.5, n warmup^-1.5); there is no horizon."""
    cfg = OptimConfig(lr=512**-0.5 * 4000**-0.5, schedule="inverse-sqrt", warmup_steps=4000)
    for n in (1, 2000, 4000, 4001, 16_000, 400_000):
        want = 512**-0.5 * min(n**-0.5, n * 4000**-1.5)
        assert learning_rate(cfg, 100)(n) == pytest.approx(want, rel=1e-5, abs=1e-10)
    cfg = OptimConfig(lr=1e-2, schedule="inverse-sqrt", warmup_steps=0)
    rate = learning_rate(cfg, 100)
    assert [float(rate(n)) for n in (1, 4, 100)] == pytest.approx([1e-2, 5e-3, 1e-3])


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
        AdamW(beta2=0.9, eps=1e-12),
        lr=0.1,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.5,
        clip=1.0,
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


PARAMS = {
    "embed": {"embedding": jnp.ones((3, 2))},
    "block_0": {"ffn": {"up": {"kernel": jnp.ones((2, 4)), "bias": jnp.ones(4)}}},
    "final_norm": {"scale": jnp.ones(2)},
}


def moved(cfg, params=PARAMS, steps=1, **options):
    """How far each parameter goes with gradients that are all one, by path."""
    tx, after = optimizer(cfg, 10, **options), params
    state = tx.init(params)
    for _ in range(steps):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, after)
        after = jax.tree.map(jnp.add, after, updates)
    return {
        path: float(np.ravel(before - now)[0])
        for (path, before), now in zip(by_path(params).items(), jax.tree.leaves(after), strict=True)
    }


PLAIN = dict(lr=0.1, schedule="constant", warmup_steps=0, clip=None)


def test_multipliers_act_on_step_and_decay_and_multiply():
    """A step of AdamW is 1 here, so a decayed weight loses lr * factor * (1 + weight_decay)."""
    factors = {"block_*/ffn/*": 0.5, "*/bias": 0.2, "embed/*": 0.0}
    got = moved(OptimConfig(weight_decay=0.5, multipliers=factors, **PLAIN))
    assert got == pytest.approx(
        {
            "embed/embedding": 0.0,
            "block_0/ffn/up/kernel": 0.1 * 0.5 * 1.5,
            "block_0/ffn/up/bias": 0.1 * 0.5 * 0.2,
            "final_norm/scale": 0.1,
        }
    )
    assert got["embed/embedding"] == 0.0, "frozen, decay included"


@pytest.mark.parametrize(
    ("pattern", "near"), [("embde/*", "embed/embedding"), ("up/kernel", "block_0/ffn/up/kernel")]
)
def test_a_pattern_without_a_parameter(pattern, near):
    tx = optimizer(OptimConfig(multipliers={pattern: 0.1}), 10)
    with pytest.raises(ConfigError, match=f"matches '{re.escape(pattern)}'; fix: .* {near}"):
        jax.eval_shape(tx.init, PARAMS)


def test_multipliers_by_name():
    run = resolve(RunConfig(), (), ["--optim.multipliers={embed/*: 0.1, '*/bias': 2}"])
    assert run.optim.multipliers == {"embed/*": 0.1, "*/bias": 2.0}
    assert from_yaml(to_yaml(run)) == run
    assert from_yaml("optim: {multipliers: {embed/*: 0}}").optim.multipliers == {"embed/*": 0}
    for text in ("3", "[a]", "{a: b}", "{a: -1}", "{a: .nan}"):
        with pytest.raises(ConfigError, match="multipliers"):
            resolve(RunConfig(), (), [f"--optim.multipliers={text}"])


@pytest.mark.parametrize(
    ("method", "arrays"), [(AdamW(), 8), (Lion(), 4), (SGD(), 4), (Muon(), 1 + 2 * 3)], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_of_moments(method, arrays, dtype):
    """Other leaves of the state are counts, and Muon's coefficients."""
    tx = optimizer(OptimConfig(method, state_dtype=dtype), 10)
    state = tx.init(PARAMS)
    for _ in range(2):
        moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim and leaf.shape != (3,)]
        assert [leaf.dtype.name for leaf in moments] == [dtype] * arrays
        updates, state = tx.update(PARAMS, state, PARAMS)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(updates)} == {"float32"}


def test_rounded_moments_by_hand():
    """The step is made of moments that are exact, from rounded ones of the step before."""
    cfg = OptimConfig(AdamW(0.9, 0.99), weight_decay=0.0, state_dtype="bfloat16", **PLAIN)
    params, grads = {"w": jnp.array([1.0, 2.0])}, [np.array([0.3, -0.7]), np.array([0.5, 0.11])]
    tx = optimizer(cfg, 10)
    state, w, m, v = tx.init(params), np.array([1.0, 2.0]), np.zeros(2), np.zeros(2)
    for n, g in enumerate(grads, 1):
        updates, state = tx.update({"w": jnp.asarray(g, jnp.float32)}, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w = w - 0.1 * (m / (1 - 0.9**n)) / (np.sqrt(v / (1 - 0.99**n)) + 1e-8)
        m, v = (x.astype(jnp.bfloat16).astype(np.float64) for x in (m, v))
        np.testing.assert_allclose(params["w"], w, atol=1e-6)
        (adam,) = [leaf for leaf in state if isinstance(leaf, optax.ScaleByAdamState)]
        assert (np.asarray(adam.mu["w"], np.float64) == m).all()


def test_a_memory_that_bfloat16_cannot_hold():
    """A second moment that should fall by a thousandth at each step never would."""
    stuck = jnp.asarray(1.5, jnp.bfloat16)
    assert (stuck.astype(jnp.float32) * 0.999).astype(jnp.bfloat16) == stuck
    for share in np.linspace(1, 2, 257)[:-1]:  # what is allowed always falls
        share = jnp.asarray(share, jnp.bfloat16)
        assert (share.astype(jnp.float32) * 0.996).astype(jnp.bfloat16) < share
    for method in (AdamW(beta2=0.999), Muon(rest=AdamW(beta2=0.999)), Adafactor()):
        with pytest.raises(ConfigError, match="state_dtype=bfloat16 rounds away"):
            OptimConfig(method, state_dtype="bfloat16")


@pytest.mark.parametrize(
    "knobs",
    [
        {"lr": 0.0},
        {"lr": -1.0},
        {"lr": float("nan")},
        {"clip": 0.0},
        {"final_lr": -1.0},
        {"warmup_steps": -1},
        {"decay_fraction": 0.0},
        {"weight_decay": float("inf")},
        {"multipliers": {"*": -1.0}},
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
