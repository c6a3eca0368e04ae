# SPDX-License-Identifier: Apache-2.0
import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import FFNBox
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.init import Normal
from jaxgpt.boxes.norm import NoNorm
from jaxgpt.boxes.position import NoPosition
from jaxgpt.data.batches import Batch
from jaxgpt.model import ModelConfig
from jaxgpt.train.config import OptimConfig, TrainConfig
from jaxgpt.train.optim import optimizer
from jaxgpt.train.step import eval_step, init_state, loss_sum, train_step

TINY = ModelConfig(
    vocab_size=13,
    context_length=8,
    d_model=16,
    n_layers=2,
    attention=GQA(2),
    init=Normal(std=0.3, embedding_std=0.5),
)


def batch_of(rows, length=8, vocab=13, seed=0, weights=None):
    ids = np.random.default_rng(seed).integers(0, vocab, (rows, length + 1), dtype=np.int32)
    weights = np.ones((rows, length), np.float32) if weights is None else weights
    return jax.tree.map(jnp.asarray, Batch(ids[:, :-1], ids[:, 1:], weights))


def steps(cfg, batches, optim=OptimConfig(warmup_steps=0), train=TrainConfig(), state=None):
    tx = optimizer(optim, 1000)
    state = init_state(cfg, tx, 0) if state is None else state
    step = jax.jit(functools.partial(train_step, cfg=cfg, tx=tx, train=train))
    history = []
    for batch in batches:
        state, metrics = step(state, batch)
        history.append(metrics)
    return state, history


@dataclasses.dataclass(frozen=True)
class OneWeight(FFNBox):
    """A weight whose gradient is 1 at every token."""

    def build(self, dims, name=None):
        return _OneWeight(name=name)


class _OneWeight(nn.Module):
    @nn.compact
    def __call__(self, x, valid, dropout_key=None):
        w = self.param("w", nn.initializers.ones, (), jnp.float32)
        return jnp.zeros_like(x), {"weight_loss": w}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_bfloat16_compute_does_not_swallow_updates(dtype, accumulate):
    """Case T02: 100 steps of 6e-4 against a constant gradient of 1 move 1.0 to 0.94."""
    cfg = dataclasses.replace(TINY, n_layers=1, ffn=OneWeight())
    optim = OptimConfig(lr=6e-4, schedule="constant", warmup_steps=0, weight_decay=0.0, clip=None)
    train = TrainConfig(dtype=dtype, batch_size=4, accumulate=accumulate)
    state, _ = steps(cfg, [batch_of(4)] * 100, optim, train)
    assert state.params["block_0"]["ffn"]["w"] == pytest.approx(0.94, abs=1e-4)
    leaves = jax.tree.leaves((state.params, state.opt_state))
    assert {leaf.dtype.name for leaf in leaves} == {"float32", "int32"}


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_rate_follows_optimizer_steps(accumulate):
    """Case T05, read from the updates themselves: Adam moves a constant gradient by the rate."""
    cfg = dataclasses.replace(TINY, n_layers=1, ffn=OneWeight())
    optim = OptimConfig(lr=1e-3, final_lr=1e-4, warmup_steps=10, weight_decay=0.0, clip=None)
    tx, train = optimizer(optim, 100), TrainConfig(batch_size=4, accumulate=accumulate)
    step = jax.jit(functools.partial(train_step, cfg=cfg, tx=tx, train=train))
    state, weights = init_state(cfg, tx, 0), [1.0]
    for _ in range(100):
        state, _ = step(state, batch_of(4))
        weights.append(float(state.params["block_0"]["ffn"]["w"]))
    used = -np.diff(np.array(weights))
    expected = {5: 5.0e-4, 10: 1.0e-3, 25: 9.397e-4, 55: 5.5e-4, 100: 1.0e-4}
    for update, rate in expected.items():
        assert used[update - 1] == pytest.approx(rate, abs=3e-7)
    assert state.step == 100


