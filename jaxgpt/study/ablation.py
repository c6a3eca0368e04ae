# SPDX-License-Identifier: Apache-2.0
"""What a part of the model is good for: it is taken away, or given back, and the output compared.

Ablation takes a head or a sub-layer away and looks at the loss. Activation patching gives a run on
a corrupted prompt back a piece of the run on the clean one, and looks at how much of the answer
returns. Both are `jaxgpt.study.inside.sweep`. The pictures are in `plots_inside.py`.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxgpt.losses import token_nats
from jaxgpt.model import ModelConfig, Output, forward
from jaxgpt.shapes import Params
from jaxgpt.study.inside import sweep

Instead = Literal["zero", "mean"]
"""What stands in the place of what is taken away: zeros, or the mean over all tokens given."""


def ablate_heads(
    cfg: ModelConfig,
    params: Params,
    tokens_BT: Int[Array | np.ndarray, "B T"],
    *,
    instead: Instead = "zero",
    at_once: int = 1,
) -> Float[Array, "L N"]:
    """By how much the loss rises without each head, in nats per token.

    Args:
      cfg: The model.
      params: Its parameters.
      tokens_BT: Token ids, each but the first of a row predicted.
      instead: What stands in the place of a head's output.
      at_once: See `sweep`.

    Returns:
      NaN for heads that a layer does not have.

    Source: Michel et al. 2019, section 3, https://arxiv.org/abs/1905.10650; means: Wang et al.
      2022, section 2, https://arxiv.org/abs/2211.00593
    Cost: a forward pass for each head.
    """
    return _ablate(cfg, params, tokens_BT, "attention/heads", 2, instead, at_once)


def ablate_layers(
    cfg: ModelConfig,
    params: Params,
    tokens_BT: Int[Array | np.ndarray, "B T"],
    *,
    instead: Instead = "zero",
    at_once: int = 1,
) -> Float[Array, "L 2"]:
    """By how much the loss rises without each sub-layer's output, in nats per token.

    Args:
      cfg: The model.
      params: Its parameters.
      tokens_BT: Token ids, each but the first of a row predicted.
      instead: What stands in the place of the output.
      at_once: See `sweep`.

    Returns:
      For each layer, without its attention and without its FFN.

    Source: Michel et al. 2019, section 3, for heads; McGrath et al. 2023, section 2.2,
      https://arxiv.org/abs/2307.15771
    Cost: a forward pass for each sub-layer.
    """
    columns = [
        _ablate(cfg, params, tokens_BT, f"{part}/out", None, instead, at_once)[:, 0]
        for part in ("attention", "ffn")
    ]
    return jnp.stack(columns, 1)


def activation_patching(
    cfg: ModelConfig,
    params: Params,
    clean_BT: Int[Array | np.ndarray, "B T"],
    corrupted_BT: Int[Array | np.ndarray, "B T"],
    answer_B: Int[Array | np.ndarray, " B"],
    other_B: Int[Array | np.ndarray, " B"],
    *,
    site: str = "in",
    axis: int | None = 1,
    at_once: int = 1,
) -> Float[Array, "L slices"]:
    """How much of the clean prompt's answer returns with one piece of its run.

    The answer is measured at the last token by the logit of the right next token minus that of a
    wrong one, in the mean over rows: 0 is that of the corrupted prompt, 1 that of the clean one.

    Args:
      cfg: The model.
      params: Its parameters.
      clean_BT: Prompts that make the model say the answer.
      corrupted_BT: As long, and as like them as can be, but not so.
      answer_B: The next token of each clean prompt.
      other_B: What the corrupted prompt makes the model say, most often.
      site: Of each layer: "in", "mid" or "out" for the stream, "attention/out", "ffn/out",
        "attention/heads", ...
      axis: Of the site, along which pieces are given back one by one: 1 for tokens, 2 for heads;
        None: the whole value.
      at_once: See `sweep`.

    Source: Meng et al. 2022, section 2.1, https://arxiv.org/abs/2202.05262 (there with noise in the
      place of another prompt); Heimersheim & Nanda 2024, https://arxiv.org/abs/2404.15255
    Cost: a forward pass for each layer and piece.
    """
    sites = [f"block_{i}/{site}" for i in range(cfg.n_layers)]
    clean = _look(cfg, params, clean_BT, tuple(sites))
    corrupted = _look(cfg, params, corrupted_BT)
    ends = [_difference(output, answer_B, other_B) for output in (clean, corrupted)]
    put = {name: clean.captured[name] for name in sites}
    run = cfg, params, corrupted_BT, put, _difference, answer_B, other_B
    return (sweep(*run, axis=axis, at_once=at_once) - ends[1]) / (ends[0] - ends[1])


def _ablate(
    cfg: ModelConfig,
    params: Params,
    tokens_BT: Int[Array | np.ndarray, "B T"],
    site: str,
    axis: int | None,
    instead: Instead,
    at_once: int,
) -> Array:
    """The loss without each slice of a site of each layer, less that with all of them."""
    sites = tuple(f"block_{i}/{site}" for i in range(cfg.n_layers))
    output = _look(cfg, params, tokens_BT, sites)
    put = {
        name: jnp.zeros(()) if instead == "zero" else output.captured[name].mean((0, 1))
        for name in sites
    }
    found = sweep(cfg, params, tokens_BT, put, _loss, tokens_BT, axis=axis, at_once=at_once)
    return found - _loss(output, tokens_BT)


@functools.partial(jax.jit, static_argnames=("cfg", "capture"))
def _look(
    cfg: ModelConfig, params: Params, tokens_BT: Array, capture: tuple[str, ...] = ()
) -> Output:
    return forward(cfg, params, tokens_BT, capture=capture)


def _loss(output: Output, tokens_BT: Int[Array | np.ndarray, "B T"]) -> Float[Array, ""]:
    """The mean loss of all tokens but the first of each row, in nats."""
    targets_BT = jnp.asarray(tokens_BT)[:, 1:]
    return token_nats(output.logits_BTV[:, :-1], targets_BT).mean()


def _difference(
    output: Output, answer_B: Int[Array | np.ndarray, " B"], other_B: Int[Array | np.ndarray, " B"]
) -> Float[Array, ""]:
    """The mean over rows of the difference of two logits at the last token."""
    return logit_difference(output.logits_BTV, answer_B, other_B).mean()


def logit_difference(
    logits_BTV: Float[Array, "B T V"],
    answer_B: Int[Array | np.ndarray, " B"],
    other_B: Int[Array | np.ndarray, " B"],
) -> Float[Array, " B"]:
    """At the last token: the logit of one next token minus that of another."""
    rows_B = jnp.arange(len(logits_BTV))
    return logits_BTV[rows_B, -1, answer_B] - logits_BTV[rows_B, -1, other_B]
