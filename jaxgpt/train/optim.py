# SPDX-License-Identifier: Apache-2.0
"""Around the optimizer's box: clipping, the rate's schedule, decay, and factors by path."""

import difflib
import fnmatch
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxgpt.errors import ConfigError
from jaxgpt.shapes import Params
from jaxgpt.train.config import OptimConfig
from jaxgpt.train.optimizers import is_hidden, path_of

DECAYED = ("kernel", "embedding")  # last names of parameter paths


def learning_rate(cfg: OptimConfig, horizon: int) -> optax.Schedule:
    """The rate of the n-th update, n counted from 1: it reaches the peak at n = warmup_steps.

    No update has rate zero but where `final_lr` is; the rate stays at `final_lr` past the horizon.

    Args:
      cfg: Peak, shape and warmup.
      horizon: The update at which the final rate is reached, warmup included.

    Source: Loshchilov & Hutter 2017, eq. 5 (cosine), https://arxiv.org/abs/1608.03983; Hu et al.
      2024, section 4.2 (warmup, stable, decay), https://arxiv.org/abs/2404.06395; Vaswani et al.
      2017, eq. 3 (inverse square root), https://arxiv.org/abs/1706.03762
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
    elif cfg.schedule == "inverse-sqrt":
        after = _inverse_sqrt(cfg.lr, cfg.warmup_steps)
    else:
        after = optax.constant_schedule(cfg.lr)
    if not cfg.warmup_steps:
        return after
    warmup = optax.linear_schedule(0.0, cfg.lr, cfg.warmup_steps)
    return optax.join_schedules([warmup, after], [cfg.warmup_steps])


def _inverse_sqrt(peak: float, warmup: int) -> optax.Schedule:
    """`peak sqrt(warmup / n)`, of the updates since the end of the warmup."""
    return lambda since: peak * jnp.sqrt(max(warmup, 1) / jnp.maximum(since + warmup, 1))


def decay_mask(params: Params) -> Params:
    """True where weight decay applies to matrices only: by the last name of the path.

    Not by rank: a stacked norm scale has two axes, too.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in DECAYED, params)


def optimizer(
    cfg: OptimConfig, horizon: int, width_ratio: float = 1.0
) -> optax.GradientTransformation:
    """Clip by the global norm, then the box's step, decay, the rate, and factors on it.

    Args:
      cfg: The box and all around it.
      horizon: As for `learning_rate`.
      width_ratio: That of the model (muP); 1 without. It divides the steps of hidden matrices as
        the box says, and not their decay: a weight forgets at the same pace at every width.

    Raises:
      ConfigError: The box has no rule for another width; or, when it is given parameters, a
        pattern of `multipliers` matches none of them.

    Source: decay beside the step: Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101; not
      scaled by width: the mup package of Yang et al. 2022, https://github.com/microsoft/mup
    """
    rate = learning_rate(cfg, horizon)
    hidden = cfg.method.hidden_rate(width_ratio) if width_ratio != 1 else 1.0
    steps = [
        _stored(cfg.method.build(), cfg.state_dtype),
        _scaled(lambda path: hidden if is_hidden(path) else 1.0),
        optax.add_decayed_weights(
            cfg.weight_decay, decay_mask if cfg.decay == "matrices" else None
        ),
        optax.scale_by_learning_rate(
            lambda count: jnp.asarray(rate(count + 1), jnp.float32)  # optax counts from 0
        ),
        _scaled(lambda path: cfg.method.rate(path) * multiplier(cfg, path)),
    ]
    if cfg.clip is not None:
        steps.insert(0, optax.clip_by_global_norm(cfg.clip))
    chain = optax.chain(*steps)

    def init(params: Any) -> optax.OptState:
        check_multipliers(cfg, params)
        return chain.init(params)

    return optax.GradientTransformation(init, chain.update)


def multiplier(cfg: OptimConfig, path: str) -> float:
    """The product of the factors whose patterns match a path.

    Args:
      cfg: The factors.
      path: Of a parameter, `block_0/attention/q/kernel`.
    """
    factor = 1.0
    for pattern, each in cfg.multipliers.items():
        factor *= each if fnmatch.fnmatchcase(path, pattern) else 1.0
    return factor


def check_multipliers(cfg: OptimConfig, params: Params) -> None:
    """See that each pattern has a parameter.

    Raises:
      ConfigError: One has none.
    """
    paths = [path_of(key) for key, _ in jax.tree.leaves_with_path(params)]
    for pattern in cfg.multipliers:
        if not fnmatch.filter(paths, pattern):
            near = difflib.get_close_matches(pattern, paths, n=1, cutoff=0.0)
            raise ConfigError(
                f"optim.multipliers: no parameter matches {pattern!r}",
                fix=f"did you mean {near[0]}?",
            )


def _scaled(factor: Callable[[str], float]) -> optax.GradientTransformation:
    """Each parameter's step times a factor of its path."""

    def scale(key: Any, step: jax.Array) -> jax.Array:
        each = factor(path_of(key))
        return step if each == 1.0 else step * each

    return optax.stateless(lambda steps, _: jax.tree_util.tree_map_with_path(scale, steps))


def _stored(tx: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    """`tx` with its moments rounded to a dtype between the steps, which are made in float32."""
    if dtype == "float32":
        return tx

    def cast(state: optax.OptState, to: str) -> optax.OptState:
        return optax.tree.map_params(tx, lambda moment: moment.astype(to), state)

    def init(params: Any) -> optax.OptState:
        return cast(tx.init(params), dtype)

    def update(
        updates: Any, state: optax.OptState, params: Any = None
    ) -> tuple[Any, optax.OptState]:
        steps, state = tx.update(updates, cast(state, "float32"), params)
        return steps, cast(state, dtype)

    return optax.GradientTransformation(init, update)
