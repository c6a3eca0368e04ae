# SPDX-License-Identifier: Apache-2.0
"""The decoder-only transformer once by hand: three tokens, two layers, every step in plain NumPy.

Width d = 4, two heads of d_h = 2, d_ff = 16, RMSNorm, RoPE on queries and keys, causal softmax, a
two-matrix FFN, residual sums, final norm, tied head, cross-entropy. Each step is compared with the
site of the model that has its value; nothing here is shared with the code or with reference.py.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.ffn import MLP
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.rope import RoPE
from jaxgpt.losses import next_token_loss
from jaxgpt.model import ModelConfig, forward, param_shapes

V, EPS = 5, 1e-5
TOKENS = [2, 0, 4, 1]  # t_1 t_2 t_3, and t_4, which only the loss sees
CFG = ModelConfig(
    vocab_size=V,
    vocab_multiple=1,
    context_length=3,
    d_model=4,
    n_layers=2,
    position=RoPE(theta=10_000.0),
    norm=RMSNorm(eps=EPS),
    attention=GQA(n_heads=2, use_bias=False),
    ffn=MLP(d_ff=16, use_bias=False),
    final_norm=RMSNorm(eps=EPS),
)


@functools.cache
def weights():
    """Every parameter from one generator, large enough that attention is far from uniform."""
    rng = np.random.default_rng(8)
    shapes = param_shapes(CFG)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.8, leaf.shape), "f4"), shapes)


def rms_norm(site, name, X, p):
    rates = site(f"{name}/rate", np.array([[(x @ x / len(x) + EPS) ** -0.5] for x in X]))
    return site(f"{name}/out", rates * X * np.asarray(p[name]["scale"], float))


def rope(X):
    """One pair of channels, so one rate, theta ** 0 = 1: row t is turned by t radians."""
    turn = [np.array([[math.cos(t), -math.sin(t)], [math.sin(t), math.cos(t)]]) for t in range(3)]
    return np.array([turn[t] @ X[t] for t in range(3)])


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def worked_block(site, X, p):
    """One block; `site` notes each step under the name that the model has for it."""
    attention = {name: np.asarray(p["attention"][name]["kernel"], float) for name in p["attention"]}
    Xn = rms_norm(site, "attention_norm", X, p)
    heads = []
    for h in range(2):
        columns = slice(2 * h, 2 * h + 2)
        Q, K = rope(Xn @ attention["q"][:, columns]), rope(Xn @ attention["k"][:, columns])
        values = Xn @ attention["v"][:, columns]
        S = Q @ K.T / math.sqrt(2)
        masked = np.array([[S[i, j] if j <= i else -np.inf for j in range(3)] for i in range(3)])
        A = np.array([np.exp(row) / np.exp(row).sum() for row in masked])
        assert (np.triu(A, 1) == 0).all() and np.allclose(A.sum(1), 1)
        heads.append((Q, K, values, S, A, A @ values))
    names = ("queries", "keys", "values", "scores", "probs", "heads")
    for name, per_head in zip(names, zip(*heads, strict=True), strict=True):
        site(f"attention/{name}", np.stack(per_head, axis=0 if name in ("scores", "probs") else 1))
    O = np.concatenate([head[-1] for head in heads], axis=1)
    A_out = site("attention/out", O @ attention["out"])
    X = site("mid", X + A_out)
    Xn = rms_norm(site, "ffn_norm", X, p)
    hidden = site("ffn/hidden", gelu(Xn @ np.asarray(p["ffn"]["up"]["kernel"], float)))
    out = site("ffn/out", hidden @ np.asarray(p["ffn"]["down"]["kernel"], float))
    return site("out", X + out)


@functools.cache
def worked():
    """All steps by the names of their sites, and the loss."""
    p, steps = weights(), {}

    def site(name, value):
        steps[name] = value
        return value

    W_E = np.asarray(p["embed"]["embedding"], float)
    X = site("embed/out", np.array([W_E[t] for t in TOKENS[:3]]))
    site("position/out", X)  # rotary positions add nothing here
    for layer in range(2):
        site(f"block_{layer}/in", X)
        X = worked_block(
            lambda name, value, layer=layer: site(f"block_{layer}/{name}", value),
            X,
            p[f"block_{layer}"],
        )
    Z = rms_norm(site, "final_norm", X, p)
    logits = site("head/logits", Z @ W_E.T)
    loss = -sum(
        math.log(np.exp(logits[t])[TOKENS[t + 1]] / np.exp(logits[t]).sum()) for t in range(3)
    )
    return steps, loss / 3


@functools.cache
def seen():
    out = forward(CFG, weights(), jnp.array([TOKENS[:3]]), capture=["*"])
    return out.captured, out.logits_BTV


def test_every_site_of_the_model_is_a_step():
    assert set(worked()[0]) == set(seen()[0]) and len(worked()[0]) == 5 + 2 * 16


@pytest.mark.parametrize("step", list(worked()[0]))
def test_step(step):
    got, want = np.asarray(seen()[0][step]), worked()[0][step]
    assert got.shape == (1, *want.shape)
    np.testing.assert_allclose(got[0], want, atol=1e-5 * max(1.0, np.abs(want).max()))


def test_the_loss_is_the_mean_cross_entropy_of_the_next_tokens():
    got = next_token_loss(seen()[1], jnp.array([TOKENS[1:]]))
    assert abs(float(got) - worked()[1]) < 1e-5


def test_the_note_counts_its_parameters():
    """V d + L (4 d^2 + 2 d d_ff + 2 d) + d."""
    count = sum(leaf.size for leaf in jax.tree.leaves(weights()))
    assert count == V * 4 + 2 * (4 * 16 + 2 * 4 * 16 + 2 * 4) + 4
    shapes = param_shapes(dataclasses.replace(CFG, n_layers=1))
    assert sorted(shapes["block_0"]) == ["attention", "attention_norm", "ffn", "ffn_norm"]
