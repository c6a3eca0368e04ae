# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts to test, and what they compute, spelled out."""

import jax
import jax.numpy as jnp
import numpy as np
import reference

from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.moe import MoE
from jaxgpt.taps import tapping
from jaxgpt.testing import quick_jit, tiny

B, T, D = 2, 7, 16
DIMS = tiny().dims()
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.float32)
ALL = jnp.ones((B, T), bool)
SOME = ALL.at[0, :3].set(False)
KEY = jax.random.key(5)

GATED = GatedMLP(d_ff=24)
OSS = GatedMLP(d_ff=24, activation="gelu_sigmoid", use_bias=True, limit=1.0, up_offset=1.0)
V2 = dict(n_experts=6, top_k=2, n_groups=3, top_groups=2, normalize=False, routed_scaling=2.0)
V3 = dict(n_experts=8, n_groups=4, top_groups=2, score="sigmoid", group_score="top2")
BOXES = {
    "mixtral": MoE(n_experts=4, expert=GATED),
    "three of five": MoE(n_experts=5, top_k=3, expert=MLP(d_ff=24), balance_coef=0.1, z_coef=0.1),
    "gpt-oss": MoE(n_experts=4, expert=OSS, router_bias=True),
    "deepseek-v2": MoE(**V2, expert=GATED, shared=MLP(d_ff=8)),
    "deepseek-v3": MoE(**V3, expert=GATED, shared=GATED, routed_scaling=2.5, balance_rate=0.1),
    "all of them": MoE(n_experts=3, top_k=3, expert=GATED, score="sigmoid", normalize=False),
}


def setup(box, seed=0):
    """A module and parameters that are all different from zero."""
    module = box.build(DIMS)
    params = module.init(jax.random.key(seed), X, ALL)["params"]
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    shaken = [p + 0.3 * rng.normal(size=p.shape).astype(np.float32) for p in leaves]
    return module, jax.tree.unflatten(tree, shaken)


def run(box, params, x=X, valid=ALL, key=None, **taps):
    """(y, aux, captured), compiled."""

    @quick_jit
    def call(params, x, valid):
        with tapping(**taps) as seen:
            y, aux = box.build(DIMS).apply({"params": params}, x, valid, key)
        return y, aux, seen.captured

    return call(params, x, valid)


def route(box, logits, bias=0.0):
    """One token: {expert: weight}, spelled out in float64."""
    if box.score == "softmax":
        scores = reference.softmax(logits)
    else:
        scores = 1 / (1 + np.exp(-logits))
    wanted, size = scores + bias, box.n_experts // box.n_groups
    groups = [range(g * size, (g + 1) * size) for g in range(box.n_groups)]
    best = {"max": 1, "top2": 2}[box.group_score]
    merit = [sum(sorted(wanted[list(g)])[-best:]) for g in groups]
    allowed = [e for g in np.argsort(merit)[::-1][: box.top_groups] for e in groups[g]]
    chosen = sorted(allowed, key=lambda e: -wanted[e])[: box.top_k]
    total = sum(scores[e] for e in chosen) if box.normalize else 1.0
    return {e: scores[e] / total * box.routed_scaling for e in chosen}


def ffn(expert, p, x):
    """One feed-forward network in float64."""
    act = {
        "silu": reference.silu,
        "gelu_tanh": reference.gelu_tanh,
        "gelu_sigmoid": reference.gelu_sigmoid,
    }[expert.activation]
    up = reference.dense(p["up"], x)
    if isinstance(expert, MLP):
        return reference.dense(p["down"], act(up))
    gate, limit = reference.dense(p["gate"], x), expert.limit or np.inf
    h = act(np.minimum(gate, limit)) * (np.clip(up, -limit, limit) + expert.up_offset)
    return reference.dense(p["down"], h)


def formula(box, params, x):
    """The whole layer, token by token and expert by expert."""
    p = jax.tree.map(lambda a: np.asarray(a, float), params)
    x, routes = np.asarray(x, float), {}
    y = np.zeros(x.shape)
    for at in np.ndindex(x.shape[:2]):
        logits = reference.dense(p["router"], x[at])
        routes[at] = route(box, logits, p.get("balance_bias", 0.0))
        for e, weight in routes[at].items():
            one = jax.tree.map(lambda a, e=e: a[e], p["experts"])
            y[at] += weight * ffn(box.expert, one, x[at])
        if box.shared is not None:
            y[at] += ffn(box.shared, p["shared"], x[at])
    return y, routes


def dense_layer(box, mask_BTE, params, x):
    """The layer in jax with every expert computed, and those of the mask weighed."""
    p = params["experts"]

    def linear(name, h, axes):
        y = jnp.einsum(axes, h, p[name]["kernel"])
        return y + p[name]["bias"][:, None, None] if "bias" in p[name] else y

    up = linear("up", x, "btd,edf->ebtf")
    if isinstance(box.expert, GatedMLP):
        h = box.expert.hidden(linear("gate", x, "btd,edf->ebtf"), up)
    else:
        h = jax.nn.gelu(up)
    y_EBTD = linear("down", h, "ebtf,efd->ebtd")
    logits = x @ params["router"]["kernel"]
    if "bias" in params["router"]:
        logits += params["router"]["bias"][None, None]
    scores = jax.nn.softmax(logits) if box.score == "softmax" else jax.nn.sigmoid(logits)
    weight = scores * mask_BTE
    if box.normalize:
        weight = weight / weight.sum(-1, keepdims=True)
    y = jnp.einsum("bte,ebtd->btd", weight * box.routed_scaling, y_EBTD)
    if box.shared is not None:
        y += box.shared.build(DIMS).apply({"params": params["shared"]}, x, ALL)[0]
    return y
