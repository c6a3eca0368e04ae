# SPDX-License-Identifier: Apache-2.0
"""Adapters: which kernels get them, that fresh ones change nothing, and that they alone train."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_step import TINY, batch_of

from jaxgpt.boxes.moe import MoE
from jaxgpt.errors import ConfigError
from jaxgpt.model import forward
from jaxgpt.testing import jit_forward, jit_init
from jaxgpt.train.config import LoraConfig, OptimConfig, TrainConfig
from jaxgpt.train.digest import by_path
from jaxgpt.train.lora import init_lora, merged, split, targets
from jaxgpt.train.optim import optimizer
from jaxgpt.train.step import eval_step, init_state, train_step

LORA = LoraConfig(rank=2, alpha=8.0, targets=("attention/*",))
MOE = dataclasses.replace(TINY, ffn=MoE(n_experts=4, top_k=2))


def base(cfg=TINY):
    return jit_init(cfg, jax.random.key(0))


@pytest.mark.parametrize(
    ("pattern", "per_block"),
    [
        ("attention/*", 4),
        ("attention/q", 1),
        ("attention/q/kernel", 1),
        ("*/ffn/up", 1),
        ("*", 6),
        ("block_1/attention/[qv]/kernel", 1),
    ],
)
def test_targets_are_patterns_of_paths(pattern, per_block):
    found = targets(base(), LoraConfig(rank=1, targets=(pattern,)))
    assert len(found) == per_block * TINY.n_layers
    assert all(path[-1] == "kernel" for path in found)


def test_a_pattern_without_a_kernel_is_an_error():
    with pytest.raises(ConfigError, match=r"no kernel matches 'attn/\*'.*attention/q/kernel"):
        targets(base(), LoraConfig(rank=1, targets=("attention/q", "attn/*")))
    with pytest.raises(ConfigError, match=r"lora\.rank=99 exceeds block_0/attention/k/kernel"):
        init_lora(base(), LoraConfig(rank=99), jax.random.key(0))


@pytest.mark.parametrize("cfg", [TINY, MOE], ids=["dense", "experts"])
def test_a_fresh_adapter_is_the_base_bitwise(cfg):
    params = base(cfg)
    lora = dataclasses.replace(LORA, targets=("attention/*", "ffn/*"))
    tokens_BT = jnp.arange(8)[None] % cfg.vocab_size
    fresh = merged(init_lora(params, lora, jax.random.key(1)), lora)
    assert jax.tree.structure(fresh) == jax.tree.structure(params)
    want, got = (jit_forward(cfg, p, tokens_BT).logits_BTV for p in (params, fresh))
    assert (np.asarray(want) == np.asarray(got)).all()


def test_a_kernel_plus_its_low_rank_addition():
    params = init_lora(base(), LORA, jax.random.key(1))
    q = params["lora"]["block_0"]["attention"]["q"]
    q["b"] = jax.random.normal(jax.random.key(2), q["b"].shape)
    x = jax.random.normal(jax.random.key(3), (5, q["a"].shape[0]))
    kernel = params["block_0"]["attention"]["q"]["kernel"]
    unmerged = x @ kernel + 8.0 / 2 * (x @ q["a"]) @ q["b"]
    together = merged(params, LORA)["block_0"]["attention"]["q"]["kernel"]
    np.testing.assert_allclose(x @ together, unmerged, atol=1e-5)
    assert np.abs(together - kernel).max() > 0.1


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_model_is_frozen_and_has_no_moments(accumulate):
    tx, train = optimizer(OptimConfig(warmup_steps=0, decay="all"), 4), TrainConfig(batch_size=4)
    train = dataclasses.replace(train, accumulate=accumulate)
    params = base()
    state = init_state(TINY, tx, 0, params, lora=LORA)
    n_adapters = len(jax.tree.leaves(state.params["lora"]))
    assert n_adapters == 2 * 4 * TINY.n_layers
    assert sum("/lora/" in path for path in by_path(state.opt_state)) == 2 * n_adapters
    assert all("/lora/" in p or p.endswith("count") for p in by_path(state.opt_state))
    nats = [eval_step(state.params, batch_of(4), cfg=TINY, train=train, lora=LORA).mean()]
    for _ in range(3):
        state, _ = train_step(state, batch_of(4), cfg=TINY, tx=tx, train=train, lora=LORA)
        nats.append(eval_step(state.params, batch_of(4), cfg=TINY, train=train, lora=LORA).mean())
    assert nats[-1] < nats[0]
    trained, frozen = split(state.params, LORA)
    assert set(trained) == {"lora"}
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (frozen, params)), strict=True))


def test_without_a_rank_nothing_is_there():
    params = base()
    off = LoraConfig()
    assert init_lora(params, off, jax.random.key(0)) is params and merged(params, off) is params
    assert split(params, off) == (params, {})
    with pytest.raises(ConfigError, match="rank=0 must be positive"):
        LoraConfig(rank=0)
    with pytest.raises(ConfigError, match=r"lora\.targets is empty"):
        LoraConfig(rank=1, targets=())


def test_the_adapters_gradient_is_that_of_the_low_rank_product():
    params = init_lora(base(), LORA, jax.random.key(1))
    tokens_BT = jnp.arange(8)[None] % TINY.vocab_size

    def loss(adapters):
        full = merged({**params, "lora": adapters}, LORA)
        return forward(TINY, full, tokens_BT).logits_BTV[..., : TINY.vocab_size].std()

    grads = jax.grad(loss)(params["lora"])
    for path, grad in by_path(grads).items():
        assert (np.abs(grad).max() > 0) == path.endswith("/b")  # b is zero: a waits for it
