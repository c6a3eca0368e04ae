# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: a router sends each token through a few of many feed-forward networks.

The choice is here, with what trains it; `boxes/experts.py` has the networks and brings tokens to
them. Left out: experts on several devices.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Literal, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxgpt.boxes.base import Dims, FFNBox, check_positive
from jaxgpt.boxes.dense import Dense
from jaxgpt.boxes.expertmesh import spread_experts
from jaxgpt.boxes.experts import Experts, Slots, Sorted
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.errors import ConfigError
from jaxgpt.placing import active
from jaxgpt.shapes import Key, Params, wide
from jaxgpt.taps import tap


@dataclasses.dataclass(frozen=True)
class MoE(FFNBox):
    """`sum over the chosen experts of weight_e * expert_e(x)`, and `shared(x)` for every token.

    Scores are the softmax or the sigmoid of the router's logits; a token takes the `top_k` experts
    of the highest scores, and their scores are the weights. With `n_groups` the experts stand in
    groups of neighbours, and only the best `top_groups` of them can be chosen from. With
    `balance_rate` a bias is added to the scores for the choice alone; it has no gradient, and after
    each step it rises for experts with fewer tokens than the mean and falls for the others.

    No token is dropped, unless `capacity_factor` is given: then, in training, an expert takes at
    most capacity_factor * T * top_k / n_experts tokens of each sequence, the first ones, and the
    others go without it.

    Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; renormalised softmax: Jiang et
      al. 2024 (Mixtral), section 2.1, https://arxiv.org/abs/2401.04088; shared experts: Dai et al.
      2024, https://arxiv.org/abs/2401.06066; groups: DeepSeek-AI 2024a (V2), section 2.1.2,
      https://arxiv.org/abs/2405.04434; sigmoid: DeepSeek-AI 2024b (V3), eq. 12-16,
      https://arxiv.org/abs/2412.19437; balance bias: Wang et al. 2024,
      https://arxiv.org/abs/2408.15664; capacity: Lepikhin et al. 2020 (GShard), section 2.2,
      https://arxiv.org/abs/2006.16668
    Differs from the paper: GShard fills slots with all first choices before the second ones; here
      tokens come in order, so that none depends on a later one.
    """

    n_experts: int = 8
    top_k: int = 2  # experts of a token
    expert: FFNBox = GatedMLP()  # each of them: a GatedMLP or an MLP
    shared: FFNBox | None = None  # for every token, beside the chosen ones
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True  # the weights of a token sum to 1 (before routed_scaling)
    routed_scaling: float = 1.0  # factor on the weights
    n_groups: int = 1  # groups of experts
    top_groups: int = 1  # of them, those that a token may choose from
    group_score: Literal["max", "top2"] = "max"  # V2: best of a group; V3: sum of its two best
    router_bias: bool = False  # on the router's logits (gpt-oss)
    balance_coef: float = 0.0  # of the balance loss
    z_coef: float = 0.0  # of the router's z-loss
    balance_rate: float | None = None  # step of the balance bias; None: there is no such bias
    capacity_factor: float | None = None  # slots over the mean number needed; None: no limit

    def __post_init__(self) -> None:
        check_positive(
            n_experts=self.n_experts,
            top_k=self.top_k,
            routed_scaling=self.routed_scaling,
            n_groups=self.n_groups,
            top_groups=self.top_groups,
            balance_rate=self.balance_rate,
            capacity_factor=self.capacity_factor,
        )
        if not isinstance(self.expert, GatedMLP | MLP):
            raise ConfigError(f"expert={self.expert} is neither a GatedMLP nor an MLP")
        if self.n_experts % self.n_groups:
            raise ConfigError(
                f"n_experts={self.n_experts} is not divisible by n_groups={self.n_groups}"
            )
        if self.top_groups > self.n_groups:
            raise ConfigError(f"top_groups={self.top_groups} exceeds n_groups={self.n_groups}")
        per_group = self.n_experts // self.n_groups
        if self.top_k > per_group * self.top_groups:
            raise ConfigError(
                f"top_k={self.top_k} exceeds the {per_group * self.top_groups} experts to choose "
                f"from: {per_group} in each of top_groups={self.top_groups}"
            )
        if self.n_groups > 1 and self.group_score == "top2" and per_group < 2:
            raise ConfigError('group_score="top2" needs two experts in a group; there is one')
        if min(self.balance_coef, self.z_coef) < 0:
            raise ConfigError(
                f"balance_coef={self.balance_coef} and z_coef={self.z_coef} must not be negative"
            )

    def check(self, dims: Dims) -> None:
        """The experts must fit into the model."""
        for box in (self.expert, self.shared):
            if box is not None:
                box.check(dims)

    def build(self, dims: Dims, name: str | None = None) -> nn.Module:
        """The module; parameters `router`, `experts`, perhaps `balance_bias` and `shared`."""
        return _MoE(self, dims, name=name)

    def scores(self, logits_BTE: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """What the router gives each expert, in [0, 1]."""
        score = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[self.score]
        return score(logits_BTE)

    def choose(self, preference_BTE: Float[Array, "B T E"]) -> Int[Array, "B T k"]:
        """Experts of each token, the most preferred first."""
        B, T, E = preference_BTE.shape
        if self.n_groups > 1:
            preference_BTGI = preference_BTE.reshape(B, T, self.n_groups, -1)
            counted = {"max": 1, "top2": 2}[self.group_score]
            score_BTG = jax.lax.top_k(preference_BTGI, counted)[0].sum(-1)
            top_BTg = jax.lax.top_k(score_BTG, self.top_groups)[1]
            open_BTG = jax.nn.one_hot(top_BTg, self.n_groups, dtype=bool).any(2)
            preference_BTGI = jnp.where(open_BTG[..., None], preference_BTGI, -jnp.inf)
            preference_BTE = preference_BTGI.reshape(B, T, E)
        return jax.lax.top_k(preference_BTE, self.top_k)[1]

    def weigh(
        self, scores_BTE: Float[Array, "B T E"], choice_BTk: Int[Array, "B T k"]
    ) -> Float[Array, "B T k"]:
        """Weights of the chosen experts."""
        # A comparison instead of a gather, whose gradient would be a scatter.
        hot_BTkE = jax.nn.one_hot(choice_BTk, self.n_experts, dtype=bool)
        weight_BTk = jnp.where(hot_BTkE, scores_BTE[:, :, None], 0.0).sum(-1)
        if self.normalize:  # all sigmoids may be zero: 1e-20 is DeepSeek's
            weight_BTk /= weight_BTk.sum(-1, keepdims=True) + 1e-20
        return weight_BTk * self.routed_scaling

    def capacity(self, length: int) -> int:
        """Tokens of a sequence of this length that an expert takes at most, in training."""
        if self.capacity_factor is None:
            return length
        mean = length * self.top_k / self.n_experts
        return min(length, math.ceil(self.capacity_factor * mean))

    def router_aux(
        self,
        logits_BTE: Float[Array, "B T E"],
        scores_BTE: Float[Array, "B T E"],
        choice_BTk: Int[Array, "B T k"],
        valid_BT: Bool[Array, "B T"],
    ) -> dict[str, Array]:
        """Counts and losses over valid tokens.

        Returns:
          `expert_tokens` (E,), how many tokens chose each expert; with their coefficients, by which
          they are multiplied, `balance_loss` and `z_loss`. The balance loss is the mean over
          sequences of sum over experts of f_e P_e: f_e is E times the share of the choices that are
          e, and P_e the mean score of e, scores of a token summing to 1. It is 1 where all is even.
          The z-loss is the mean of logsumexp(logits)^2.

        Source: Fedus et al. 2021 (Switch), eq. 4-6, https://arxiv.org/abs/2101.03961, and Lepikhin
          et al. 2020 (GShard), section 2.2; with top_k and by sequence: DeepSeek-AI 2024b (V3), eq.
          17-20; z-loss: Zoph et al. 2022 (ST-MoE), eq. 5, https://arxiv.org/abs/2202.08906
        """
        valid_BT1 = valid_BT[:, :, None]
        n_B1 = jnp.maximum(valid_BT1.sum(1), 1).astype(scores_BTE.dtype)
        hot_BTkE = jax.nn.one_hot(choice_BTk, self.n_experts, dtype=bool) & valid_BT1[..., None]
        count_BE = hot_BTkE.sum((1, 2)).astype(scores_BTE.dtype)
        aux = {"expert_tokens": count_BE.sum(0)}
        if self.balance_coef:
            share_BTE = scores_BTE / (scores_BTE.sum(-1, keepdims=True) + 1e-20)
            share_BE = jnp.where(valid_BT1, share_BTE, 0.0).sum(1) / n_B1
            often_BE = count_BE / n_B1 * (self.n_experts / self.top_k)
            loss = (often_BE * share_BE).sum() / jnp.maximum(valid_BT.any(1).sum(), 1)
            aux["balance_loss"] = self.balance_coef * loss
        if self.z_coef:
            z_BT = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
            z = jnp.where(valid_BT, z_BT, 0.0).sum() / jnp.maximum(valid_BT.sum(), 1)
            aux["z_loss"] = self.z_coef * z
        return aux

    def update(self, params: Params, aux: Mapping[str, Array]) -> Params:
        """The balance bias after a step: it rises where fewer tokens came than in the mean."""
        if self.balance_rate is not None:
            count_E = aux["expert_tokens"]
            # Sums of counts are exact, a mean need not be.
            short_E = jnp.sign(count_E.sum() - self.n_experts * count_E)
            bias_E = params["balance_bias"] + self.balance_rate * short_E
            params = {**params, "balance_bias": bias_E}
        if self.shared is not None and "shared" in params:
            theirs = {k[7:]: v for k, v in aux.items() if k.startswith("shared_")}
            params = {**params, "shared": self.shared.update(params["shared"], theirs)}
        return params


class _MoE(nn.Module):
    box: MoE
    dims: Dims

    @nn.compact
    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        valid_BT: Bool[Array, "B T"],
        dropout_key: Key | None = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        box = self.box
        real_BTD = jnp.where(valid_BT[:, :, None], x_BTD, 0)  # padding may hold NaN
        choice_BTk, weight_BTk, aux = self._route(real_BTD, valid_BT)
        experts = Experts(
            cast(GatedMLP | MLP, box.expert), box.n_experts, self.dims, name="experts"
        )
        dropless, layout = box.capacity_factor is None or dropout_key is None, active()
        if dropless and layout is not None:
            params = self.variables["params"]["experts"]
            choices = valid_BT, choice_BTk, weight_BTk
            y_BTD = spread_experts(layout, experts, params, real_BTD, *choices)
        else:
            if dropless:
                way = Sorted.of(choice_BTk, valid_BT, box.n_experts)
            else:
                slots = box.capacity(x_BTD.shape[1])
                way = Slots.of(choice_BTk, valid_BT, box.n_experts, slots)
                aux["dropped_tokens"] = aux["expert_tokens"].sum() - way.taken_BTEC.sum()
            tap_hidden = functools.partial(way.tap_hidden, functools.partial(tap, self, "hidden"))
            y_BTD = way.combine(experts(way.rows(real_BTD), way.multiply, tap_hidden), weight_BTk)
        if box.shared is not None:
            shared_BTD, theirs = box.shared.build(self.dims, name="shared")(
                x_BTD, valid_BT, dropout_key
            )
            y_BTD += shared_BTD
            aux |= {f"shared_{name}": value for name, value in theirs.items()}
        return tap(self, "out", y_BTD), aux

    def _route(self, x_BTD: Array, valid_BT: Array) -> tuple[Array, Array, dict[str, Array]]:
        """Experts of each token, their weights, and what `MoE.router_aux` counts; in float32."""
        box = self.box
        with jax.default_matmul_precision("highest"):
            router = Dense(box.n_experts, self.dims, box.router_bias, name="router")
            logits_BTE = tap(self, "router_logits", router(wide(x_BTD)))
        scores_BTE = tap(self, "router_scores", box.scores(logits_BTE))
        preference_BTE = scores_BTE
        if box.balance_rate is not None:
            zeros = nn.initializers.zeros
            bias_E = self.param("balance_bias", zeros, (box.n_experts,), jnp.float32)
            preference_BTE = scores_BTE + bias_E[None, None]
        choice_BTk = box.choose(jax.lax.stop_gradient(preference_BTE))
        choice_BTk = tap(self, "router_choice", choice_BTk)
        weight_BTk = tap(self, "router_weights", box.weigh(scores_BTE, choice_BTk))
        return choice_BTk, weight_BTk, box.router_aux(logits_BTE, scores_BTE, choice_BTk, valid_BT)
