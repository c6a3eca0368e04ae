# SPDX-License-Identifier: Apache-2.0
"""docs/notes.md: its links lead to tests that are there; what no other file shows is shown here.

The page's Python blocks, which compute its numbers, are run by `test_readme.py`.
"""

import ast
import dataclasses
import functools
import importlib
import itertools
import math
import re
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import BlockBox
from jaxgpt.boxes.block import PostNorm, PreNorm
from jaxgpt.boxes.ffn import MLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.init import Normal
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.norm import LayerNorm, NoNorm
from jaxgpt.boxes.position import NoPosition
from jaxgpt.boxes.rope import RoPE
from jaxgpt.costs import decode_costs, total, train_costs
from jaxgpt.losses import next_token_loss, token_nats
from jaxgpt.model import ModelConfig, forward, param_shapes
from jaxgpt.testing import jit_forward, jit_init, quick_jit, tiny, worn

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "notes.md"
BARE = dict(position=NoPosition(), norm=NoNorm(), final_norm=NoNorm())


@functools.cache
def functions(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "name")}


def claims():
    """Rows of the tables that begin with `| claim |`."""
    for table in PAGE.read_text().split("| claim |")[1:]:
        for line in table.split("\n\n")[0].splitlines()[2:]:
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_links_to_tests_lead_to_tests():
    links = re.findall(r"\[`(\w+)`\]\(\.\./tests/(\w+\.py)\)", PAGE.read_text())
    assert len(links) > 60
    for name, file in links:
        assert name in functions(ROOT / "tests" / file), f"{file} has no {name}"


def test_each_claim_has_what_shows_it_and_an_outcome():
    text = PAGE.read_text()
    for heading in ("Decoder-only transformers", "The GPT family", "Self-test"):
        assert f"## {heading}" in text, heading
    rows = list(claims())
    assert len(rows) > 120
    blocks = re.findall(r"^```python\n# ([^:,\n]+)", text, re.MULTILINE)
    for claim, shown, outcome in rows:
        assert claim and outcome, claim
        for name in re.findall(r"block \*(.*?)\*", shown):
            assert name in blocks, name
        linked = "](" in shown or "`" in shown or "block *" in shown
        assert linked or re.match("not run|no code|question", shown), f"{claim}: {shown}"


def test_the_notes_are_not_copied(shared):
    """Nine words in a row are a quotation."""

    def runs_of_words(text, n=9):
        words = re.findall(r"[a-z0-9]+", text.lower())
        return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}

    ours = runs_of_words(PAGE.read_text())
    for note in (shared / "notes").glob("*.txt"):
        assert not ours & runs_of_words(note.read_text(encoding="utf-8")), note.name


def settled(cfg):
    """Parameters as if trained, on the device."""
    return jax.tree.map(jnp.asarray, worn(cfg))


def stream(cfg, params, x_BTD, **call):
    """What leaves the stack for these vectors in the place of embedded tokens."""
    return forward(cfg, params, embeddings_BTD=x_BTD, headless=True, **call).logits_BTV


jit_stream = quick_jit(stream, static_argnums=0)


# The joint distribution.


def test_probabilities_of_all_continuations_sum_to_one():
    cfg = tiny(vocab_size=3)
    texts_BT = jnp.array([(0, *rest) for rest in itertools.product(range(3), repeat=4)])
    logits = jit_forward(cfg, worn(cfg), texts_BT[:, :-1]).logits_BTV
    nats_B = np.asarray(token_nats(logits, texts_BT[:, 1:])).sum(1)
    assert len(nats_B) == 81 and nats_B.std() > 0.1
    assert np.exp(-nats_B.astype(float)).sum() == pytest.approx(1, abs=1e-5)


