# SPDX-License-Identifier: Apache-2.0
"""One optimizer step and one evaluation batch, as pure functions.

What the numbers of a step mean for the run is decided on the host: `jaxgpt.train.health`.
"""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float

from jaxgpt.data.batches import Batch
from jaxgpt.losses import aux_loss, chunked_terms, token_terms
from jaxgpt.model import ModelConfig, forward, init_params
from jaxgpt.placing import use
from jaxgpt.readout import logits_of
from jaxgpt.shapes import Key, Params
from jaxgpt.train.config import LoraConfig, TrainConfig
from jaxgpt.train.lora import init_lora, merged, split

_NO_LORA = LoraConfig()


@struct.dataclass
class TrainState:
    """Everything that a resumed run needs from the device.

    Attributes:
      step: Steps taken, int32: each has used up its batch, and its update was applied or skipped.
      params: Float32 master parameters.
      opt_state: The optimizer's moments, float32, and its count of the updates applied.
      key: A typed key, never split: the key of a step is fold_in(key, step).
      extra: `bad_steps`, skipped in a row, and `skipped_steps`, skipped in all, int32; perhaps
        `ema`, the moving average of what is trained, float32, at the paths of the parameters.
    """

    step: Any
    params: Any
    opt_state: Any
    key: Any
    extra: Any = struct.field(default_factory=dict)


def init_state(
    cfg: ModelConfig,
    tx: optax.GradientTransformation,
    seed: int | Array,
    params: Params | None = None,
    *,
    lora: LoraConfig = _NO_LORA,
    ema: bool = False,
) -> TrainState:
    """A fresh state; jit it with out_shardings to create it where it belongs.

    Args:
      cfg: The model.
      tx: The optimizer; what is frozen gets no moments.
      seed: Of parameters, adapters and dropout.
      params: To begin with; None: fresh ones.
      lora: Whether adapters are trained instead of the model.
      ema: Whether a moving average is kept; it begins at the parameters.
    """
    key = jax.random.key(seed)
    if params is None:
        params = init_params(cfg, jax.random.fold_in(key, 0))
    params = init_lora(params, lora, jax.random.fold_in(key, 2))
    trained = split(params, lora)[0]
    step, bad_steps, skipped_steps = (jnp.zeros((), jnp.int32) for _ in range(3))
    extra: dict[str, Any] = {"bad_steps": bad_steps, "skipped_steps": skipped_steps}
    if ema:
        extra["ema"] = jax.tree.map(lambda p: jnp.array(p, jnp.float32), trained)
    return TrainState(step, params, tx.init(trained), jax.random.fold_in(key, 1), extra)


def apart(state: TrainState) -> tuple[Params, TrainState, Params | None]:
    """A state as checkpoints hold it: parameters, the rest, and the moving average if there is one.

    Each is read by itself: who samples needs no moments.
    """
    extra = dict(state.extra)
    ema = extra.pop("ema", None)
    return state.params, dataclasses.replace(state, params=None, extra=extra), ema


def together(params: Params, rest: TrainState, ema: Params | None) -> TrainState:
    """The inverse of `apart`."""
    extra = rest.extra if ema is None else {**rest.extra, "ema": ema}
    return dataclasses.replace(rest, params=params, extra=extra)


def averaged_params(state: TrainState) -> Params | None:
    """The parameters with the moving average in the place of what is trained; None without one."""
    return {**state.params, **state.extra["ema"]} if "ema" in state.extra else None


def loss_sum(
    params: Params, cfg: ModelConfig, train: TrainConfig, batch: Batch, key: Key | None
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Float[Array, ""], Any]]:
    """Sum of the loss over trained tokens, and (sum of nats, number of tokens, the boxes' aux).

    Sums, not means: micro-batches and devices add up, whatever share of the tokens each has. A
    box's auxiliary losses count once per token, and so does the z-loss, which is not in the nats.
    """
    nats_BT, log_z_BT, aux = _terms(params, cfg, train, batch, dropout_key=key, remat=train.remat)
    n = batch.weights_BT.sum()
    nats = (nats_BT * batch.weights_BT).sum()
    loss = nats + n * aux_loss(aux)
    if train.z_coef:
        loss += train.z_coef * (log_z_BT**2 * batch.weights_BT).sum()
    return loss, (nats, n, aux)