def known_losses():
    """A model whose loss is 4.0 at input 0 and 2.0 at input 1, whatever came before (case T03)."""
    cfg = ModelConfig(
        vocab_size=4,
        vocab_multiple=1,
        context_length=100,
        d_model=2,
        n_layers=1,
        attention=GQA(1),
        position=NoPosition(),
        final_norm=NoNorm(),
        head=Untied(),
        init=Normal(residual="zero"),
    )
    params = init_state(cfg, optimizer(OptimConfig(), 1), 0).params
    p = np.exp([-4.0, -2.0])[:, None]
    kernel = np.log(np.concatenate([(1 - p) / 3, (1 - p) / 3, p, (1 - p) / 3], axis=1))
    table = np.array([[1, 0], [0, 1], [0, 0], [0, 0]], np.float32)
    return cfg, {
        **params,
        "embed": {"embedding": jnp.asarray(table)},
        "head": {"out": {"kernel": jnp.asarray(kernel, jnp.float32)}},
    }


def uneven_batch(rows=2):
    tokens = np.zeros((rows, 100), np.int32)
    tokens[1] = 1
    weights = np.zeros((rows, 100), np.float32)
    weights[0, :10], weights[1] = 1, 1
    return Batch(tokens, np.full((rows, 100), 2, np.int32), weights)


def test_accumulation_weighs_tokens():
    """Case T03: (10 * 4 + 100 * 2) / 110, not the mean of the micro-batches' means."""
    cfg, params = known_losses()
    results = []
    for accumulate, rows in ((1, 2), (2, 2), (4, 4)):  # the last with two empty micro-batches
        tx = optimizer(OptimConfig(warmup_steps=0, clip=None), 100)
        state = init_state(cfg, tx, 0).replace(params=params)
        train = TrainConfig(batch_size=rows, accumulate=accumulate)
        state, (metrics,) = steps(
            cfg, [uneven_batch(rows)], OptimConfig(warmup_steps=0, clip=None), train, state
        )
        assert metrics["loss_nats"] == pytest.approx(240 / 110, abs=1e-5)
        assert metrics["n_tokens"] == 110
        results.append((state.opt_state, metrics["grad_norm"]))
    for other in results[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), results[0], other
        )


def test_accumulated_gradients_equal_those_of_the_whole_batch():
    weights = np.random.default_rng(3).integers(0, 2, (8, 8)).astype(np.float32)
    batch = batch_of(8, weights=weights)
    grads = [
        steps(TINY, [batch], train=TrainConfig(batch_size=8, accumulate=a))[0].opt_state
        for a in (1, 2, 8)
    ]
    top = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads[0]))
    for other in grads[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * top), grads[0], other
        )


def test_a_batch_without_targets_changes_no_weight():
    optim = OptimConfig(warmup_steps=0, weight_decay=0.0)
    before = init_state(TINY, optimizer(optim, 1000), 0).params
    empty = batch_of(2, weights=np.zeros((2, 8), np.float32))
    state, (metrics,) = steps(TINY, [empty], optim)
    assert metrics["loss_nats"] == 0.0 and metrics["finite"]
    jax.tree.map(np.testing.assert_array_equal, before, state.params)