def test_one_pass_gives_what_one_token_at_a_time_gives():
    """Teacher forcing: the T terms of log p(x) = sum of log p(x_t | x_<t), at once and in turn."""
    cfg, T = tiny(attention=GQA(4, 2), position=RoPE()), 10
    params, ids_BT = settled(cfg), jax.random.randint(jax.random.key(1), (2, T + 1), 0, 31)
    at_once_BT = token_nats(jit_forward(cfg, params, ids_BT[:, :-1]).logits_BTV, ids_BT[:, 1:])

    @quick_jit
    def step(caches, id_B1, pos):
        pos_B1 = jnp.broadcast_to(pos, id_B1.shape)
        return forward(cfg, params, id_B1, pos_BT=pos_B1, caches=caches)[:2]

    caches, in_turn = cfg.init_caches(2, T), []
    for t in range(T):
        logits_B1V, caches = step(caches, ids_BT[:, t : t + 1], t)
        in_turn.append(token_nats(logits_B1V, ids_BT[:, t + 1 : t + 2])[:, 0])
    np.testing.assert_allclose(np.stack(in_turn, 1), at_once_BT, atol=2e-5)


# The mask.


def copier(V, T):
    """One head that reads the token behind its own: positions and tokens are one-hot."""
    cfg = ModelConfig(
        vocab_size=V,
        vocab_multiple=1,
        context_length=T,
        d_model=V + T,
        n_layers=1,
        norm=NoNorm(),
        attention=GQA(1, use_bias=False),
        ffn=MLP(1, use_bias=False),
        final_norm=NoNorm(),
    )
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), param_shapes(cfg))
    params["embed"]["embedding"][:, :V] = np.eye(V)
    params["position"]["embedding"][:, V:] = np.eye(T)
    kernels = {name: part["kernel"] for name, part in params["block_0"]["attention"].items()}
    kernels["q"][V:, V:] = 1000 * np.eye(T, k=1)  # asks for the next position
    kernels["k"][V:, V:] = np.eye(T)
    kernels["v"][:V, :V] = np.eye(V)
    kernels["out"][:V, :V] = 30 * np.eye(V)
    return cfg, params


def test_without_the_mask_the_next_token_is_copied_and_with_it_nothing_can_be():
    V, T = 7, 12
    cfg, params = copier(V, T)
    ids_BT = jax.random.randint(jax.random.key(0), (64, T), 0, V)

    @quick_jit
    def loss(prefix_B):
        logits_BTV = forward(cfg, params, ids_BT, prefix_B=prefix_B).logits_BTV
        return next_token_loss(logits_BTV[:, :-1], ids_BT[:, 1:])

    # A prefix of the whole row: every token sees every other. The tokens are drawn evenly, so that
    # nobody who sees the past alone has less than ln V in the mean.
    assert loss(jnp.full(64, T)) < 1e-6 < math.log(V) < loss(jnp.zeros(64, int))


# Scores.


@pytest.mark.parametrize("H", [16, 256, 1024])
def test_scaled_scores_have_variance_one_and_raw_ones_the_width(H):
    raw, scaled = (
        ModelConfig(
            vocab_size=8,
            d_model=256,
            n_layers=1,
            attention=GQA(1, head_dim=H, use_bias=False, scale=scale),
            ffn=MLP(8),
            init=Normal(std=None),
            **BARE,
        )
        for scale in (1.0, None)
    )
    params = jit_init(raw, jax.random.key(H))
    x_BTD = jax.random.normal(jax.random.key(1), (4, 64, 256))
    sites = "block_0/attention/scores", "block_0/attention/probs"

    def seen(cfg):
        call = dict(embeddings_BTD=x_BTD, headless=True, capture=sites, kernel="reference")
        found = jax.jit(lambda params: forward(cfg, params, **call).captured)(params)
        return [np.asarray(found[site]) for site in sites]

    (raw_scores, raw_probs), (scores, probs) = seen(raw), seen(scaled)
    assert raw_scores.var() == pytest.approx(H, rel=0.25) and scores.var() == pytest.approx(1, 0.25)
    # The last queries see more than 50 keys. What a softmax hands back to a score is p (1 - p).
    late, raw_late = (p[:, 0, -12:] for p in (probs, raw_probs))
    slopes, raw_slopes = ((p * (1 - p)).sum(-1).mean() for p in (late, raw_late))
    assert slopes > 0.9 and late.max(-1).mean() < 0.2
    if H == 1024:
        assert raw_slopes < 0.1 and raw_late.max(-1).mean() > 0.9