def _terms(
    params: Params, cfg: ModelConfig, train: TrainConfig, batch: Batch, **call: Any
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Any]:
    """Nats of each token, the logarithm of its softmax's denominator, and the boxes' aux."""
    chunk, dtype = train.loss_chunk, jnp.dtype(train.dtype)
    out = forward(
        cfg,
        params,
        batch.tokens_BT,
        pos_BT=batch.pos_BT,
        segment_BT=batch.segment_BT,
        dtype=dtype,
        scan=train.scan,
        kernel=train.kernel,
        headless=chunk is not None,
        **call,
    )
    if chunk is None:
        return *token_terms(out.logits_BTV, batch.targets_BT), out.aux
    read = {name: params[name] for name in ("embed", "head") if name in params}
    logits = functools.partial(logits_of, cfg, use(read, dtype=dtype))
    return *chunked_terms(logits, out.logits_BTV, batch.targets_BT, chunk), out.aux


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    cfg: ModelConfig,
    tx: optax.GradientTransformation,
    train: TrainConfig,
    lora: LoraConfig = _NO_LORA,
    rate: optax.Schedule | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """Gradients of the mean loss over the batch's trained tokens, then one update.

    With `train.accumulate` = A the batch is worked off in A micro-batches, row r in number r mod A,
    and the result is that of the whole batch. If loss, gradient or update is not finite the update
    is skipped and counted: parameters, moments and moving average stay, while `step` goes on, so
    that the batch and the dropout of step n are functions of n alone.

    Returns:
      The new state, and `loss_nats`, `grad_norm` (before clipping), `param_norm` (of what is
      trained, before the update), `update_ratio` (norm of the update over that), `n_tokens`,
      `finite`, the counts `bad_steps` and `skipped_steps`, with a `rate` of updates by their number
      `lr`, and the mean over layers of each single number that boxes return in their aux.
    """
    key = jax.random.fold_in(state.key, state.step)
    trained, frozen = split(state.params, lora)
    grads, (nats, n, aux) = _gradients(trained, frozen, batch, key, cfg, train, lora)
    grads = jax.tree.map(lambda g: g / jnp.maximum(n, 1.0), grads)
    updates, opt_state = tx.update(grads, state.opt_state, trained)
    moved = cast(Params, optax.apply_updates(trained, updates))
    moved = moved if frozen else _by_rule(cfg, moved, aux)

    grad_norm, update_norm, param_norm = map(optax.tree.norm, (grads, updates, trained))
    finite = jnp.isfinite(nats) & jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)
    skipped = state.extra["skipped_steps"] + ~finite
    extra = {"bad_steps": jnp.where(finite, 0, state.extra["bad_steps"] + 1)}
    extra["skipped_steps"] = skipped
    metrics = dict(loss_nats=nats / jnp.maximum(n, 1.0), grad_norm=grad_norm, n_tokens=n)
    metrics |= dict(param_norm=param_norm, update_ratio=update_norm / (param_norm + 1e-30))
    metrics |= dict(finite=finite, **extra) | _means(aux, train.accumulate)
    if rate is not None:  # on the devices: the host would wait behind what they were given since
        metrics["lr"] = jnp.asarray(rate(state.step + 1 - skipped), jnp.float32)

    new = {"trained": moved, "opt_state": opt_state}
    old = {"trained": trained, "opt_state": state.opt_state}
    if train.ema_decay is not None:
        old["ema"], n_updates = state.extra["ema"], state.step + 1 - skipped
        new["ema"] = _average(old["ema"], moved, train.ema_decay, n_updates)
    kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    params, opt_state = {**frozen, **kept.pop("trained")}, kept.pop("opt_state")
    return TrainState(state.step + 1, params, opt_state, state.key, extra | kept), metrics


def _gradients(
    trained: Params,
    frozen: Params,
    batch: Batch,
    key: Key,
    cfg: ModelConfig,
    train: TrainConfig,
    lora: LoraConfig,
) -> tuple[Params, tuple[Array, Array, Any]]:
    """The gradient of `loss_sum` over all micro-batches, and its sums."""

    @functools.partial(jax.grad, has_aux=True)
    def grad(trained, rows, key):
        return loss_sum(merged({**frozen, **trained}, lora), cfg, train, rows, key)

    def micro_step(total, micro):
        index, rows = micro
        grads, sums = grad(trained, rows, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, total, grads), sums

    if train.accumulate == 1:
        return grad(trained, batch, key)
    micro_batches = jax.tree.map(
        lambda x: x.reshape(-1, train.accumulate, *x.shape[1:]).swapaxes(0, 1), batch
    )
    zeros = jax.tree.map(jnp.zeros_like, trained)
    indexed = (jnp.arange(train.accumulate), micro_batches)
    grads, sums = jax.lax.scan(micro_step, zeros, indexed)
    return grads, jax.tree.map(lambda x: x.sum(0), sums)


def _average(ema: Params, params: Params, decay: float, n: Array) -> Params:
    """The moving average after the n-th update: early on it forgets faster, as 1 - 9 / (10 + n).

    Source: TensorFlow's ExponentialMovingAverage with num_updates,
      https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage
    """
    rate = 1.0 - jnp.minimum(decay, (1.0 + n) / (10.0 + n))
    return jax.tree.map(lambda e, p: e + rate * (p - e), ema, params)


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
    nats_BT, _, _ = _terms(merged(params, lora), cfg, train, batch)
    return jnp.where(batch.weights_BT > 0, nats_BT * batch.weights_BT, 0.0)
