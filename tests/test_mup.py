# SPDX-License-Identifier: Apache-2.0
"""One flag keeps activations and their updates of one size at every width: Yang et al. 2022.

The test is the coordinate check of its appendix D.1: widths against how far activations go in ten
steps. Each factor of table 8 is also looked at alone.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_step import batch_of

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.init import Normal, TorchDefault
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.rope import RoPE
from jaxgpt.config import RunConfig, from_yaml, resolve, to_yaml
from jaxgpt.data.config import DataConfig
from jaxgpt.errors import ConfigError
from jaxgpt.flops import count_params
from jaxgpt.model import ModelConfig, forward, init_params, param_shapes
from jaxgpt.train.config import OptimConfig, TrainConfig
from jaxgpt.train.digest import by_path
from jaxgpt.train.loop import fit
from jaxgpt.train.optim import optimizer
from jaxgpt.train.optimizers import SGD, Adafactor, AdamW, Lion, Muon
from jaxgpt.train.runfolder import open_run
from jaxgpt.train.step import init_state, train_step

BASE, STEPS = 64, 10
SITES = {
    "residual": "block_{}/out",
    "attention out": "block_{}/attention/out",
    "hidden": "block_{}/ffn/hidden",
    "logits": "head/logits",
}
BATCH = batch_of(4, 16, vocab=32)
FAST = {"xla_backend_optimization_level": 0}  # most of the time goes into compilation
PLAIN = {"attention": GQA(4, use_bias=False), "ffn": MLP(use_bias=False)}
MODERN = {
    "attention": GQA(4, qk_norm=RMSNorm(), use_bias=False),
    "position": RoPE(),
    "norm": RMSNorm(),
    "final_norm": RMSNorm(),
    "ffn": GatedMLP(),
    "head": Untied(),
}


def model(width, mup_base=BASE, n_layers=2, **changes):
    sizes = dict(vocab_size=32, context_length=16, vocab_multiple=1)
    sizes |= dict(d_model=width, n_layers=n_layers, mup_base=mup_base)
    return ModelConfig(**sizes | PLAIN | changes)


@functools.cache
def changes(cfg, method=AdamW(), lr=1e-3):
    """How far each site, of the last block, goes in ten steps, in the mean over its entries."""
    sites = {name: site.format(cfg.n_layers - 1) for name, site in SITES.items()}
    optim = OptimConfig(method, lr=lr, schedule="constant", warmup_steps=0)
    tx = optimizer(optim, 100, cfg.dims().width_ratio)

    def start(key):
        params = init_params(cfg, key)
        return params, look(params)

    def look(params):
        return forward(cfg, params, BATCH.tokens_BT, capture=[*sites.values()]).captured

    @functools.partial(jax.jit, compiler_options=FAST)
    def step(state, batch):
        return train_step(state, batch, cfg=cfg, tx=tx, train=TrainConfig())[0]

    params, before = jax.jit(start, compiler_options=FAST)(jax.random.key(0))
    state = init_state(cfg, tx, 0, params)
    for _ in range(STEPS):
        state = step(state, BATCH)
    after = jax.jit(look, compiler_options=FAST)(state.params)
    return {name: float(jnp.abs(after[site] - before[site]).mean()) for name, site in sites.items()}


def spread(widths, **knobs):
    """Of each site, the largest change over the smallest one."""
    method = {name: knobs.pop(name) for name in ("method", "lr") if name in knobs}
    table = [changes(model(width, **knobs), **method) for width in widths]
    return {name: max(r[name] for r in table) / min(r[name] for r in table) for name in SITES}


def test_updates_keep_their_size_with_the_flag_alone():
    assert max(spread((64, 256), n_layers=1).values()) < 1.5
    # At the base the flag changes nothing, which is looked at below.
    base, without = (changes(model(*each, n_layers=1)) for each in ((64,), (256, None)))
    assert max(without[name] / base[name] for name in ("residual", "hidden")) > 1.5


@pytest.mark.slow
def test_updates_keep_their_size_from_64_to_512():
    widths = (64, 128, 256, 512)
    assert max(spread(widths).values()) < 1.5
    assert min(spread(widths, mup_base=None).values()) > 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        {"method": Lion()},
        {"method": Muon(), "lr": 3e-3},
        {"method": Muon(consistent_rms=None), "lr": 3e-3},
        {"method": Adafactor(parameter_scale=False)},
        MODERN,
        {"attention": GQA(4, head_dim=16), "init": Normal(std=None)},
        {"init": TorchDefault()},
        {"ffn": MoE(4)},
    ],
    ids=str,
)
def test_other_optimizers_and_boxes(knobs):
    assert max(spread((64, 256), **knobs).values()) < 1.5


# --- each factor of table 8 -----------------------------------------------------------------------


def test_variance_falls_with_width_for_hidden_matrices_alone():
    def sizes(*args):
        cfg = model(*args, n_layers=1, head=Untied())
        params = jax.jit(functools.partial(init_params, cfg), compiler_options=FAST)
        return {
            path: float(leaf.std()) for path, leaf in by_path(params(jax.random.key(0))).items()
        }

    wide, plain = sizes(256), sizes(256, None)
    for path, size in plain.items():
        if path.endswith(("kernel", "embedding")):
            smaller = 2.0 if path.startswith("block_") else 1.0
            assert wide[path] == pytest.approx(size / smaller, rel=1e-5), path
    base = model(64)
    assert base.dims() == dataclasses.replace(base, mup_base=None).dims(), "nothing changes there"


@pytest.mark.parametrize("init", [Normal(std=None), TorchDefault()], ids=str)
@pytest.mark.parametrize("residual", [False, True])
def test_initialisers_by_inputs_need_no_factor(init, residual):
    """Their variance is 1/inputs already; dividing it again would be wrong."""
    dims, key = model(256).dims(), jax.random.key(0)
    plain = dataclasses.replace(dims, width_ratio=1.0)
    one, other = (init.kernel(d, residual=residual)(key, (256, 8)) for d in (dims, plain))
    assert (one == other).all()


@pytest.mark.parametrize("init", [Normal(), Normal(std=None), TorchDefault()], ids=str)
def test_untied_heads_and_biases_start_like_at_the_base(init):
    """Also where an initialiser follows the inputs, as PyTorch's does (`MuReadout` of mup)."""

    def sizes(*args):
        cfg = model(*args, n_layers=1, init=init, head=Untied(True), ffn=MLP(use_bias=True))
        params = jax.jit(functools.partial(init_params, cfg), compiler_options=FAST)
        found = by_path(params(jax.random.key(0)))
        names = ("head/out/kernel", "block_0/ffn/up/bias", "block_0/ffn/down/bias")
        return [float(found[name].std()) for name in names]

    assert sizes(256) == pytest.approx(sizes(64), rel=0.1)