# The residual stream.


def silenced(params, *paths):
    """The same with these arrays of every block at zero."""

    def one(key, leaf):
        path = jax.tree_util.keystr(key, simple=True, separator="/")
        return jnp.zeros_like(leaf) if path.split("/", 1)[-1] in paths else jnp.asarray(leaf)

    return jax.tree_util.tree_map_with_path(one, params)


@pytest.mark.parametrize("block", [PreNorm(), PostNorm()], ids=repr)
def test_the_stream_hands_on_values_and_gradients_untouched(block):
    """With silent branches the pre-norm stack is the identity, to the bit; a post-norm one is not.

    And x + ffn(norm(x + attention(norm(x)))) would lose attention where the FFN is silent.
    """
    cfg = tiny(block=block, position=NoPosition(), final_norm=NoNorm())
    params = settled(cfg)
    ffn = "ffn/down/kernel", "ffn/down/bias"
    quiet = silenced(params, *ffn, "attention/out/kernel", "attention/out/bias")
    x_BTD, dy_BTD = jax.random.normal(jax.random.key(0), (2, 2, 5, 16))

    @quick_jit
    def both_ways(params):
        y_BTD, back = jax.vjp(functools.partial(stream, cfg, params), x_BTD)
        return y_BTD, back(dy_BTD)[0]

    y_BTD, dx_BTD = both_ways(quiet)
    same = (y_BTD == x_BTD).all(), (dx_BTD == dy_BTD).all()
    assert same == ((True, True) if block == PreNorm() else (False, False))
    if block == PreNorm():
        y_BTD, _ = both_ways(silenced(params, *ffn))
        assert np.abs(y_BTD - x_BTD).mean() > 0.1


def drawn(cfg, rng):
    """Kernels from N(0, 1 / inputs), whatever they write to; embeddings from N(0, 1)."""

    def one(key, leaf):
        name = key[-1].key
        std = {"kernel": leaf.shape[0] ** -0.5, "embedding": 1.0}.get(name, 0.0)
        drawn = rng.normal(name == "scale", std, leaf.shape)
        return jnp.asarray(drawn, jnp.float32)

    return jax.tree_util.tree_map_with_path(one, param_shapes(cfg))


@dataclasses.dataclass(frozen=True)
class NoStream(BlockBox):
    """x = attention(norm(x)); x = ffn(norm(x)): nothing is handed on beside the branches."""

    def build(self, dims, layer, name=None):
        return _NoStream(dims, layer, name=name)


class _NoStream(nn.Module):
    dims: object
    layer: object

    @nn.compact
    def __call__(self, x_BTD, visibility, cache=None, dropout_key=None):
        norms = [self.layer.norm.build(name=f"{name}_norm") for name in ("attention", "ffn")]
        attention = self.layer.attention.build(self.dims, name="attention")
        x_BTD, cache = attention(norms[0](x_BTD), visibility, cache, None)
        ffn = self.layer.ffn.build(self.dims, name="ffn")
        x_BTD, aux = ffn(norms[1](x_BTD), visibility.valid_BT, None)
        return x_BTD, cache, aux


@pytest.mark.slow
def test_48_layers_need_the_stream():
    """A map from token to token, which needs no layer at all, in 50 steps."""
    successor_V, tx, last = jnp.array([3, 5, 0, 6, 1, 2, 4]), optax.adam(3e-3), {}
    for block in (PreNorm(), PostNorm(), NoStream()):
        cfg = tiny(
            block=block,
            vocab_size=7,
            vocab_multiple=1,
            n_layers=48,
            position=NoPosition(),
            head=Untied(),
        )
        params = drawn(cfg, np.random.default_rng(0))

        def loss(params, ids_BT, cfg=cfg):
            logits_BTV = forward(cfg, params, ids_BT, scan=True).logits_BTV
            return next_token_loss(logits_BTV, successor_V[ids_BT])

        def step(state, key, loss=loss):
            params, opt_state = state
            ids_BT = jax.random.randint(key, (8, 8), 0, 7)
            nats, grads = jax.value_and_grad(loss)(params, ids_BT)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), nats

        keys = jax.random.split(jax.random.key(1), 50)
        losses = quick_jit(functools.partial(jax.lax.scan, step))((params, tx.init(params)), keys)
        last[type(block)] = float(losses[1][-10:].mean())
    assert last[PreNorm] < 0.3, last
    assert all(abs(last[block] - math.log(7)) < 0.1 for block in (PostNorm, NoStream)), last


