# SPDX-License-Identifier: Apache-2.0
import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes import base
from jaxgpt.boxes.base import check_positive, tap, tapping
from jaxgpt.errors import ConfigError
from jaxgpt.model import forward
from jaxgpt.testing import jit_forward, jit_init, tiny

CFG = tiny()
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, 6)), jnp.int32)
BLOCK = {"in", "mid", "out", "ffn/hidden", "ffn/out"} | {
    f"attention/{site}" for site in ("queries", "keys", "values", "scores", "probs", "heads", "out")
}


@pytest.fixture(scope="module")
def params():
    return jit_init(CFG, jax.random.key(0))


def test_sites_are_captured_by_pattern(params):
    out = jit_forward(CFG, params, TOKENS, capture=("*",))
    want = {f"block_{i}/{site}" for i in range(2) for site in BLOCK} | {"embed/out", "head/logits"}
    assert set(out.captured) == want
    assert np.array_equal(out.captured["head/logits"], out.logits_BTV)
    assert out.captured["block_0/attention/probs"].shape == (2, 4, 6, 6)
    some = jit_forward(CFG, params, TOKENS, capture=("block_*/attention/probs", "block_1/out"))
    assert sorted(some.captured) == [
        "block_0/attention/probs",
        "block_1/attention/probs",
        "block_1/out",
    ]


def test_capture_changes_no_value_and_costs_nothing_unasked(params):
    plain = jit_forward(CFG, params, TOKENS)
    taken = jit_forward(CFG, params, TOKENS, capture=("*",))
    assert np.array_equal(plain.logits_BTV, taken.logits_BTV) and plain.captured == {}
    quiet, asked = (
        str(jax.make_jaxpr(lambda p, c=c: forward(CFG, p, TOKENS, capture=c).logits_BTV)(params))
        for c in ((), ("*",))
    )
    assert quiet == asked


def test_a_patch_replaces_a_site_and_all_that_follows(params):
    clean = jit_forward(CFG, params, TOKENS, capture=("*",))
    other = jit_forward(CFG, params, TOKENS[::-1], capture=("*",))
    patch = {"block_0/out": other.captured["block_0/out"]}
    patched = jit_forward(CFG, params, TOKENS, capture=("*",), patch=patch)
    assert np.array_equal(patched.captured["block_0/mid"], clean.captured["block_0/mid"])
    assert np.array_equal(patched.captured["block_0/out"], patch["block_0/out"])
    np.testing.assert_allclose(patched.logits_BTV, other.logits_BTV, atol=1e-5)


def test_a_patch_is_broadcast_and_differentiable(params):
    def top(scale):
        patch = {"block_1/ffn/hidden": scale}
        return forward(CFG, params, TOKENS, patch=patch).logits_BTV[..., :31].sum()

    assert np.isfinite(jax.grad(top)(0.5)) and top(0.0) != top(1.0)


def test_a_patch_of_no_site_is_an_error(params):
    with pytest.raises(ValueError, match=r"no such site: \['block_2/out'\]"):
        forward(CFG, params, TOKENS, patch={"block_2/out": 0.0, "block_1/out": 0.0})


def test_a_capture_of_no_site_is_an_error(params):
    with pytest.raises(ValueError, match=r"no such site: \['block_9/\*'\]"):
        forward(CFG, params, TOKENS, capture=["block_*/out", "block_9/*"])


@pytest.mark.parametrize("mode", [{"remat": "full"}, {"scan": True}])
def test_taps_need_unrolled_layers(params, mode):
    with pytest.raises(ValueError, match="drop remat and scan"):
        forward(CFG, params, TOKENS, capture=("*",), **mode)


def test_taps_end_with_their_call():
    class Module(nn.Module):
        @nn.compact
        def __call__(self, x):
            return tap(self, "x", x)

    x, apply = jnp.ones(3), Module().apply
    with pytest.raises(RuntimeError), tapping(("*",)) as taps:
        assert np.array_equal(apply({}, x), x) and set(taps.captured) == {"x"}
        with tapping(patch={"x": 2.0}):
            assert np.array_equal(apply({}, x), 2 * x)
        raise RuntimeError
    assert apply({}, x) is x


def test_an_attention_without_a_cache_says_so():
    with pytest.raises(NotImplementedError, match="Sum has no cache and cannot be sampled from"):

        @dataclasses.dataclass(frozen=True)
        class Sum(base.AttentionBox):
            pass

        Sum().init_cache(CFG.dims(), 1, 1, jnp.float32)


def test_positive_values_pass_and_others_are_named():
    check_positive(a=1, b=0.5, c=None)
    for value in (0, -1, 0.0, float("nan")):
        with pytest.raises(ConfigError, match=f"rate={value} must be positive"):
            check_positive(a=1, rate=value)
