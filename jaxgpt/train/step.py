# SPDX-License-Identifier: Apache-2.0
"""One optimizer step and one evaluation batch, as pure functions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float

from jaxgpt.data.batches import Batch
from jaxgpt.losses import aux_loss, token_nats
from jaxgpt.model import ModelConfig, forward, init_params
from jaxgpt.shapes import Key, Params
from jaxgpt.train.config import TrainConfig


@struct.dataclass
class TrainState:
    """Everything that a resumed run needs from the device.

    Attributes:
      step: Optimizer steps taken, int32.
      params: Float32 master parameters.
      opt_state: The optimizer's moments and count, float32.
      key: A typed key, never split: the key of a step is fold_in(key, step).
      extra: State of boxes that is no parameter, a dict.
    """

    step: Any
    params: Any
    opt_state: Any
    key: Any
    extra: Any = struct.field(default_factory=dict)


def init_state(cfg: ModelConfig, tx: optax.GradientTransformation, seed: int) -> TrainState:
    """A fresh state; jit it with out_shardings to create it where it belongs."""
    key = jax.random.key(seed)
    params = init_params(cfg, jax.random.fold_in(key, 0))
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.fold_in(key, 1))


def loss_sum(
    params: Params, cfg: ModelConfig, train: TrainConfig, batch: Batch, key: Key | None
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Float[Array, ""]]]:
    """Sum of the loss over trained tokens, and (sum of nats, number of tokens).

    Sums, not means: micro-batches and devices add up, whatever share of the tokens each has. A
    box's auxiliary losses count once per token.
    """
    dtype = jnp.dtype(train.dtype)
    out = forward(
        cfg,
        params,
        batch.tokens_BT,
        dropout_key=key,
        dtype=dtype,
        remat=train.remat,
        scan=train.scan,
    )
    n = batch.weights_BT.sum()
    nats = (token_nats(out.logits_BTV, batch.targets_BT) * batch.weights_BT).sum()
    return nats + n * aux_loss(out.aux), (nats, n)


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    cfg: ModelConfig,
    tx: optax.GradientTransformation,
    train: TrainConfig,
) -> tuple[TrainState, dict[str, Array]]:
    """Gradients of the mean loss over the batch's trained tokens, then one update.

    With `train.accumulate` = A the batch is worked off in A micro-batches, row r in number r mod A,
    and the result is that of the whole batch. If loss or gradient is not finite the state comes
    back unchanged.

    Returns:
      The new state, and `loss_nats`, `grad_norm` (before clipping), `n_tokens`, `finite`.
    """
    key = jax.random.fold_in(state.key, state.step) if cfg.dropout else None
    grad = jax.grad(loss_sum, has_aux=True)

    def micro_step(total, micro):
        index, rows = micro
        micro_key = None if key is None else jax.random.fold_in(key, index)
        return jax.tree.map(jnp.add, total, grad(state.params, cfg, train, rows, micro_key)), None

    if train.accumulate == 1:
        grads, (nats, n) = grad(state.params, cfg, train, batch, key)
    else:
        micro_batches = jax.tree.map(
            lambda x: x.reshape(-1, train.accumulate, *x.shape[1:]).swapaxes(0, 1), batch
        )
        zeros = jax.tree.map(jnp.zeros_like, state.params), (jnp.zeros(()), jnp.zeros(()))
        indexed = (jnp.arange(train.accumulate), micro_batches)
        (grads, (nats, n)), _ = jax.lax.scan(micro_step, zeros, indexed)

    grads = jax.tree.map(lambda g: g / jnp.maximum(n, 1.0), grads)
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(nats)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    new = dataclasses.replace(
        state,
        step=state.step + 1,
        params=optax.apply_updates(state.params, updates),
        opt_state=opt_state,
    )
    state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
    loss_nats = nats / jnp.maximum(n, 1.0)
    return state, dict(loss_nats=loss_nats, grad_norm=grad_norm, n_tokens=n, finite=finite)


def eval_step(
    params: Params, batch: Batch, *, cfg: ModelConfig, train: TrainConfig
) -> Float[Array, "B T"]:
    """Weighted nats of each token, without dropout; filler is 0."""
    out = forward(cfg, params, batch.tokens_BT, dtype=jnp.dtype(train.dtype), scan=train.scan)
    return jnp.where(
        batch.weights_BT > 0, token_nats(out.logits_BTV, batch.targets_BT) * batch.weights_BT, 0.0
    )