@pytest.mark.parametrize("head", [{}, {"head": Untied(use_bias=True)}], ids=["tied", "untied"])
def test_logits_are_divided_and_their_bias_is_not(head):
    """Heads say their width, so that logits are all that the flag changes here."""
    cfg = model(64, 16, n_layers=1, attention=GQA(4, head_dim=16), **head)
    params = jax.jit(functools.partial(init_params, cfg), compiler_options=FAST)(jax.random.key(0))
    plain = dataclasses.replace(cfg, mup_base=None)
    bias_V = jnp.zeros(32)
    if head:
        bias_V = params["head"]["out"]["bias"] = jnp.arange(32.0)

    def logits(cfg):
        run = jax.jit(lambda params: forward(cfg, params, BATCH.tokens_BT).logits_BTV)
        return run.lower(params).compile(FAST)(params)

    got, want = map(logits, (cfg, plain))
    np.testing.assert_allclose(got - bias_V[None, None], (want - bias_V[None, None]) / 4, atol=1e-5)


def test_the_factor_on_scores():
    """16 wide heads at the base of 64: sqrt(16) / 64 where they grow to 64, else 1 / sqrt(H)."""
    wide, base = model(256), model(64)
    assert wide.attention.factor(wide.dims()) == pytest.approx(16**0.5 / 64)
    assert base.attention.factor(base.dims()) == 16**-0.5
    assert GQA(16, head_dim=16).factor(wide.dims()) == 16**-0.5
    assert GQA(4, scale=0.3).factor(wide.dims()) == 0.3
    assert GQA(4).factor(model(256, None).dims()) == 64**-0.5


