# SPDX-License-Identifier: Apache-2.0
"""Each box against its paper's formulas, in float64 of numpy; through a step, and a checkpoint."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_step import batch_of

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.boxes.moe import MoE
from jaxgpt.config import RunConfig, differences, from_yaml, resolve, to_yaml
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig, init_params, param_shapes
from jaxgpt.train.checkpoint import Checkpoints
from jaxgpt.train.config import LoraConfig, OptimConfig, TrainConfig
from jaxgpt.train.digest import by_path, digest
from jaxgpt.train.lora import init_lora, split
from jaxgpt.train.optim import optimizer
from jaxgpt.train.optimizers import SGD, Adafactor, AdamW, Lion, Muon, OptimBox, is_hidden
from jaxgpt.train.step import init_state, train_step

LR, DECAY = 0.1, 0.5
PLAIN = dict(lr=LR, schedule="constant", warmup_steps=0, weight_decay=DECAY, clip=None)
HIDDEN, TABLE = "block_0/up/kernel", "embed/embedding"
TINY = ModelConfig(
    vocab_size=13, context_length=8, d_model=8, n_layers=1, attention=GQA(2), vocab_multiple=1
)
EVERY = (AdamW(), Lion(), SGD(), Adafactor(), Muon(iterations=2))


def drawn(seed):
    rng = np.random.default_rng(seed)
    return {HIDDEN: rng.normal(size=(2, 3)), TABLE: rng.normal(size=(4, 2))}


def nested(flat):
    leaves = {path: jnp.asarray(leaf, jnp.float32) for path, leaf in flat.items()}
    return {"block_0": {"up": {"kernel": leaves[HIDDEN]}}, "embed": {"embedding": leaves[TABLE]}}


def updated(cfg, params, grads):
    """Parameters and the state after an update with each of `grads`."""
    tx = optimizer(cfg, 100)
    state = tx.init(params)
    for grad in grads:
        updates, state = tx.update(grad, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params, state


def check_by_hand(method, rules):
    """Three updates of two matrices; `rules` give d from (n, g, w, memory) for each of them."""
    params, grads = drawn(0), [drawn(seed) for seed in (1, 2, 3)]
    got = by_path(updated(OptimConfig(method, **PLAIN), nested(params), map(nested, grads))[0])
    for path, w in params.items():
        memory = {}
        for n, grad in enumerate(grads, 1):
            w = w - LR * (rules[path](n, grad[path], w, memory) + DECAY * w)
        np.testing.assert_allclose(got[path], w, atol=1e-6, rtol=0)


def adam(n, g, w, memory, beta1=0.8, beta2=0.9, eps=1e-3):
    """Kingma & Ba 2014, algorithm 1."""
    m = memory["m"] = beta1 * memory.get("m", 0) + (1 - beta1) * g
    v = memory["v"] = beta2 * memory.get("v", 0) + (1 - beta2) * g**2
    return (m / (1 - beta1**n)) / (np.sqrt(v / (1 - beta2**n)) + eps)


def test_adamw():
    check_by_hand(AdamW(0.8, 0.9, 1e-3), {HIDDEN: adam, TABLE: adam})


def test_lion():
    def lion(n, g, w, memory):
        """Chen et al. 2023, algorithm 2."""
        m = memory.get("m", 0)
        memory["m"] = 0.7 * m + 0.3 * g
        return np.sign(0.6 * m + 0.4 * g)

    check_by_hand(Lion(0.6, 0.7), {HIDDEN: lion, TABLE: lion})


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(momentum, nesterov):
    def sgd(n, g, w, memory):
        """Sutskever et al. 2013, eq. 1-4, with the rate outside."""
        m = memory["m"] = momentum * memory.get("m", 0) + g
        return g + momentum * m if nesterov else m

    if nesterov and not momentum:
        with pytest.raises(ConfigError, match="nesterov=True needs a momentum"):
            SGD(momentum, nesterov)
        return
    check_by_hand(SGD(momentum, nesterov), {HIDDEN: sgd, TABLE: sgd})


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("factored", [False, True])
def test_adafactor(factored, scaled):
    def rms(x):
        return np.sqrt(np.mean(x**2))

    def adafactor(n, g, w, memory):
        """Shazeer & Stern 2018, algorithms 4 (matrices) and 5 (what is not factored)."""
        beta, square = 1 - n**-0.8, g**2 + 1e-30
        if factored:
            row = memory["row"] = beta * memory.get("row", 0) + (1 - beta) * square.sum(1)
            col = memory["col"] = beta * memory.get("col", 0) + (1 - beta) * square.sum(0)
            v = np.outer(row, col) / row.sum()
        else:
            v = memory["v"] = beta * memory.get("v", 0) + (1 - beta) * square
        u = g / np.sqrt(v)
        return u / max(1, rms(u) / 0.9) * (max(1e-3, rms(w)) if scaled else 1)

    method = Adafactor(clip_rms=0.9, parameter_scale=scaled, min_factored=2 if factored else 9)
    check_by_hand(method, {HIDDEN: adafactor, TABLE: adafactor})


def newton_schulz(x, iterations=5):
    """Jordan et al. 2024, the listing."""
    x = x / np.linalg.norm(x)
    for _ in range(iterations):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("consistent_rms", [None, 0.2])
def test_muon(nesterov, consistent_rms):
    def muon(n, g, w, memory, beta=0.9):
        m = memory["m"] = beta * memory.get("m", 0) + (1 - beta) * g
        mean = m / (1 - beta**n)
        if nesterov:
            mean = beta * m / (1 - beta ** (n + 1)) + (1 - beta) * g / (1 - beta**n)
        size = np.sqrt(3 / 2) if consistent_rms is None else 0.2 * np.sqrt(3)  # [in 2, out 3]
        return size * newton_schulz(mean)

    method = Muon(0.9, nesterov, consistent_rms=consistent_rms, rest=AdamW(0.8, 0.9, 1e-3))
    check_by_hand(method, {HIDDEN: muon, TABLE: adam})


def test_muon_turns_a_matrix_either_way_and_each_expert_alone():
    """The update of a stack is that of its matrices; a tall one is the wide one's, transposed."""
    cfg = OptimConfig(Muon(consistent_rms=0.2), **PLAIN | {"weight_decay": 0.0})
    g = np.random.default_rng(0).normal(size=(3, 4, 2))

    def step(g):
        params = {"block_0": {"experts": {"kernel": jnp.zeros(g.shape)}}}
        grads = {"block_0": {"experts": {"kernel": jnp.asarray(g, jnp.float32)}}}
        return np.asarray(jax.tree.leaves(updated(cfg, params, [grads])[0])[0])

    stack, alone = step(g), np.stack([step(each) for each in g])
    np.testing.assert_allclose(stack, alone, atol=1e-6)
    np.testing.assert_allclose(stack, step(g.swapaxes(1, 2)).swapaxes(1, 2), atol=1e-6)
    values = np.linalg.svd(stack, compute_uv=False) / (LR * 0.2 * np.sqrt(4))
    assert 0.6 < values.min() and values.max() < 1.3, "about orthogonal"
    assert np.sqrt(np.mean(stack**2)) == pytest.approx(0.2 * LR / np.sqrt(2 / 2), rel=0.3)


