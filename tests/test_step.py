# SPDX-License-Identifier: Apache-2.0
import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import FFNBox
from jaxgpt.boxes.head import Tied, Untied
from jaxgpt.boxes.init import Normal
from jaxgpt.boxes.norm import NoNorm
from jaxgpt.boxes.position import NoPosition
from jaxgpt.data.batches import Batch
from jaxgpt.losses import token_nats
from jaxgpt.model import ModelConfig, forward, init_params
from jaxgpt.train.config import OptimConfig, TrainConfig
from jaxgpt.train.optim import optimizer
from jaxgpt.train.step import (
    apart,
    averaged_params,
    eval_step,
    init_state,
    loss_sum,
    together,
    train_step,
)

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
    assert same((state.params, state.opt_state), (after.params, after.opt_state))
    assert after.step == 1, "the batch and the dropout of a step follow from its number"


def same(a, b):
    return all(
        jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(x, y, equal_nan=True), a, b))
    )


@dataclasses.dataclass(frozen=True)
class BadGradient(FFNBox):
    """Its loss is 0, and its gradient is inf where the first input is large."""

    def build(self, dims, name=None):
        return _BadGradient(name=name)


class _BadGradient(nn.Module):
    @nn.compact
    def __call__(self, x, valid, dropout_key=None):
        w = self.param("w", nn.initializers.zeros, (), jnp.float32)
        bad = x[0, 0, 0] > 5
        return jnp.zeros_like(x), {"bad_loss": jnp.sqrt(jnp.where(bad, w, 1.0)) - ~bad}


def batches_with_zero_first(bad):
    """Eight batches; token 0 is at the beginning of those of `bad` and nowhere else."""
    for i in range(8):
        batch = batch_of(2, seed=i)
        tokens_BT = jnp.maximum(batch.tokens_BT, 1)
        yield batch.replace(tokens_BT=tokens_BT.at[0, 0].set(0 if i in bad else 1))


@pytest.mark.parametrize("kind, accumulate", [("loss", 2), ("gradient", 1)])
def test_bad_steps_are_skipped_and_counted(kind, accumulate):
    """Rows C1, C2, C4, C5: the run equals one without these steps; clipping makes no NaN."""
    cfg = dataclasses.replace(TINY, n_layers=1, norm=NoNorm(), ffn=BadGradient())
    bad, train = {2, 3, 6}, TrainConfig(batch_size=2, accumulate=accumulate, ema_decay=0.9)
    optim = OptimConfig(warmup_steps=4, clip=1.0)
    tx = optimizer(optim, 1000)
    state = init_state(cfg, tx, 0, ema=True)
    if kind == "gradient":
        table = state.params["embed"]["embedding"]
        state.params["embed"]["embedding"] = table.at[0].set(100.0)
    batches = list(batches_with_zero_first(bad))
    if kind == "loss":
        for i in bad:
            batches[i] = batches[i].replace(weights_BT=batches[i].weights_BT.at[0, 3].set(jnp.inf))
    good = [batch for i, batch in enumerate(batches) if i not in bad]
    after, history = steps(cfg, batches, optim, train, state)
    assert [int(m["bad_steps"]) for m in history] == [0, 0, 1, 2, 0, 0, 1, 0]
    assert [int(m["skipped_steps"]) for m in history] == [0, 0, 1, 2, 2, 2, 3, 3]
    assert [bool(m["finite"]) for m in history] == [i not in bad for i in range(8)]
    if kind == "gradient":
        assert all(np.isfinite(m["loss_nats"]) for m in history)
    assert after.step == 8 and after.extra["skipped_steps"] == 3
    plain, _ = steps(cfg, good, optim, train, state)
    kept = [(s.params, s.opt_state, s.extra["ema"]) for s in (after, plain)]
    assert same(*kept)


def test_the_moving_average_by_hand():
    """min(decay, (1 + n) / (10 + n)) of the n-th update; it begins at the parameters."""
    cfg = dataclasses.replace(TINY, n_layers=1, ffn=OneWeight())
    train, optim = TrainConfig(batch_size=4, ema_decay=0.25), OptimConfig(warmup_steps=0)
    tx = optimizer(optim, 1000)
    state = init_state(cfg, tx, 0, ema=True)
    step = jax.jit(functools.partial(train_step, cfg=cfg, tx=tx, train=train))
    ema = 1.0
    for n, decay in ((1, 2 / 11), (2, 3 / 12), (3, 0.25), (4, 0.25)):
        state, _ = step(state, batch_of(4))
        ema = decay * ema + (1 - decay) * float(state.params["block_0"]["ffn"]["w"])
        assert state.extra["ema"]["block_0"]["ffn"]["w"] == pytest.approx(ema, abs=1e-7), n
    averaged = averaged_params(state)
    assert averaged["block_0"]["ffn"]["w"] == state.extra["ema"]["block_0"]["ffn"]["w"]
    assert averaged_params(init_state(cfg, tx, 0)) is None
    parts = apart(state)
    assert "ema" not in parts[1].extra and parts[1].params is None
    assert jax.tree.structure(together(*parts)) == jax.tree.structure(state)


