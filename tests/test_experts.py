# SPDX-License-Identifier: Apache-2.0
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import (
    ALL,
    BOXES,
    DIMS,
    GATED,
    KEY,
    OSS,
    SOME,
    B,
    D,
    T,
    X,
    dense_layer,
    formula,
    run,
    setup,
)

from jaxgpt.boxes.block import Parallel
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.init import Normal
from jaxgpt.boxes.moe import MoE
from jaxgpt.kernels import grouped
from jaxgpt.model import LayerEdit
from jaxgpt.testing import check_model, quick_jit, tiny


@pytest.mark.parametrize("name", BOXES)
@pytest.mark.parametrize("method", ["blocks", "ragged"])
def test_it_equals_the_formula(name, method, monkeypatch):
    monkeypatch.setattr(grouped, "default_method", lambda: method)
    box = BOXES[name]
    _, params = setup(box)
    y, aux, seen = run(box, params, capture=["router_choice", "router_weights"])
    want, routes = formula(box, params, X)
    np.testing.assert_allclose(y, want, atol=1e-5 * max(1, np.abs(want).max()))
    for (b, t), chosen in routes.items():
        assert seen["router_choice"][b, t].tolist() == list(chosen)
        np.testing.assert_allclose(seen["router_weights"][b, t], list(chosen.values()), rtol=1e-5)
    counts = np.bincount([e for r in routes.values() for e in r], minlength=box.n_experts)
    np.testing.assert_array_equal(aux["expert_tokens"], counts)


@pytest.mark.parametrize("name", BOXES)
@pytest.mark.parametrize("method", ["blocks", "ragged"])
def test_gradients_equal_those_of_the_dense_computation(name, method, monkeypatch):
    monkeypatch.setattr(grouped, "default_method", lambda: method)
    box = BOXES[name]
    module, params = setup(box)

    def loss(layer):
        return lambda params, x: (jnp.sin(layer(params, x)) * jnp.arange(1.0, 17)[None, None]).sum()

    ours = loss(lambda params, x: module.apply({"params": params}, x, ALL)[0])
    mask_BTE = np.zeros((B, T, box.n_experts))
    for at, chosen in formula(box, params, X)[1].items():
        mask_BTE[at][list(chosen)] = 1
    theirs = loss(functools.partial(dense_layer, box, mask_BTE))
    got = quick_jit(jax.grad(ours, (0, 1)))(params, X)
    want = quick_jit(jax.grad(theirs, (0, 1)))(params, X)
    top = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(want))
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert jnp.abs(a - b).max() <= 1e-5 * top, jax.tree_util.keystr(path)
        assert ("balance_bias" in str(path)) == (not a.any())


@pytest.mark.parametrize("expert", [GATED, OSS, MLP(d_ff=24)], ids=repr)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_one_expert_is_the_dense_box(expert, score):
    box = MoE(n_experts=1, top_k=1, expert=expert, score=score)
    module, params = setup(box)
    alone = jax.tree.map(lambda p: p[0], params["experts"])
    want, _ = expert.build(DIMS).apply({"params": alone}, X, ALL)
    got, _ = module.apply({"params": params}, X, ALL)
    np.testing.assert_allclose(got, want, atol=1e-6 * max(1, float(jnp.abs(want).max())))


def test_equal_experts_are_the_dense_box():
    """Weights sum to one, so any choice among copies of one network gives its output."""
    box = MoE(n_experts=5, top_k=3, expert=OSS)
    module, params = setup(box)
    params["experts"] = jax.tree.map(lambda p: jnp.broadcast_to(p[:1], p.shape), params["experts"])
    alone = jax.tree.map(lambda p: p[0], params["experts"])
    want, _ = OSS.build(DIMS).apply({"params": alone}, X, ALL)
    np.testing.assert_allclose(module.apply({"params": params}, X, ALL)[0], want, atol=2e-5)


