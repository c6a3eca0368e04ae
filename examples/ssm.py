# SPDX-License-Identifier: Apache-2.0
"""A state-space mixer in the attention slot: the skeleton does not change, and no jaxgpt file does.

python ssm.py                                                       # compare three models
python ../train.py --preset tiny --run ssm --model.attention=ssm.LRU
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgpt import GQA, LayerEdit, ModelConfig, RoPE, forward, init_params, next_token_loss
from jaxgpt.boxes.base import AttentionBox, Dims, check_positive
from jaxgpt.boxes.dense import Dense
from jaxgpt.data.batches import Batches
from jaxgpt.data.corpus import read_corpus
from jaxgpt.errors import ConfigError
from jaxgpt.kernels import dropout
from jaxgpt.masks import Visibility
from jaxgpt.shapes import wide
from jaxgpt.taps import tap


@dataclasses.dataclass(frozen=True)
class LRU(AttentionBox):
    """h_t = a h_(t-1) + sqrt(1 - |a|^2) B x_t, y_t = Re(C h_t), with one complex a for each state.

    Source: Orvieto et al. 2023, section 3, https://arxiv.org/abs/2303.06349; diagonal states: Gu et
      al. 2022 (S4D), https://arxiv.org/abs/2206.11893
    Differs from the paper: no D x (the residual stream carries x), the angle itself is trained, not
      its logarithm, and so is no gain beside sqrt(1 - |a|^2).
    """

    n_states: int | None = None  # complex numbers that remember; None: d_model
    slowest: float = 0.99  # largest |a| at the start; the others are uniform below it

    def __post_init__(self) -> None:
        check_positive(n_states=self.n_states)
        if not 0 < self.slowest < 1:
            raise ConfigError(f"slowest={self.slowest} must be between 0 and 1")

    def build(self, dims: Dims, name: str | None = None) -> nn.Module:
        """The module; `in` is B, `out` is C, and a is exp(-exp(decay) + i angle)."""
        return _LRU(self, dims, name=name)

    def init_cache(self, dims: Dims, batch: int, length: int, dtype) -> jax.Array:
        """The state alone, whatever the length; complex64, since a sum must not be rounded."""
        return jnp.zeros((batch, self.n_states or dims.d_model), jnp.complex64)


class _LRU(nn.Module):
    box: LRU
    dims: Dims

    @nn.compact
    def __call__(self, x_BTD, visibility: Visibility, cache=None, dropout_key=None):
        segment_BT = visibility.q_segment_BT
        if visibility.prefix_B is not None or not visibility.causal:
            raise NotImplementedError("a recurrence does not look ahead: no prefix, causal only")
        if segment_BT is not None and cache is not None:
            raise ValueError("a state is of one document: no segments with a cache")
        Z, dims = self.box.n_states or self.dims.d_model, self.dims  # Z states
        decay_Z = self.param("decay", self._decays, (Z,), jnp.float32)
        angle_Z = self.param("angle", nn.initializers.uniform(2 * np.pi), (Z,), jnp.float32)
        a_11Z = jnp.exp(jax.lax.complex(-jnp.exp(decay_Z), angle_Z))[None, None]
        gain_11Z = jnp.sqrt(-jnp.expm1(-2 * jnp.exp(decay_Z)))[None, None]
        u_BTZ2 = wide(Dense(2 * Z, dims, use_bias=False, name="in")(x_BTD))
        u_BTZ = gain_11Z * jax.lax.complex(*jnp.split(u_BTZ2, 2, axis=-1))
        valid_BT1 = visibility.valid_BT[..., None]  # padding leaves the state as it is
        a_BTZ, u_BTZ = jnp.where(valid_BT1, a_11Z, 1), jnp.where(valid_BT1, u_BTZ, 0)
        if segment_BT is not None:  # the first token of a document forgets what came before
            first_BT = jnp.diff(segment_BT, axis=1, prepend=segment_BT[:, :1]) != 0
            a_BTZ = jnp.where(first_BT[..., None], 0, a_BTZ)
        if cache is not None:
            u_BTZ = u_BTZ.at[:, 0].add(a_BTZ[:, 0] * cache)
        h_BTZ = jax.lax.associative_scan(_then, (a_BTZ, u_BTZ), axis=1)[1]
        h_BTZ2 = jnp.concatenate([h_BTZ.real, h_BTZ.imag], axis=-1).astype(x_BTD.dtype)
        h_BTZ2 = dropout(tap(self, "states", h_BTZ2), dims.dropout, dropout_key)
        y_BTD = Dense(dims.d_model, dims, use_bias=False, residual=True, name="out")(h_BTZ2)
        return tap(self, "out", y_BTD), None if cache is None else h_BTZ[:, -1].astype(cache.dtype)

    def _decays(self, key, shape, dtype):
        """Such that |a| = exp(-exp(decay)) is uniform in (0, slowest)."""
        size = jax.random.uniform(key, shape, dtype, 1e-3, 1.0) * self.box.slowest
        return jnp.log(-jnp.log(size))


def _then(one, two):
    """First h -> a h + u, then another: associative, so that a scan takes log2(T) steps."""
    return one[0] * two[0], two[0] * one[1] + two[1]


# --- the box ends here; the rest compares it ---

base = ModelConfig(
    vocab_size=256, d_model=64, n_layers=2, context_length=64, position=RoPE(), attention=GQA(4)
)
MODELS = {
    "attention": base,
    "mixed": dataclasses.replace(base, edits=(LayerEdit(every=2, attention=LRU()),)),
    "states": dataclasses.replace(base, attention=LRU()),
}


def train(cfg: ModelConfig, steps: int) -> float:
    """Fit the bytes of the text inside Python; the loss of the last step, in nats a byte."""
    text = np.frombuffer(read_corpus(None).documents[0].encode(), np.uint8)
    batches, tx = Batches(text, cfg.context_length, batch_size=16, seed=0), optax.adamw(3e-3)
    params = jax.jit(lambda key: init_params(cfg, key))(jax.random.key(0))
    opt_state, value = tx.init(params), jnp.inf

    def loss(params, batch):
        return next_token_loss(forward(cfg, params, batch.tokens_BT).logits_BTV, batch.targets_BT)

    @jax.jit
    def update(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    for step in range(steps):
        params, opt_state, value = update(params, opt_state, batches.batch(step))
    return float(value)


def cache_kib(cfg: ModelConfig, length: int) -> float:
    """What must be kept of `length` tokens to write on."""
    leaves = jax.eval_shape(lambda: jax.tree.leaves(cfg.init_caches(1, length)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / 1024


def main(steps: int = 200) -> None:
    """Print a line for each model."""
    print(f"{'':12}nats after {steps} steps   KiB of cache for 1,024 tokens   65,536 tokens")
    for name, cfg in MODELS.items():
        kib = [f"{cache_kib(cfg, length):>{w},.0f}" for length, w in ((1024, 28), (65_536, 16))]
        print(f"{name:12}{train(cfg, steps):20.2f}", *kib)


if __name__ == "__main__":
    main()