@pytest.mark.parametrize(
    ("method", "factor"),
    [
        (AdamW(), 1 / 4),
        (Lion(), 1 / 4),
        (Adafactor(parameter_scale=False), 1 / 4),
        (Muon(), 1 / 2),
        (Muon(consistent_rms=None), 1.0),
    ],
    ids=str,
)
def test_rates_of_hidden_matrices_and_not_their_decay(method, factor):
    params = {
        "embed": {"embedding": jnp.ones((3, 2))},
        "block_0": {"up": {"kernel": jnp.ones((2, 4)), "bias": jnp.ones(4)}},
        "head": {"out": {"kernel": jnp.ones((2, 3))}},
    }
    grads = jax.tree.map(lambda x: jnp.arange(1.0, 1 + x.size).reshape(x.shape), params)

    def step(weight_decay, ratio):
        cfg = OptimConfig(
            method, lr=0.1, schedule="constant", warmup_steps=0, weight_decay=weight_decay
        )
        tx = optimizer(cfg, 10, ratio)
        return by_path(tx.update(grads, tx.init(params), params)[0])

    for path, here in step(0.0, 4.0).items():
        there = step(0.0, 1.0)[path]
        hidden = path == "block_0/up/kernel"
        np.testing.assert_allclose(here, there * (factor if hidden else 1.0), rtol=1e-5)
    decayed = step(0.5, 4.0)["block_0/up/kernel"] - step(0.0, 4.0)["block_0/up/kernel"]
    np.testing.assert_allclose(decayed, -0.1 * 0.5, rtol=1e-3)


def test_a_run_tells_the_optimizer(tmp_path, monkeypatch):
    def optimizer(cfg, horizon, ratio):
        raise LookupError(ratio)

    monkeypatch.setattr("jaxgpt.train.trainer.optimizer", optimizer)
    (tmp_path / "text.txt").write_text("abcdefgh\n" * 100)
    folder = open_run(tmp_path / "run")
    data = DataConfig(path=str(tmp_path / "text.txt"))
    with folder.lock(), pytest.raises(LookupError, match=r"4\.0"):
        fit(folder, model(256, vocab_size=None), data, OptimConfig(), TrainConfig())


def test_by_name():
    words = ["--model.d_model=256", "--model.attention.n_heads=4", "--model.mup_base=64"]
    run = resolve(RunConfig(), (), words)
    assert run.model.dims().width_ratio == 4 and from_yaml(to_yaml(run)) == run
    without = dataclasses.replace(run.model, mup_base=None)
    assert count_params(run.model) == count_params(without)
    assert param_shapes(run.model) == param_shapes(without)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optim.method=SGD"], "no muP rule for optim.method=SGD; fix: --optim.method=AdamW"),
        (["--optim.method=Adafactor"], "no muP rule for Adafactor with parameter_scale"),
        (["--model.embed.scale=true"], "no muP rule for embed.scale and embed.width"),
        (["--model.embed.width=8"], "no muP rule for embed.scale and embed.width"),
        (["--init_from=a/b"], "model.mup_base would change the logits"),
        (["--model.mup_base=0"], "mup_base=0 must be positive"),
    ],
)
def test_what_has_no_rule_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        resolve(RunConfig(), (), ["--model.mup_base=64", *words])
    if "optim" in words[0]:
        method = SGD() if "SGD" in words[0] else Adafactor()
        with pytest.raises(ConfigError, match=message):
            optimizer(OptimConfig(method), 10, 2.0)
    assert Embed(scale=True).check(model(64).dims()) is None, "at the base itself there is no rule"
