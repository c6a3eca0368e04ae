# SPDX-License-Identifier: Apache-2.0
"""What a compiled step of decoding writes; that its tokens are right is `test_generate.py`'s."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.rope import RoPE
from jaxgpt.model import ModelConfig, init_params
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.steps import Rows, draw_steps, log_prob
from jaxgpt.sample.weights import for_decoding

SLOTS, V = 192, 96
CFG = ModelConfig(
    vocab_size=V,
    context_length=150,
    d_model=40,
    n_layers=2,
    attention=GQA(n_heads=4, n_kv_heads=2, head_dim=24),
    position=RoPE(),
    vocab_multiple=1,
)


def written_in_the_loop(text) -> list[tuple[str, int]]:
    """(name, elements) of what each step computes and puts into a buffer of its own."""
    [name] = re.findall(r" while\([^\n]*body=(%[\w.\-]+)", text)
    body = text.split(f"\n{name} ")[1].split("\n}")[0]
    pattern = r"%([\w.\-]+) = \w+\[([\d,]*)\]\S* (\w[\w\-]*)\("
    free = ("parameter", "get-tuple-element", "bitcast", "constant")
    found = [match for match in re.findall(pattern, body) if match[2] not in free]
    sizes = [math.prod(int(n) for n in shape.split(",") if n) for _, shape, _ in found]
    return [(name, size) for (name, *_), size in zip(found, sizes, strict=True)]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads what the CPU compiler writes")
def test_a_step_copies_neither_caches_nor_weights():
    params = for_decoding(CFG, jax.jit(functools.partial(init_params, CFG))(jax.random.key(0)))
    leaves, tree = jax.tree.flatten(CFG.init_caches(1, SLOTS))
    keys_B = jax.random.split(jax.random.key(0), 1)

    def steps(leaves, params, id_11, one_B, false_B, stops_V):
        rows = Rows(id_11, one_B, None, false_B, jax.tree.unflatten(tree, leaves))
        how = dict(sampling=Sampling(temperature=0.0), filters=(), dtype=None, chunk=4)
        rows, *drawn = draw_steps(CFG, params, rows, keys_B, stops_V, 1, 4, **how)
        return jax.tree.leaves(rows), drawn

    arrays = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32), jnp.zeros(1, bool)
    lowered = jax.jit(steps, donate_argnums=0).lower(leaves, params, *arrays, jnp.zeros(V, bool))
    compiled = lowered.compile()
    written = written_in_the_loop(compiled.as_text())
    assert any(size == 4 * SLOTS for _, size in written)  # scores: the text was understood
    large = [name for name, size in written if size >= 40 * 40]
    assert len(large) == 2 * CFG.n_layers  # keys and values, in place
    assert all("dynamic-update-slice" in name for name in large)


def test_log_probs_notice_what_is_not_finite():
    logits_BV = jnp.array([[0.0, -jnp.inf, 1.0], [jnp.nan, 0, 0], [0, jnp.inf, 0], [-jnp.inf] * 3])
    got_B = np.asarray(log_prob(logits_BV, jnp.array([2, 1, 0, 0])))
    np.testing.assert_allclose(got_B[0], -np.log1p(np.exp(-1)), rtol=1e-6)
    assert np.isnan(got_B[1:]).all()