def test_a_step_that_is_not_finite_changes_nothing():
    batch = batch_of(2)
    tx = optimizer(OptimConfig(), 10)
    state = init_state(TINY, tx, 0)
    kernel = state.params["block_0"]["ffn"]["up"]["kernel"]
    state.params["block_0"]["ffn"]["up"]["kernel"] = kernel.at[0, 0].set(jnp.nan)
    after, (metrics,) = steps(TINY, [batch], state=state)
    assert not metrics["finite"]
    before, after = (jax.tree.leaves(s.replace(key=None)) for s in (state, after))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_fresh_loss_is_log_of_the_true_vocabulary():
    """Case S10: ln 65, not ln 128; and padding rows have neither gradient nor decay."""
    cfg = dataclasses.replace(TINY, vocab_size=65, init=Normal())
    batch = batch_of(4, vocab=65)
    state, history = steps(cfg, [batch] * 3, OptimConfig(warmup_steps=0, weight_decay=1.0))
    assert history[0]["loss_nats"] == pytest.approx(np.log(65), abs=0.05)
    table = state.params["embed"]["embedding"]
    assert table.shape == (128, 16) and (table[65:] == 0).all() and (table[:65] != 0).any()
    zero = jax.tree.map(jnp.zeros_like, state.params)
    nats = eval_step(zero, batch, cfg=cfg, train=TrainConfig())
    assert nats.mean() == pytest.approx(np.log(65), abs=1e-5)


def test_overfits_one_batch():
    batch = batch_of(4)
    cfg = dataclasses.replace(TINY, init=Normal())
    optim = OptimConfig(lr=1e-2, warmup_steps=10, schedule="constant", weight_decay=0.0)
    _, history = steps(cfg, [batch] * 200, optim)
    assert history[-1]["loss_nats"] < 0.05


def test_bfloat16_follows_float32():
    batches = [batch_of(8, seed=s % 3) for s in range(20)]
    curves = [
        [float(m["loss_nats"]) for m in steps(TINY, batches, train=TrainConfig(dtype=d))[1]]
        for d in ("float32", "bfloat16")
    ]
    np.testing.assert_allclose(curves[1], curves[0], rtol=0.02)


def test_dropout_only_in_training():
    """Case T09: evaluation does not know the rate; training masks differ between steps."""
    batch = batch_of(4)
    params = init_state(TINY, optimizer(OptimConfig(), 1), 0).params
    dropped = dataclasses.replace(TINY, dropout=0.5)
    nats = [eval_step(params, batch, cfg=c, train=TrainConfig()) for c in (TINY, dropped, dropped)]
    np.testing.assert_array_equal(nats[0], nats[1])
    np.testing.assert_array_equal(nats[0], nats[2])
    frozen = OptimConfig(lr=1e-30, warmup_steps=0, weight_decay=0.0)
    _, history = steps(dropped, [batch] * 3, frozen)
    losses = {float(m["loss_nats"]) for m in history}
    assert len(losses) == 3 and float(nats[0].mean()) not in losses


@pytest.mark.parametrize("form", [{"remat": True}, {"scan": True}, {"remat": True, "scan": True}])
def test_remat_and_scan_change_nothing(form):
    cfg = dataclasses.replace(TINY, dropout=0.3)
    batch, key = batch_of(4), jax.random.key(7)
    params = init_state(cfg, optimizer(OptimConfig(), 1), 0).params

    def value(train):
        return jax.value_and_grad(loss_sum, has_aux=True)(params, cfg, train, batch, key)

    plain, other = value(TrainConfig()), value(TrainConfig(**form))
    scale = float(batch.weights_BT.sum())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6 * scale), plain, other)


def test_gradients_by_finite_differences():
    with jax.enable_x64(True):
        cfg = dataclasses.replace(TINY, n_layers=1)
        params = init_state(cfg, optimizer(OptimConfig(), 1), 0).params
        params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
        batch, train = batch_of(2), TrainConfig()
        object.__setattr__(train, "dtype", "float64")

        def value(params):
            return loss_sum(params, cfg, train, batch, None)[0]

        flat, unravel = jax.flatten_util.ravel_pytree(params)
        grad = jax.flatten_util.ravel_pytree(jax.grad(value)(params))[0]
        rng = np.random.default_rng(0)
        value = jax.jit(value)
        for i in rng.choice(len(flat), 20, replace=False):
            h = 1e-5
            up, down = (value(unravel(flat.at[i].add(s * h))) for s in (1, -1))
            assert (up - down) / (2 * h) == pytest.approx(float(grad[i]), rel=1e-5, abs=1e-8)