def test_muon_takes_the_kernels_of_blocks_and_nothing_else():
    cfg = dataclasses.replace(TINY, ffn=MoE(4, shared=GatedMLP()))
    shapes = param_shapes(cfg)
    state = jax.eval_shape(optimizer(OptimConfig(Muon(rest=Lion())), 1).init, shapes)
    moments = [p for p in by_path(state) if "mu" in p.split("/")]
    muon = {p.partition("/mu/")[2] for p in moments if "/hidden/" in p}
    rest = {p.partition("/mu/")[2] for p in moments if "/rest/" in p}
    assert muon == {p for p in muon | rest if is_hidden(p)} and not muon & rest
    assert {"block_0/ffn/experts/up/kernel", "block_0/ffn/router/kernel"} <= muon
    assert {"embed/embedding", "position/embedding", "final_norm/scale"} <= rest
    assert muon | rest == set(by_path(shapes))


def test_the_rate_of_muon_s_rest():
    params, grads = nested(drawn(0)), nested(drawn(1))
    one, half = (
        by_path(updated(OptimConfig(Muon(rest_rate=rate), **PLAIN), params, [grads])[0])
        for rate in (1.0, 0.5)
    )
    before = by_path(params)
    assert (one[HIDDEN] == half[HIDDEN]).all()
    np.testing.assert_allclose(2 * (half[TABLE] - before[TABLE]), one[TABLE] - before[TABLE], 1e-4)


@pytest.fixture(scope="module")
def params():
    return jax.jit(functools.partial(init_params, TINY))(jax.random.key(0))


