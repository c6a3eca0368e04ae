# SPDX-License-Identifier: Apache-2.0
import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from mixtures import (
    ALL,
    BOXES,
    GATED,
    KEY,
    SOME,
    B,
    T,
    X,
    run,
    setup,
)

from jaxgpt.boxes.base import FFNBox
from jaxgpt.boxes.moe import MoE
from jaxgpt.errors import ConfigError
from jaxgpt.testing import quick_jit

LOPSIDED = np.array([2.0, 0, 0, 0])


# --- the router, by hand --------------------------------------------------------------------------


def choose(box, *numbers):
    return box.choose(jnp.asarray(numbers, jnp.float32)[None, None])[0, 0].tolist()


def weigh(box, scores, choice):
    scores, choice = jnp.asarray(scores, jnp.float32), jnp.asarray(choice)
    return np.asarray(box.weigh(scores[None, None], choice[None, None])[0, 0])


def test_weights_by_hand():
    scores = [0.1, 0.6, 0.0, 0.3]
    assert choose(MoE(4), *scores) == [1, 3]
    for knobs, want in (
        ({}, [2 / 3, 1 / 3]),
        ({"normalize": False}, [0.6, 0.3]),
        ({"routed_scaling": 2.5}, [5 / 3, 2.5 / 3]),
        ({"normalize": False, "routed_scaling": 16.0}, [9.6, 4.8]),
    ):
        np.testing.assert_allclose(weigh(MoE(4, **knobs), scores, [1, 3]), want, rtol=1e-6)
    np.testing.assert_array_equal(weigh(MoE(4), [0.0] * 4, [0, 1]), [0, 0])  # 1e-20, not NaN


def test_scores_by_hand():
    logits = jnp.array([[[0.0, math.log(3.0)]]])
    np.testing.assert_allclose(MoE(2).scores(logits)[0, 0], [0.25, 0.75], rtol=1e-6)
    np.testing.assert_allclose(MoE(2, score="sigmoid").scores(logits)[0, 0], [0.5, 0.75], rtol=1e-6)


def test_groups_by_hand():
    numbers = (0.9, 0.0, 0.0, 0.5, 0.5, 0.4, 0.6, 0.1, 0.1)  # three groups of three
    knobs = dict(n_experts=9, n_groups=3, expert=GATED)
    assert choose(MoE(9, expert=GATED), *numbers) == [0, 6]
    assert choose(MoE(**knobs, top_groups=1), *numbers) == [0, 1]  # the best one: 0.9
    assert choose(MoE(**knobs, top_groups=2), *numbers) == [0, 6]
    assert choose(MoE(**knobs, top_groups=1, group_score="top2"), *numbers) == [3, 4]  # 1.0
    assert choose(MoE(**knobs, top_groups=2, group_score="top2"), *numbers) == [0, 3]
    assert choose(MoE(**knobs, top_groups=3, group_score="top2"), *numbers) == [0, 6]


