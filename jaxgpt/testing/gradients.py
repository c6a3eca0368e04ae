# SPDX-License-Identifier: Apache-2.0
"""Training: gradients of every parameter, and what must change nothing (remat, scan, dropout)."""

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import FFNBox
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.norm import NoNorm
from jaxgpt.layers import Layer
from jaxgpt.model import ModelConfig, forward
from jaxgpt.shapes import Params
from jaxgpt.stack import Remat
from jaxgpt.testing.layers import is_rotary
from jaxgpt.testing.tools import assert_close, jit_forward, logits, pairs, quick_jit, tokens

NOTHING = 1e-6  # of the largest gradient: rounding, where a gradient is zero


def check_training(cfg: ModelConfig, params: Params, zero: Mapping[str, str] | None = None) -> None:
    """Gradients are finite and there; remat, scan and unused dropout change nothing.

    Args:
      cfg: The model.
      params: Its parameters.
      zero: Patterns of paths whose gradient is zero in this model, with the reason, beside those of
        `zero_gradients`.
    """
    args, key = (cfg, *tokens(padded=True)), jax.random.key(1)
    loss, grads = jit_loss(params, *args, key)
    other, _ = jit_loss(params, *args, jax.random.key(2))
    assert not cfg.dropout or loss != other, "two dropout keys give one loss"
    loss2, grads2 = jit_loss(params, *args, key, remat="full", scan=True)
    assert_close(loss2, loss, 1e-6, "the loss with remat and scan")
    top = max(np.abs(g).max() for _, g, _ in pairs(grads, grads))
    assert top > 0, "no parameter has a gradient"
    zero = zero_gradients(cfg) | dict(zero or {})
    for path, got, want in pairs(grads2, grads):
        assert np.isfinite(want).all(), f"the gradient of {path} is not finite"
        # An element is a sum over tokens; scanned or not, XLA adds them up in different orders.
        assert_close(got / top, want / top, 5e-6, f"the gradient of {path} with remat and scan")
        why = [reason for pattern, reason in zero.items() if fnmatch.fnmatchcase(path, pattern)]
        size = np.abs(want).max() / top
        if why:
            assert size < NOTHING, f"the gradient of {path} should be zero ({why[0]}): {size:.1g}"
        else:
            assert size > NOTHING, f"the gradient of {path} is zero: {size:.1g}"
    without = dataclasses.replace(cfg, dropout=0.0)
    programs = {jit_forward.lower(c, params, args[1]).as_text() for c in (cfg, without)}
    if len(programs) > 1:  # most often they are one, and need not be run
        same = logits(cfg, params, args[1]) == logits(without, params, args[1])
        assert same.all(), "dropout without a dropout_key"


def zero_gradients(cfg: ModelConfig) -> dict[str, str]:
    """Patterns of the paths of parameters whose gradient is zero by analysis, with the reason."""
    return {
        f"block_{i}/{path}": reason
        for i, layer in enumerate(cfg.layers)
        for path, reason in (_attention_zeros(layer) | _ffn_zeros(layer.ffn)).items()
    }


def _attention_zeros(layer: Layer) -> dict[str, str]:
    """What softmax does not see: one vector added to all keys of a head, or a score alone."""
    box = layer.attention
    if not isinstance(box, GQA) or box.sinks:
        return {}
    if box.window == 1:
        reason = "a token that sees only itself has probability one, whatever the score"
        return dict.fromkeys(("attention*/[qk]/*", "attention*/[qk]_norm/*"), reason)
    if is_rotary(layer.position) or box.softcap:
        return {}
    reason = "it shifts all scores of a query alike"
    normed = box.qk_norm is not None and not isinstance(box.qk_norm, NoNorm)
    return {"attention*/k_norm/bias" if normed else "attention*/k/bias": reason}


def _ffn_zeros(box: FFNBox, path: str = "ffn") -> dict[str, str]:
    """What chooses experts without weighing them."""
    if not isinstance(box, MoE):
        return {}
    zeros = {} if box.shared is None else _ffn_zeros(box.shared, f"{path}/shared")
    if box.balance_rate is not None:
        zeros[f"{path}/balance_bias"] = "it chooses experts and is in no weight"
    balanced = box.balance_coef and box.top_k < box.n_experts
    if box.top_k == 1 and box.normalize and not box.z_coef and not balanced:
        zeros[f"{path}/router/*"] = "the weight of the only chosen expert is one"
    return zeros


def _loss(
    params: Params,
    cfg: ModelConfig,
    tokens_BT: Array,
    pos_BT: Array,
    dropout_key: Any,
    remat: Remat = "none",
    scan: bool = False,
) -> Array:
    """Mean loss of the tokens that are not padding, and what the boxes add to it."""
    call: dict[str, Any] = dict(dropout_key=dropout_key, remat=remat, scan=scan)
    out = forward(cfg, params, tokens_BT, pos_BT=pos_BT, **call)
    logp_BTV = jax.nn.log_softmax(out.logits_BTV[:, :-1])
    logp_BT = jnp.take_along_axis(logp_BTV, tokens_BT[:, 1:, None], -1)[..., 0]
    extra = [v for aux in out.aux.values() for k, v in aux.items() if k.endswith("_loss")]
    return -jnp.mean(logp_BT, where=pos_BT[:, :-1] >= 0) + sum(extra)


jit_loss = quick_jit(jax.value_and_grad(_loss), static_argnames=("cfg", "remat", "scan"))
