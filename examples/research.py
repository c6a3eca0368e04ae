# SPDX-License-Identifier: Apache-2.0
"""jaxgpt in research code: no command line, no run folder; a few lines for each common wish."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from jaxgpt import (
    GQA,
    ModelConfig,
    RoPE,
    Sampling,
    Visibility,
    forward,
    generate,
    init_params,
    next_token_loss,
)

# A model, its parameters, a loss, an optimizer loop of one's own.
cfg = ModelConfig(
    vocab_size=32, d_model=32, n_layers=2, context_length=16, position=RoPE(), attention=GQA(4, 2)
)
params = jax.jit(lambda key: init_params(cfg, key))(jax.random.key(0))
ids_BT = jnp.arange(8 * 17).reshape(8, 17) % 5  # 0 1 2 3 4 0 1 2 ...
tx = optax.adamw(3e-3)


def loss(params, ids_BT):
    return next_token_loss(forward(cfg, params, ids_BT[:, :-1]).logits_BTV, ids_BT[:, 1:])


@jax.jit
def update(params, opt_state, ids_BT):
    value, grads = jax.value_and_grad(loss)(params, ids_BT)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


opt_state = tx.init(params)
for _ in range(100):
    params, opt_state, value = update(params, opt_state, ids_BT)
print(f"loss {value:.4f} nats")

# Sampling, and the log-probabilities (in nats) of what was generated.
out = generate(cfg, params, [[0, 1, 2]], max_new_tokens=7, sampling=Sampling(temperature=0.0))
print("continues with", out.ids[0], "at", [round(p, 2) for p in out.log_probs[0]])
# --- forty lines up to here ---


def only_even(logits_BV, counts_BV):
    """A logits filter of one's own: odd ids cannot be drawn."""
    return jnp.where(jnp.arange(logits_BV.shape[-1])[None] % 2 == 0, logits_BV, -jnp.inf)


print("evens", generate(cfg, params, [[0]], max_new_tokens=5, filters=[only_even]).ids[0])

# Many models at once: vmap over parameters.
keys = jax.random.split(jax.random.key(1), 3)
ensemble = jax.vmap(lambda key: init_params(cfg, key))(keys)
losses = jax.vmap(loss, in_axes=(0, None))(ensemble, ids_BT)
print("three fresh models", [round(float(x), 2) for x in losses])

# Embeddings in place of ids, and the gradient with respect to them.
x_BTD = params["embed"]["embedding"][ids_BT[:, :-1]]
grad_BTD = jax.grad(lambda x: forward(cfg, params, embeddings_BTD=x).logits_BTV[..., 0].sum())(
    x_BTD
)
print("input gradient", grad_BTD.shape)

# Looking inside: any named site of any box.
probs = forward(cfg, params, ids_BT[:1, :4], capture=["block_0/attention/probs"]).captured
print("attention of layer 0, head 0, last query", probs["block_0/attention/probs"][0, 0, -1])


class Probe(nn.Module):
    """A block of jaxgpt inside a module of one's own."""

    @nn.compact
    def __call__(self, x_BTD):
        visibility = Visibility.full(*x_BTD.shape[:2])
        x_BTD, _, _ = cfg.build_block(0, name="block")(x_BTD, visibility)
        return nn.Dense(2, name="classes")(x_BTD[:, -1])


print("probe", Probe().init_with_output(jax.random.key(2), x_BTD)[0].shape)