@pytest.mark.parametrize("method", EVERY, ids=str)
def test_a_run_goes_on_bitwise(method, params, tmp_path):
    rounded = "float32" if isinstance(method, Adafactor) else "bfloat16"
    tx = optimizer(OptimConfig(method, lr=1e-2, warmup_steps=2, state_dtype=rounded), 4)
    step = jax.jit(functools.partial(train_step, cfg=TINY, tx=tx, train=TrainConfig()))
    state = init_state(TINY, tx, 0, params)
    with Checkpoints(tmp_path) as checkpoints:
        for n in range(4):
            state, metrics = step(state, batch_of(4, seed=n))
            assert metrics["finite"]
            if n == 1:
                checkpoints.save(2, state.params, dataclasses.replace(state, params=None))
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        found = checkpoints.restore(like.params, dataclasses.replace(like, params=None))
    again = dataclasses.replace(found.rest, params=found.params)
    assert digest(again.params) != digest(state.params)
    for n in (2, 3):
        again, _ = step(again, batch_of(4, seed=n))
    assert digest(again) == digest(state)


@pytest.mark.parametrize("method", EVERY, ids=str)
def test_adapters_alone_are_trained(method, params):
    lora = LoraConfig(rank=2)
    tx = optimizer(OptimConfig(method, lr=1e-2, warmup_steps=0), 4)
    trained, _ = split(init_lora(params, lora, jax.random.key(1)), lora)
    ones = jax.tree.map(jnp.ones_like, trained)
    updates, state = jax.jit(tx.update)(ones, tx.init(trained), trained)
    assert all((update != 0).any() for update in jax.tree.leaves(updates))
    assert not any("embed" in path for path in by_path(state)), "no moments of the model"


# --- by name --------------------------------------------------------------------------------------


def options(*words):
    return resolve(RunConfig(), (), words)


OWN = """
import dataclasses
import optax
from jaxgpt.train.optimizers import OptimBox

@dataclasses.dataclass(frozen=True)
class Sign(OptimBox):
    scale: float = 1.0

    def build(self):
        return optax.scale_by_sign() if self.scale == 1 else optax.scale(self.scale)
"""


def test_on_the_command_line_and_in_yaml(tmp_path, monkeypatch):
    assert options().optim.method == AdamW()
    run = options("--optim.method.beta1=0.8", "--optim.method=Lion", "--optim.lr=1e-4")
    assert run.optim.method == Lion(beta1=0.8) and run.optim.lr == 1e-4
    assert "class_path: Lion\n" in to_yaml(run) and from_yaml(to_yaml(run)) == run
    run = options("--optim.method=Muon", "--optim.method.rest.beta2=0.95")
    assert run.optim.method == Muon(rest=AdamW(beta2=0.95)) and from_yaml(to_yaml(run)) == run
    assert from_yaml("optim: {method: SGD}").optim.method == SGD()
    (tmp_path / "my_optimizer.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    run = options("--optim.method=my_optimizer.Sign", "--optim.method.scale=2")
    assert from_yaml(to_yaml(run)) == run and isinstance(run.optim.method, OptimBox)
    w = {"kernel": jnp.ones((2, 2))}
    update = updated(dataclasses.replace(run.optim, warmup_steps=0, clip=None), w, [w])[0]
    assert update["kernel"][0, 0] == pytest.approx(1 - 1e-3 * (2 + 0.1))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--optim.method=Adam", "optim.method=Adam is no OptimBox; fix: did you mean .*AdamW"),
        ("--optim.method=GQA", "optim.method=GQA is no OptimBox; fix: one of Adafactor, AdamW, "),
        ("--optim.beta1=0.9", r"did you mean --optim\.method\.beta1\?"),
        ("--optim.method.betta1=0.9", r"did you mean --optim\.method\.beta1\?"),
        ("--optim.method.beta1=1", r"beta1=1\.0 must be in \[0, 1\)"),
        ("--optim.method.eps=0", "eps=0.0 must be positive"),
        ("--model.norm=AdamW", "model.norm=AdamW is no NormBox"),
    ],
)
def test_mistakes(word, message):
    with pytest.raises(ConfigError, match=message):
        options(word)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Muon(rest=Muon()), "rest=Muon has no parameters"),
        (lambda: Muon(iterations=0), "iterations=0 must be positive"),
        (lambda: Muon(consistent_rms=0.0), "consistent_rms=0.0 must be positive"),
        (lambda: Muon(beta=1.0), "beta=1.0 must be in"),
        (lambda: Lion(beta2=-0.1), "beta2=-0.1 must be in"),
        (lambda: SGD(momentum=1.5), "momentum=1.5 must be in"),
        (lambda: Adafactor(clip_rms=0.0), "clip_rms=0.0 must be positive"),
    ],
)
def test_knobs_that_cannot_be(made, message):
    with pytest.raises(ConfigError, match=message):
        made()


def test_another_optimizer_is_another_run():
    """Case B3: a run refuses to go on with it, by name."""
    (line,) = differences(options(), options("--optim.method=Lion"))
    assert line.startswith("optim.method: AdamW(beta1=0.9") and "-> Lion(beta1=0.9" in line