# --- padding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["three of five", "gpt-oss", "deepseek-v3"])
def test_padding_has_no_influence_and_does_not_count(name):
    box = dataclasses.replace(BOXES[name], balance_coef=0.1, z_coef=0.1, shared=None)
    module, params = setup(box)

    def loss(params, x):
        y, aux = module.apply({"params": params}, x, SOME)
        values = [v for k, v in aux.items() if k.endswith("_loss")]
        return jnp.where(SOME[..., None], y, 0.0).sum() + sum(values), (y, aux)

    grad = quick_jit(jax.grad(loss, (0, 1), has_aux=True))
    (grads, dx), (y, aux) = grad(params, X)
    for rubbish in (np.nan, 1e30):
        other = grad(params, X.at[0, :3].set(rubbish))
        for a, b in zip(
            jax.tree.leaves(((grads, dx), (y, aux))), jax.tree.leaves(other), strict=True
        ):
            np.testing.assert_array_equal(a, b)
    assert (y[0, :3] == 0).all() and (dx[0, :3] == 0).all()
    assert aux["expert_tokens"].sum() == 11 * box.top_k
    row, alone, _ = run(box, params, X[:1, 3:], ALL[:1, 3:])
    np.testing.assert_allclose(y[:1, 3:], row, atol=1e-5)
    rest = run(box, params, X[1:], ALL[1:])[1]
    for name in ("balance_loss", "expert_tokens"):
        both = alone[name] + rest[name]
        want = both / 2 if name == "balance_loss" else both
        np.testing.assert_allclose(aux[name], want, rtol=1e-5)


# --- slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["three of five", "gpt-oss", "deepseek-v3"])
def test_with_slots_for_all_it_is_the_dropless_form(name):
    box = dataclasses.replace(BOXES[name], capacity_factor=99.0)
    module, params = setup(box)

    def loss(params, x, key):
        y, aux = module.apply({"params": params}, x, SOME, key)
        return jnp.sin(jnp.where(SOME[..., None], y, 0.0)).sum(), (y, aux)

    grad = quick_jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, (y, aux)), grads = grad(params, X, KEY)
    (_, (want_y, want_aux)), want = grad(params, X, None)
    assert aux.pop("dropped_tokens") == 0 and aux.keys() == want_aux.keys()
    np.testing.assert_allclose(y, want_y, atol=1e-5 * float(jnp.abs(want_y).max()))
    top = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(want))
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * top)


def test_the_first_tokens_take_the_slots():
    """With weights pinned, a token whose expert is full gets nothing from it."""
    box = MoE(n_experts=2, top_k=1, expert=GATED, capacity_factor=0.6)
    assert box.capacity(T) == 3  # ceil(0.6 * 7 / 2)
    _, params = setup(box)
    choice = jnp.array([[0, 0, 1, 0, 0, 1, 0], [1, 1, 1, 1, 0, 1, 1]])[..., None]
    patch = {"router_choice": choice}
    dropless, *_ = run(box, params, valid=SOME, patch=patch)
    y, aux, _ = run(box, params, valid=SOME, key=KEY, patch=patch)
    kept = np.array([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0, 0]], bool)  # padding takes none
    np.testing.assert_allclose(y, np.where(kept[..., None], dropless, 0), atol=1e-5)
    assert (np.abs(y).max(-1) > 0).tolist() == kept.tolist()
    assert aux["dropped_tokens"] == 3 and aux["expert_tokens"].tolist() == [4, 7]


def test_slots_are_of_each_sequence_and_of_the_past():
    box = MoE(n_experts=4, top_k=2, expert=GATED, capacity_factor=0.8)
    _, params = setup(box)
    y, aux, _ = run(box, params, key=KEY)
    assert aux["dropped_tokens"] > 0
    later, *_ = run(box, params, X.at[0, 4:].multiply(-1.0), key=KEY)
    np.testing.assert_array_equal(y[0, :4], later[0, :4])
    np.testing.assert_array_equal(y[1], later[1])
    assert (y[0, 4:] != later[0, 4:]).any()


