# SPDX-License-Identifier: Apache-2.0
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.moe import MoE
from jaxgpt.losses import next_token_loss
from jaxgpt.model import LayerEdit, forward
from jaxgpt.study.inside import site_gradients, site_shapes, sweep
from jaxgpt.testing import quick_jit, tiny, worn

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, 6)), jnp.int32)
TARGETS = jnp.asarray(np.random.default_rng(1).integers(0, 31, (2, 6)), jnp.int32)
ONE = tiny(n_layers=1, d_model=8, attention=GQA(n_heads=2))


def loss(output):
    return next_token_loss(output.logits_BTV, TARGETS)


def total(output, factor):
    return factor * output.logits_BTV[..., :31].sum()


def test_shapes_are_known_without_parameters():
    found = site_shapes(ONE, 2, 6, capture=["block_0/attention/*"], dtype=jnp.bfloat16)
    assert found["block_0/attention/values"].shape == (2, 6, 2, 4)
    assert found["block_0/attention/values"].dtype == jnp.bfloat16
    assert found["block_0/attention/probs"].dtype == jnp.float32
    assert site_shapes(ONE)["head/logits"].shape == (1, 1, 128)
    with pytest.raises(ValueError, match="no such site"):
        site_shapes(ONE, capture=["block_1/*"])


def test_gradients_at_every_site_are_the_finite_differences():
    """In float64: along a random direction at each site, within 1e-6 of the loss's own slope."""
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), worn(ONE))
        grads = functools.partial(site_gradients, ONE, sites=["*"], dtype=jnp.float64)
        value, slopes = quick_jit(lambda p: grads(p, TOKENS, loss))(params)

        @quick_jit
        def moved(deltas):
            patch = {site: functools.partial(jnp.add, delta) for site, delta in deltas.items()}
            return loss(forward(ONE, params, TOKENS, patch=patch, dtype=jnp.float64))

        zeros = jax.tree.map(jnp.zeros_like, slopes)
        assert len(slopes) == len(site_shapes(ONE)) and moved(zeros) == value
        for site, slope in slopes.items():
            step = 1e-5 * rng.normal(size=slope.shape)
            low, high = (float(moved(zeros | {site: jnp.asarray(s)})) for s in (-step, step))
            want, got = high - low, 2 * float((slope * step).sum())
            assert abs(got - want) < 1e-6 * abs(want) + 1e-12, site
            assert abs(want) > 1e-9, f"{site} has no influence"


@pytest.mark.slow
def test_gradients_leave_choices_out_and_add_up():
    cfg = tiny(n_layers=1, ffn=MoE(4))
    sites = ["block_0/ffn/router_*", "block_0/in", "position/out"]
    value, slopes = quick_jit(lambda p: site_gradients(cfg, p, TOKENS, loss, sites))(worn(cfg))
    names = {"block_0/in", "position/out"}
    names |= {f"block_0/ffn/router_{name}" for name in ("logits", "scores", "weights")}
    assert set(slopes) == names and np.isfinite(value)
    assert np.array_equal(slopes["block_0/in"], slopes["position/out"])  # one is the other


def test_a_sweep_changes_one_slice_at_a_time():
    edits = (LayerEdit(start=1, attention=GQA(n_heads=2)),)
    cfg = tiny(edits=edits)
    params = jax.tree.map(jnp.asarray, worn(cfg))
    heads = "block_{}/attention/heads"
    put = {heads.format(i): 0.5 for i in (1, 0)}
    found = sweep(cfg, params, TOKENS, put, total, 2.0, axis=2)
    assert found.shape == (2, 4) and np.isnan(found[0, 2:]).all()  # of the layer with two heads
    run = quick_jit(functools.partial(forward, cfg, params, TOKENS))
    for row, layer, head in ((0, 1, 1), (1, 0, 3)):
        one = jax.tree_util.Partial(lambda n, x: x.at[:, :, n].set(0.5), head)
        want = total(run(patch={heads.format(layer): one}), 2.0)
        np.testing.assert_allclose(found[row, head], want, rtol=1e-4)
    together = sweep(cfg, params, TOKENS, put, total, 2.0, axis=-2, at_once=3)
    np.testing.assert_allclose(together, found, rtol=1e-4)