# Paths between positions.


def reach(**boxes):
    """reach[i, j]: whether what leaves the stack at i moves with what enters at j."""
    cfg, T = tiny(position=NoPosition(), **boxes), 8
    params = settled(cfg)
    x_BTD = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (T, 16)), (T, T, 16))
    only_j_BTD = jnp.eye(T)[:, :, None] * jnp.cos(jnp.arange(16.0))[None, None]  # row j moves at j
    moves = quick_jit(lambda x, dx: jax.jvp(lambda x: stream(cfg, params, x), (x,), (dx,))[1])
    return np.abs(np.asarray(moves(x_BTD, only_j_BTD))).sum(-1).T > 0


def test_one_layer_connects_any_two_positions_and_a_window_needs_several():
    past = np.tri(8, dtype=bool)
    assert (reach(n_layers=1) == past).all()
    for n_layers in (1, 2):  # two keys farther with each layer of a window of three
        want = past & ~np.tri(8, k=-2 * n_layers - 1, dtype=bool)
        assert (reach(n_layers=n_layers, attention=GQA(4, window=3)) == want).all()


def primitives(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from primitives(getattr(inner, "jaxpr", inner))


def test_a_training_pass_has_as_many_steps_for_any_length():
    """The same operations one after the other for 8 tokens as for 64, and no loop over them."""
    cfg = tiny(context_length=64, position=RoPE())

    def loss(params, ids_BT):
        logits_BTV = forward(cfg, params, ids_BT, kernel="reference").logits_BTV
        return next_token_loss(logits_BTV[:, :-1], ids_BT[:, 1:])

    def program(T):
        traced = jax.make_jaxpr(jax.grad(loss))(param_shapes(cfg), jnp.zeros((1, T), "int32"))
        return sorted(primitives(traced.jaxpr))

    assert program(8) == program(64) and not {"while", "scan"} & set(program(8))


# What it costs.


def test_scores_cost_the_square_of_the_length_and_all_else_the_length():
    cfg = dataclasses.replace(ModelConfig(), context_length=4096)
    one, two, four = (train_costs(cfg, 1, T) for T in (1024, 2048, 4096))
    for box, factor in (("scores", 2), ("attention", 1), ("ffn", 1), ("head", 1)):
        assert four[box].flops == 2**factor * two[box].flops == 4**factor * one[box].flops
    assert one["scores"].flops == 3 * 2 * 2 * 1024**2 * 768 * 12
    # Of the scores themselves N T^2 are there: T^2 d / H, and none in a kernel that holds none.
    look = functools.partial(forward, cfg, capture=["block_0/attention/probs"])
    ids_BT = jax.ShapeDtypeStruct((1, 1024), "int32")
    (probs,) = jax.eval_shape(look, param_shapes(cfg), ids_BT).captured.values()
    assert probs.size == 12 * 1024**2 == 1024**2 * 768 // 64


CACHES = {
    "multi-head": GQA(16),
    "grouped": GQA(16, 4),
    "latent": MLA(16, kv_rank=64, nope_dim=32, rope_dim=32, v_dim=32),
    "multi-query": GQA(16, 1),
}


def test_decoding_moves_what_the_cache_has():
    cfg = ModelConfig(vocab_size=4096, d_model=512, n_layers=4, position=RoPE(), attention=GQA(16))
    models = {name: dataclasses.replace(cfg, attention=box) for name, box in CACHES.items()}
    numbers = {"multi-head": 2 * 512, "grouped": 256, "latent": 96, "multi-query": 64}
    for name, model in models.items():
        cost = total(decode_costs(model, 8, 1024))
        assert cost.cache_bytes == 4 * 4 * 8 * (1024 + 1) * numbers[name]
        longer = total(decode_costs(model, 8, 1023 + 1025))
        assert longer.weight_bytes == cost.weight_bytes
        assert longer.bytes - cost.bytes == 4 * 4 * 8 * 1024 * numbers[name]


@pytest.mark.slow
def test_the_benchmark_of_caches_runs(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    caches = importlib.import_module("caches")
    assert caches.BOXES.keys() >= CACHES.keys() - {"grouped"}
    caches.main(["--rows=2", "--tokens=32", "--d-model=64", "--layers=1", "--rounds=1"])
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[1] for row in rows] == ["512", "128", "384", "32"]
    assert all(float(row.split(" | ")[-1]) > 0 for row in rows)
    sys.modules.pop("caches")


# The listings.


def listed_block(p, x_BTD, n_heads):
    """The note's PyTorch block in NumPy: no bias in attention, biases and exact GELU in the MLP."""
    h = reference.layer_norm(x_BTD, **p["attention_norm"])
    x_BTD = x_BTD + reference.multi_head(p["attention"], h, n_heads)
    h = reference.layer_norm(x_BTD, **p["ffn_norm"])
    return x_BTD + reference.mlp(p["ffn"], h, activation=reference.gelu)


def listed_model():
    cfg = tiny(
        n_layers=1,
        position=NoPosition(),
        norm=LayerNorm(),
        attention=GQA(4, use_bias=False),
        ffn=MLP(activation="gelu"),
        final_norm=NoNorm(),
    )
    return cfg, settled(cfg), jax.random.normal(jax.random.key(2), (2, 7, 16))


def test_the_pytorch_block_in_numpy():
    cfg, params, x_BTD = listed_model()
    p = jax.tree.map(lambda leaf: np.asarray(leaf, float), params["block_0"])
    want = listed_block(p, np.asarray(x_BTD, float), 4)
    got = jit_stream(cfg, params, x_BTD)
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


def test_the_pytorch_block_in_pytorch():
    torch = pytest.importorskip("torch")
    tnn, (cfg, params, x_BTD) = torch.nn, listed_model()
    D, N = cfg.d_model, 4
    ln1, ln2 = tnn.LayerNorm(D), tnn.LayerNorm(D)
    qkv, out = tnn.Linear(D, 3 * D, bias=False), tnn.Linear(D, D, bias=False)
    mlp = tnn.Sequential(tnn.Linear(D, 4 * D), tnn.GELU(), tnn.Linear(4 * D, D))
    p = jax.tree.map(lambda leaf: torch.tensor(np.array(leaf)), params["block_0"])
    with torch.no_grad():
        for layer, name in ((ln1, "attention_norm"), (ln2, "ffn_norm")):
            layer.weight.copy_(p[name]["scale"])
            layer.bias.copy_(p[name]["bias"])
        qkv.weight.copy_(torch.cat([p["attention"][name]["kernel"].T for name in "qkv"]))
        out.weight.copy_(p["attention"]["out"]["kernel"].T)
        for layer, name in ((mlp[0], "up"), (mlp[2], "down")):
            layer.weight.copy_(p["ffn"][name]["kernel"].T)
            layer.bias.copy_(p["ffn"][name]["bias"])
        x = torch.tensor(np.array(x_BTD))
        q, k, v = (h.unflatten(-1, (N, -1)).transpose(1, 2) for h in qkv(ln1(x)).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / (D // N) ** 0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        probs = scores.masked_fill(future, float("-inf")).softmax(-1)
        x = x + out((probs @ v).transpose(1, 2).flatten(2))
        want = (x + mlp(ln2(x))).numpy()
    got = jit_stream(cfg, params, x_BTD)
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
