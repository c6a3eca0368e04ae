# SPDX-License-Identifier: Apache-2.0
"""One optimizer step and one evaluation batch, as pure functions."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float

from jaxgpt.data.batches import Batch
from jaxgpt.losses import aux_loss, token_nats
from jaxgpt.model import ModelConfig, forward, init_params
from jaxgpt.shapes import Key, Params
from jaxgpt.train.config import LoraConfig, TrainConfig
from jaxgpt.train.lora import init_lora, merged, split

_NO_LORA = LoraConfig()


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


def init_state(
    cfg: ModelConfig,
    tx: optax.GradientTransformation,
    seed: int,
    params: Params | None = None,
    *,
    lora: LoraConfig = _NO_LORA,
) -> TrainState:
    """A fresh state; jit it with out_shardings to create it where it belongs.

    Args:
      cfg: The model.
      tx: The optimizer; what is frozen gets no moments.
      seed: Of parameters, adapters and dropout.
      params: To begin with; None: fresh ones.
      lora: Whether adapters are trained instead of the model.
    """
    key = jax.random.key(seed)
    if params is None:
        params = init_params(cfg, jax.random.fold_in(key, 0))
    params = init_lora(params, lora, jax.random.fold_in(key, 2))
    opt_state = tx.init(split(params, lora)[0])
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, jax.random.fold_in(key, 1))


def loss_sum(
    params: Params, cfg: ModelConfig, train: TrainConfig, batch: Batch, key: Key | None
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Float[Array, ""], Any]]:
    """Sum of the loss over trained tokens, and (sum of nats, number of tokens, the boxes' aux).

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
        kernel=train.kernel,
    )
    n = batch.weights_BT.sum()
    nats = (token_nats(out.logits_BTV, batch.targets_BT) * batch.weights_BT).sum()
    return nats + n * aux_loss(out.aux), (nats, n, out.aux)


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    cfg: ModelConfig,
    tx: optax.GradientTransformation,
    train: TrainConfig,
    lora: LoraConfig = _NO_LORA,
) -> tuple[TrainState, dict[str, Array]]:
    """Gradients of the mean loss over the batch's trained tokens, then one update.

    With `train.accumulate` = A the batch is worked off in A micro-batches, row r in number r mod A,
    and the result is that of the whole batch. If loss or gradient is not finite the state comes
    back unchanged.

    Returns:
      The new state, and `loss_nats`, `grad_norm` (before clipping), `n_tokens`, `finite`, and the
      mean over layers of each single number that boxes return in their aux.
    """
    key = jax.random.fold_in(state.key, state.step)
    trained, frozen = split(state.params, lora)

    @functools.partial(jax.grad, has_aux=True)
    def grad(trained, rows, key):
        return loss_sum(merged({**frozen, **trained}, lora), cfg, train, rows, key)

    def micro_step(total, micro):
        index, rows = micro
        grads, sums = grad(trained, rows, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, total, grads), sums

    if train.accumulate == 1:
        grads, (nats, n, aux) = grad(trained, batch, key)
    else:
        micro_batches = jax.tree.map(
            lambda x: x.reshape(-1, train.accumulate, *x.shape[1:]).swapaxes(0, 1), batch
        )
        zeros = jax.tree.map(jnp.zeros_like, trained)
        indexed = (jnp.arange(train.accumulate), micro_batches)
        grads, sums = jax.lax.scan(micro_step, zeros, indexed)
        nats, n, aux = jax.tree.map(lambda x: x.sum(0), sums)

    grads = jax.tree.map(lambda g: g / jnp.maximum(n, 1.0), grads)
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(nats)
    updates, opt_state = tx.update(grads, state.opt_state, trained)
    params = {**frozen, **cast(Params, optax.apply_updates(trained, updates))}
    new = dataclasses.replace(
        state,
        step=state.step + 1,
        params=params if frozen else _by_rule(cfg, params, aux),
        opt_state=opt_state,
    )
    state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
    loss_nats = nats / jnp.maximum(n, 1.0)
    metrics = dict(loss_nats=loss_nats, grad_norm=grad_norm, n_tokens=n, finite=finite)
    return state, metrics | _means(aux, train.accumulate)


def _by_rule(cfg: ModelConfig, params: Params, aux: dict[str, dict[str, Array]]) -> Params:
    """The parameters that no gradient moves, moved by the rules of their boxes."""
    params = dict(params)
    for layer, (name, values) in zip(cfg.layers, aux.items(), strict=True):
        ffn = params[name]["ffn"]
        params[name] = {**params[name], "ffn": layer.ffn.update(ffn, values)}
    return params


def _means(aux: dict[str, dict[str, Array]], accumulate: int) -> dict[str, Array]:
    """The mean over layers and micro-batches of the entries that are single numbers."""
    values: dict[str, list[Array]] = {}
    for layer in aux.values():
        for name, value in layer.items():
            if value.ndim == 0:
                values.setdefault(name, []).append(value / accumulate)
    return {name: jnp.stack(each).mean() for name, each in values.items()}


def eval_step(
    params: Params,
    batch: Batch,
    *,
    cfg: ModelConfig,
    train: TrainConfig,
    lora: LoraConfig = _NO_LORA,
) -> Float[Array, "B T"]:
    """Weighted nats of each token, without dropout; filler is 0."""
    params = merged(params, lora)
    out = forward(
        cfg,
        params,
        batch.tokens_BT,
        dtype=jnp.dtype(train.dtype),
        scan=train.scan,
        kernel=train.kernel,
    )
    return jnp.where(
        batch.weights_BT > 0, token_nats(out.logits_BTV, batch.targets_BT) * batch.weights_BT, 0.0
    )