def test_norms_and_ratio_of_a_step():
    optim = OptimConfig(lr=1e-2, warmup_steps=0)
    before = init_state(TINY, optimizer(optim, 1000), 0)
    after, (metrics,) = steps(TINY, [batch_of(4)], optim, state=before)
    norm = lambda tree: np.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(tree)))  # noqa: E731
    moved = jax.tree.map(jnp.subtract, after.params, before.params)
    assert metrics["param_norm"] == pytest.approx(norm(before.params), rel=1e-5)
    assert metrics["update_ratio"] == pytest.approx(norm(moved) / norm(before.params), rel=1e-3)


def test_z_loss_trains_and_is_not_reported():
    """The objective's excess is coef * sum of log(Z)^2 over trained tokens; off it is not there."""
    params = init_state(TINY, optimizer(OptimConfig(), 1), 0).params
    weights = np.random.default_rng(3).integers(0, 2, (4, 8)).astype(np.float32)
    batch = batch_of(4, weights=weights)
    values = {z: loss_sum(params, TINY, TrainConfig(z_coef=z), batch, None) for z in (0.0, 0.25)}
    logits = forward(TINY, params, batch.tokens_BT).logits_BTV
    extra = 0.25 * float((jax.nn.logsumexp(logits, -1) ** 2 * weights).sum())
    assert extra > 1 and values[0.25][0] - values[0.0][0] == pytest.approx(extra, rel=1e-4)
    assert values[0.25][1][0] == values[0.0][1][0]

    def plain(params):
        nats = token_nats(forward(TINY, params, batch.tokens_BT).logits_BTV, batch.targets_BT)
        return (nats * batch.weights_BT).sum()

    with_z = lambda p, z: loss_sum(p, TINY, TrainConfig(z_coef=z), batch, None)[0]  # noqa: E731
    eqns = [
        jax.make_jaxpr(f)(params).pretty_print().count("exp ")
        for f in (plain, functools.partial(with_z, z=0.0), functools.partial(with_z, z=0.25))
    ]
    assert eqns[0] == eqns[1] == eqns[2], "the log-sum-exp is computed once"
    sizes = [len(jax.make_jaxpr(functools.partial(with_z, z=z))(params).eqns) for z in (0.0, 0.25)]
    assert sizes[0] < sizes[1]


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


HEADS = {  # the vocabulary is padded from 300 to 384 in each
    "tied": Tied(softcap=2.0),
    "untied": Untied(use_bias=True),
}


@pytest.mark.parametrize("head", ["tied", pytest.param("untied", marks=pytest.mark.slow)])
def test_the_loss_in_chunks(head):
    """The same loss and gradients, and no array of all logits in the compiled program."""
    cfg = dataclasses.replace(TINY, vocab_size=300, n_layers=1, head=HEADS[head])
    weights = np.random.default_rng(3).integers(0, 2, (4, 8)).astype(np.float32)
    batch = batch_of(4, vocab=300, weights=weights)
    params = jax.jit(functools.partial(init_params, cfg))(jax.random.key(0))

    def value(chunk):
        train = TrainConfig(loss_chunk=chunk, z_coef=0.1)

        def loss(params, batch):
            return loss_sum(params, cfg, train, batch, None)

        grad = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params, batch).compile()
        nats = jax.jit(functools.partial(eval_step, cfg=cfg, train=train))(params, batch)
        return grad(params, batch), nats, set(re.findall(r"\[([0-9,]+)\]", grad.as_text()))

    ((want, grads), nats, whole), ((got, grads2), nats2, pieces) = map(value, (None, 3))
    all_logits = {"4,8,384", "32,384", "384,32"}
    assert all_logits & whole and not all_logits & pieces and {"4,3,384", "12,384"} & pieces
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    np.testing.assert_allclose(nats2, nats, rtol=1e-5, atol=1e-6)
    top = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6 * top), grads2, grads)


@pytest.mark.parametrize(
    "form", [{"remat": "full"}, {"scan": True}, {"remat": "dots", "scan": True}]
)
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
