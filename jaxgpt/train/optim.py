# SPDX-License-Identifier: Apache-2.0
"""The optimizer as an optax chain, its schedule, and which parameters decay."""

import jax
import jax.numpy as jnp
import optax

from jaxgpt.shapes import Params
from jaxgpt.train.config import OptimConfig

DECAYED = ("kernel", "embedding")  # last names of parameter paths


def learning_rate(cfg: OptimConfig, horizon: int) -> optax.Schedule:
    """The rate of the n-th update, n counted from 1: it reaches the peak at n = warmup_steps.

    No update has rate zero but where `final_lr` is; the rate stays at `final_lr` past the horizon.

    Args:
      cfg: Peak, shape and warmup.
      horizon: The update at which the final rate is reached, warmup included.

    Source: Loshchilov & Hutter 2017, eq. 5 (cosine), https://arxiv.org/abs/1608.03983; Hu et al.
      2024, section 4.2 (warmup, stable, decay), https://arxiv.org/abs/2404.06395
    """
    final = cfg.lr / 10 if cfg.final_lr is None else cfg.final_lr
    rest = max(horizon - cfg.warmup_steps, 1)
    if cfg.schedule == "cosine":
        after = optax.cosine_decay_schedule(cfg.lr, rest, alpha=final / cfg.lr)
    elif cfg.schedule == "wsd":
        decay = max(min(round(cfg.decay_fraction * horizon), rest), 1)
        stable = optax.constant_schedule(cfg.lr)
        fall = optax.linear_schedule(cfg.lr, final, decay)
        after = optax.join_schedules([stable, fall], [rest - decay])
    else:
        after = optax.constant_schedule(cfg.lr)
    if not cfg.warmup_steps:
        return after
    warmup = optax.linear_schedule(0.0, cfg.lr, cfg.warmup_steps)
    return optax.join_schedules([warmup, after], [cfg.warmup_steps])


def decay_mask(params: Params) -> Params:
    """True where weight decay applies to matrices only: by the last name of the path.

    Not by rank: a stacked norm scale has two axes, too.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in DECAYED, params)


def optimizer(cfg: OptimConfig, horizon: int) -> optax.GradientTransformation:
    """Clip by the global norm, then AdamW; moments are float32 like the parameters.

    Source: Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101
    """
    rate = learning_rate(cfg, horizon)
    adamw = optax.adamw(
        lambda count: jnp.asarray(rate(count + 1), jnp.float32),  # optax counts from 0
        b1=cfg.beta1,
        b2=cfg.beta2,
        eps=cfg.eps,
        weight_decay=cfg.weight_decay,
        mask=decay_mask if cfg.decay == "matrices" else None,
    )
    if cfg.clip is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(cfg.clip), adamw)