def test_experts_of_other_groups_are_never_chosen():
    """Not even where the balance bias makes all that is left negative."""
    box = MoE(n_experts=6, top_k=3, n_groups=2, top_groups=1, group_score="top2", balance_rate=0.1)
    assert choose(box, -9.0, -8.0, -7.0, -1.0, -1.0, -99.0) == [3, 4, 5]
    assert choose(box, 0.0, 0.0, 0.0, -1.0, -1.0, -1.0) == [0, 1, 2]
    many = jnp.asarray(np.random.default_rng(0).normal(size=(4, 500, 6)), jnp.float32)
    assert (np.ptp(np.asarray(box.choose(many)) // 3, axis=-1) == 0).all()


def test_the_balance_bias_chooses_and_does_not_weigh():
    box = MoE(n_experts=4, top_k=2, expert=GATED, score="sigmoid", balance_rate=0.001)
    module, params = setup(box)
    params["balance_bias"] = jnp.array([9.0, -9.0, -9.0, 8.0])
    assert module.init(KEY, X, ALL)["params"]["balance_bias"].tolist() == [0] * 4
    _, aux, seen = run(box, params, capture=["router_*"])
    assert (np.asarray(seen["router_choice"]) == [0, 3]).all()
    assert aux["expert_tokens"].tolist() == [B * T, 0, 0, B * T]
    pair = seen["router_scores"][..., jnp.array([0, 3])]
    np.testing.assert_allclose(
        seen["router_weights"], pair / pair.sum(-1, keepdims=True), rtol=1e-6
    )
    grad = jax.grad(lambda p: jnp.square(module.apply({"params": p}, X, ALL)[0]).sum())
    grads = quick_jit(grad)(params)
    assert (grads["balance_bias"] == 0).all() and grads["router"]["kernel"].any()


def test_the_router_is_in_float32():
    box = BOXES["gpt-oss"]
    module, params = setup(box)
    x16 = X.astype(jnp.bfloat16)
    look = functools.partial(run, box, params, capture=["router_*"])
    (y16, aux16, low), (_, aux, high) = look(x16), look(x16.astype(jnp.float32))
    assert y16.dtype == jnp.bfloat16
    for site in ("router_logits", "router_scores", "router_choice", "router_weights"):
        np.testing.assert_array_equal(low[site], high[site])
    np.testing.assert_array_equal(aux16["expert_tokens"], aux["expert_tokens"])
    with jax.default_matmul_precision("bfloat16"):
        jaxpr = jax.make_jaxpr(lambda x: module.apply({"params": params}, x, ALL)[0])(x16)
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    (router,) = [e for e in products if e.outvars[0].aval.shape == (B * T, 4)]
    assert router.outvars[0].aval.dtype == jnp.float32
    assert set(router.params["precision"]) == {jax.lax.Precision.HIGHEST}


# --- what trains the router -----------------------------------------------------------------------


def aux_of(box, logits, valid):
    """`router_aux` of logits [B, T, E]."""
    logits = jnp.asarray(logits, jnp.float32)
    scores = box.scores(logits)
    return box.router_aux(logits, scores, box.choose(scores), jnp.asarray(valid))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_balance_loss_by_hand(score):
    box = MoE(n_experts=3, top_k=2, score=score, balance_coef=0.5)
    logits = np.random.default_rng(0).normal(size=(2, 5, 3))
    valid = np.array([[1, 1, 0, 1, 1], [0, 0, 1, 0, 0]], bool)
    each = []
    for b in range(2):
        rows = [logits[b, t] for t in range(5) if valid[b, t]]
        share = [reference.softmax(r) for r in rows]
        if score == "sigmoid":
            share = [s / s.sum() for s in (1 / (1 + np.exp(-r)) for r in rows)]
        chosen = [e for r in rows for e in np.argsort(-r)[:2]]
        often = [chosen.count(e) * 3 / (2 * len(rows)) for e in range(3)]
        each.append(np.dot(often, np.mean(share, 0)))
    got = aux_of(box, logits, valid)["balance_loss"]
    np.testing.assert_allclose(got, 0.5 * np.mean(each), rtol=1e-5)


def test_the_balance_loss_is_its_coefficient_where_all_is_even_and_grows_to_the_worst():
    box = MoE(n_experts=4, top_k=1, balance_coef=0.5)
    even = aux_of(box, 50 * np.eye(4)[None], [[True] * 4])
    np.testing.assert_allclose(even["balance_loss"], 0.5, rtol=1e-6)
    worst = aux_of(box, 50 * np.eye(4)[None, [2] * 4], [[True] * 4])
    np.testing.assert_allclose(worst["balance_loss"], 0.5 * 4, rtol=1e-6)
    # A sequence without tokens is not one of those that the mean is over.
    both = aux_of(box, 50 * np.eye(4)[None].repeat(2, 0), [[True] * 4, [False] * 4])
    np.testing.assert_allclose(both["balance_loss"], 0.5, rtol=1e-6)


def test_the_balance_loss_evens_out_the_choices():
    box = MoE(n_experts=4, top_k=1, balance_coef=1.0)
    logits = np.random.default_rng(0).normal(size=(2, 64, 4)) + LOPSIDED
    shift, valid = jnp.zeros(4), np.ones((2, 64), bool)

    def loss(shift):
        return aux_of(box, logits + shift[None, None], valid)["balance_loss"]

    before = aux_of(box, logits, valid)["expert_tokens"].max()
    for _ in range(60):
        shift -= jax.grad(loss)(shift)
    after = aux_of(box, logits + shift[None, None], valid)["expert_tokens"].max()
    assert before > 80 and after < 48


def test_the_z_loss_by_hand():
    logits, valid = [[[1.0, 2.0], [9.0, 9.0]]], [[True, False]]
    got = aux_of(MoE(2, 1, z_coef=0.1), logits, valid)["z_loss"]
    np.testing.assert_allclose(got, 0.1 * math.log(math.e + math.e**2) ** 2, rtol=1e-6)


def test_losses_are_there_where_they_have_a_coefficient():
    ones = [[True] * 3]
    assert set(aux_of(MoE(4), np.zeros((1, 3, 4)), ones)) == {"expert_tokens"}
    both = aux_of(MoE(4, balance_coef=0.1, z_coef=0.1), np.zeros((1, 3, 4)), ones)
    assert set(both) == {"expert_tokens", "balance_loss", "z_loss"}
    none = aux_of(MoE(4, balance_coef=0.1, z_coef=0.1), np.zeros((1, 3, 4)), [[False] * 3])
    assert all((value == 0).all() for value in none.values())


def test_the_balance_bias_follows_its_rule():
    box = MoE(n_experts=4, balance_rate=0.25, expert=GATED)
    _, params = setup(box)
    aux = {"expert_tokens": jnp.array([5.0, 1.0, 0.0, 2.0])}  # the mean is 2
    new = box.update(params, aux)
    np.testing.assert_allclose(
        new["balance_bias"] - params["balance_bias"], [-0.25, 0.25, 0.25, 0.0], atol=1e-7
    )
    assert new["experts"] is params["experts"] and set(new) == set(params)
    still = MoE(n_experts=4, expert=GATED)
    assert still.update(params, aux) is params
    for counts in ([7.0] * 6, [0.0] * 6):  # 42 / 6 is exact, 1 / 6 is not
        six = MoE(n_experts=6, balance_rate=0.25)
        zero = {"balance_bias": jnp.zeros(6)}
        new = quick_jit(six.update)(zero, {"expert_tokens": jnp.array(counts)})
        assert (new["balance_bias"] == 0).all()


def test_the_rule_evens_out_the_choices():
    box = MoE(n_experts=4, top_k=1, balance_rate=0.02, expert=GATED)
    logits = np.random.default_rng(0).normal(size=(2, 64, 4)) + LOPSIDED
    scores, params = box.scores(jnp.asarray(logits, jnp.float32)), {"balance_bias": jnp.zeros(4)}
    most = []
    for _ in range(60):
        choice = box.choose(scores + params["balance_bias"][None, None])
        aux = {"expert_tokens": jnp.bincount(choice.reshape(-1), length=4).astype(jnp.float32)}
        params = box.update(params, aux)
        most.append(int(aux["expert_tokens"].max()))
    assert most[0] > 80 and max(most[-10:]) < 48


@dataclasses.dataclass(frozen=True)
class Counting(FFNBox):
    """A shared network with an aux and a rule of its own."""

    def build(self, dims, name=None):
        return _Counting(name=name)

    def update(self, params, aux):
        return {"w": params["w"] + aux["n"]}


class _Counting(nn.Module):
    @nn.compact
    def __call__(self, x_BTD, valid_BT, dropout_key=None):
        w = self.param("w", nn.initializers.zeros, (1, 1, 1))
        return x_BTD + w, {"n": valid_BT.sum(), "odd_loss": jnp.float32(3.0)}


def test_what_the_shared_network_says_is_passed_on():
    box = MoE(n_experts=2, expert=GATED, shared=Counting())
    _, params = setup(box)
    _, aux, _ = run(box, params, valid=SOME)
    assert aux["shared_n"] == 11 and aux["shared_odd_loss"] == 3
    assert box.update(params, aux)["shared"]["w"] == params["shared"]["w"] + 11


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"top_k": 9}, r"top_k=9 exceeds the 8 experts"),
        ({"top_k": 0}, r"top_k=0 must be positive"),
        ({"n_groups": 3}, r"n_experts=8 is not divisible by n_groups=3"),
        ({"n_groups": 4, "top_groups": 5}, r"top_groups=5 exceeds n_groups=4"),
        ({"n_groups": 4, "top_k": 3}, r"exceeds the 2 experts to choose from: 2 in each of top_gr"),
        ({"n_groups": 8, "top_k": 1, "group_score": "top2"}, r"needs two experts in a group"),
        ({"expert": MoE()}, r"neither a GatedMLP nor an MLP"),
        ({"balance_coef": -0.1}, r"balance_coef=-0.1 and z_coef=0.0 must not be negative"),
        ({"balance_rate": 0.0}, r"balance_rate=0.0 must be positive"),
        ({"capacity_factor": 0.0}, r"capacity_factor=0.0 must be positive"),
    ],
)
def test_wrong_knobs_are_refused(knobs, message):
    with pytest.raises(ConfigError, match=message):
        MoE(**knobs)