def test_nothing_is_dropped_outside_of_training():
    with_limit = MoE(n_experts=4, top_k=2, expert=GATED, capacity_factor=0.25)
    _, params = setup(with_limit)
    y, aux, _ = run(with_limit, params)
    want, want_aux, _ = run(MoE(n_experts=4, top_k=2, expert=GATED), params)
    np.testing.assert_array_equal(y, want)
    assert aux.keys() == want_aux.keys() == {"expert_tokens"}


# --- sites and initialisation ---------------------------------------------------------------------


def test_sites():
    box = MoE(n_experts=4, top_k=2, expert=GATED, shared=MLP(d_ff=8))
    _, params = setup(box)
    y, _, seen = run(box, params, valid=SOME, capture=["*"])
    assert {name: value.shape for name, value in seen.items()} == {
        "router_logits": (B, T, 4),
        "router_scores": (B, T, 4),
        "router_choice": (B, T, 2),
        "router_weights": (B, T, 2),
        "hidden": (B, T, 2, 24),
        "out": (B, T, D),
        "shared/hidden": (B, T, 8),
        "shared/out": (B, T, D),
    }
    e = int(seen["router_choice"][1, 4, 1])
    p = jax.tree.map(lambda a: a[e], params["experts"])
    want = jax.nn.silu(X[1, 4] @ p["gate"]["kernel"]) * (X[1, 4] @ p["up"]["kernel"])
    np.testing.assert_allclose(seen["hidden"][1, 4, 1], want, atol=1e-5)
    same, *_ = run(box, params, valid=SOME, patch={"hidden": seen["hidden"]})
    np.testing.assert_array_equal(same, y)
    only_shared, *_ = run(box, params, patch={"hidden": 0.0})
    np.testing.assert_allclose(only_shared[1], seen["shared/out"][1], atol=1e-6)
    halved, *_ = run(box, params, valid=SOME, patch={"router_weights": 0.5})
    assert not jnp.allclose(halved, y)


def test_a_patched_choice_is_weighed_anew():
    box = MoE(n_experts=4, top_k=2, expert=GATED, capacity_factor=9.0)
    _, params = setup(box)
    for key in (None, KEY):
        look = functools.partial(run, box, params, key=key, capture=["router_*"])
        *_, aux, seen = look(patch={"router_choice": jnp.array([1, 3])})
        assert (np.asarray(seen["router_choice"]) == [1, 3]).all()
        pair = seen["router_scores"][..., jnp.array([1, 3])]
        want = pair / pair.sum(-1, keepdims=True)
        np.testing.assert_allclose(seen["router_weights"], want, rtol=1e-6)
        assert aux["expert_tokens"].tolist() == [0, B * T, 0, B * T]


@pytest.mark.parametrize("std", [0.02, None])
def test_experts_are_drawn_as_if_each_were_alone(std):
    dims = tiny(init=Normal(std=std), d_model=64).dims()
    box = MoE(n_experts=16, expert=MLP(d_ff=128), router_bias=True)
    params = box.build(dims).init(KEY, jnp.zeros((1, 1, 64)), jnp.ones((1, 1), bool))["params"]
    shrink = (2 * dims.n_layers) ** -0.5
    for name, inputs, factor in (("up", 64, 1.0), ("down", 128, shrink)):
        kernel = np.asarray(params["experts"][name]["kernel"])
        assert kernel.shape[:2] == (16, inputs) and not params["experts"][name]["bias"].any()
        want = factor * (std or inputs**-0.5)
        np.testing.assert_allclose(kernel.std((1, 2)), want, rtol=0.05)
        assert abs(np.corrcoef(kernel.reshape(16, -1)) - np.eye(16)).max() < 0.06
    assert params["router"]["kernel"].shape == (64, 16) and params["router"]["bias"].shape == (16,)


@pytest.mark.slow
def test_first_dense_then_experts_keep_the_contracts():
    moe = MoE(n_experts=4, expert=GATED, balance_coef=0.1, balance_rate=0.1, capacity_factor=1.0)
    edits = (LayerEdit(stop=1, ffn=GatedMLP()),)
    check_model(tiny(ffn=moe, edits=edits, n_layers=3, block=Parallel()))
