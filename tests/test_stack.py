# SPDX-License-Identifier: Apache-2.0
import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import FFNBox
from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.boxes.rope import RoPE
from jaxgpt.model import LayerEdit, forward, param_shapes
from jaxgpt.stack import repeating_unit
from jaxgpt.testing import jit_forward, jit_init, quick_jit, tiny

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, 12)), jnp.int32)
WINDOW = {"attention.window": 3}


@dataclasses.dataclass(frozen=True)
class Counted(FFNBox):
    """A box with metrics of its own."""

    def build(self, dims, name=None):
        return _Counted(name=name)


class _Counted(nn.Module):
    @nn.compact
    def __call__(self, x_BTD, valid_BT, dropout_key=None):
        scale = self.param("scale", nn.initializers.normal(1.0), ())
        return scale * x_BTD, {"top": jnp.abs(x_BTD).max(), "scale_loss": scale}


STACKS = {  # prefix, unit and remainder: what is scanned, and what stays unrolled around it
    "equal": tiny(n_layers=3, ffn=Counted()),
    "pairs": tiny(n_layers=4, position=RoPE(), edits=(LayerEdit(every=2, start=1, set=WINDOW),)),
    "around": tiny(
        n_layers=5,
        attention=GQA(n_heads=4, n_kv_heads=2),
        edits=(LayerEdit(stop=1, ffn=GatedMLP(d_ff=8)), LayerEdit(start=3, ffn=Counted())),
    ),
    "none": tiny(edits=(LayerEdit(start=1, set=WINDOW),)),
}


SLOW = pytest.param("pairs", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [SLOW, *(name for name in STACKS if name != "pairs")])
def test_scan_and_remat_change_nothing_but_rounding(name):  # T09: dropout is on
    cfg, key = STACKS[name], jax.random.key(3)
    params = jit_init(cfg, jax.random.key(0))

    @quick_jit
    def run(params):
        def loss(params, **mode):
            out = forward(cfg, params, TOKENS, dropout_key=key, **mode)
            return jnp.mean(out.logits_BTV[..., :31] ** 2), out.aux

        modes = ({}, {"remat": "full"}, {"remat": "dots", "scan": True})
        return [jax.value_and_grad(loss, has_aux=True)(params, **mode) for mode in modes]

    ((want, aux), grads), *others = run(params)
    top = max(float(abs(g).max()) for g in jax.tree.leaves(grads))
    assert sorted(aux) == [f"block_{i}" for i in range(cfg.n_layers)]
    for (loss, aux2), grads2 in others:
        np.testing.assert_allclose(loss, want, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), aux2, aux)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6 * top), grads2, grads)
    still = jit_forward(cfg, params, TOKENS).logits_BTV[..., :31]
    assert abs(jnp.mean(still**2) - want) > 1e-3 * want


def test_remat_keeps_products_or_the_inputs_of_the_blocks_alone():
    cfg = tiny(n_layers=3, dropout=0.0)
    params = jit_init(cfg, jax.random.key(0))

    def kept(remat):
        """Floats that the forward pass keeps for the backward pass."""
        _, pull = jax.vjp(lambda p: forward(cfg, p, TOKENS, remat=remat).logits_BTV, params)
        return sum(leaf.size for leaf in jax.tree.leaves(pull))

    assert kept("full") < 0.8 * kept("dots") < 0.6 * kept("none")


@pytest.mark.slow
def test_remat_saves_memory_of_a_deep_model():
    """Scanned: unrolled, XLA's CPU back end recomputes at once and keeps the result."""
    cfg, tokens = tiny(n_layers=12, dropout=0.0), jax.ShapeDtypeStruct((8, 16), jnp.int32)

    def loss(params, tokens, remat):
        return forward(cfg, params, tokens, scan=True, remat=remat).logits_BTV[..., :31].sum()

    def temp_bytes(remat):
        grad = jax.jit(jax.grad(loss), static_argnums=2)
        compiled = grad.lower(param_shapes(cfg), tokens, remat).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    none, dots, full = map(temp_bytes, ("none", "dots", "full"))
    assert full < 0.8 * dots and dots < 0.8 * none


def test_the_repeating_unit():
    assert repeating_unit("aaaa") == (0, 1, 4)
    assert repeating_unit("abab") == (0, 2, 2)
    assert repeating_unit("baaa") == (1, 1, 3)
    assert repeating_unit("aabaab") == (0, 3, 2)
    assert repeating_unit("ababb") == (0, 2, 2)
    assert repeating_unit("xababaz") == (1, 2, 2)
    assert repeating_unit("ab") is None and repeating_unit("a") is None


def test_layers_repeat_where_their_boxes_are_equal():
    units = {name: repeating_unit(cfg.layers) for name, cfg in STACKS.items()}
    assert units == {"equal": (0, 1, 3), "pairs": (0, 2, 2), "around": (1, 1, 2), "none": None}
