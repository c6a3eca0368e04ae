# SPDX-License-Identifier: Apache-2.0
"""Sites: what can be looked at and changed, in every way a model is run."""

import functools
import re
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exports import shrunk

from jaxgpt import taps
from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import OutputNorm, Parallel, PostNorm, Sandwich
from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.norm import LayerNorm, NoNorm, RMSNorm
from jaxgpt.boxes.rope import RoPE
from jaxgpt.model import LayerEdit, forward, init_params
from jaxgpt.presets import MODELS
from jaxgpt.study.inside import site_shapes
from jaxgpt.taps import tap, tapping
from jaxgpt.testing import jit_forward, jit_init, quick_jit, tiny, worn
from jaxgpt.testing.sites import check_sites, jit_put_back

CFG = tiny()
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, 6)), jnp.int32)
ENDS = {"embed/out", "position/out", "final_norm/out", "final_norm/rate", "head/logits"}
ATTENTION = {
    f"attention/{site}" for site in ("queries", "keys", "values", "scores", "probs", "heads", "out")
}
NORMS = {f"{name}_norm/{site}" for name in ("attention", "ffn") for site in ("out", "rate")}
OUT_NORMS = {site.replace("norm", "out_norm") for site in NORMS}
BLOCK = {"in", "mid", "out", "ffn/hidden", "ffn/out"} | ATTENTION | NORMS


@pytest.fixture(scope="module")
def params():
    return jit_init(CFG, jax.random.key(0))


# --- which sites there are ------------------------------------------------------------------------


def sites_of_a_block(**boxes):
    found = site_shapes(tiny(**boxes), 2, 6)
    assert set(found) >= ENDS - {"final_norm/rate"}
    return {site.removeprefix("block_1/") for site in found if site.startswith("block_1/")}


def test_the_sites_of_each_placement():
    assert sites_of_a_block() == BLOCK
    assert sites_of_a_block(block=PostNorm()) == BLOCK
    assert sites_of_a_block(block=Sandwich()) == BLOCK | OUT_NORMS
    assert sites_of_a_block(block=OutputNorm()) == (BLOCK - NORMS) | OUT_NORMS
    assert sites_of_a_block(block=Parallel()) == BLOCK - {"mid"}
    one = BLOCK - {"mid", "ffn_norm/out", "ffn_norm/rate"}
    assert sites_of_a_block(block=Parallel(one_norm=True)) == one
    rates = {site for site in BLOCK if site.endswith("rate")}
    assert sites_of_a_block(norm=NoNorm()) == BLOCK - rates


def test_the_sites_of_attention_and_ffn():
    normed = {"attention/q_norm/out", "attention/k_norm/out"}
    rates = {"attention/q_norm/rate", "attention/k_norm/rate"}
    for of in ("head", "all"):
        box = GQA(n_heads=4, qk_norm=RMSNorm(), qk_norm_of=of)
        assert sites_of_a_block(attention=box) == BLOCK | normed | rates
    each = GQA(n_heads=4, qk_norm=RMSNorm(), qk_norm_of="each_head")
    assert sites_of_a_block(attention=each) == BLOCK | normed
    latent = MLA(n_heads=4, kv_rank=6, q_rank=7, nope_dim=5, rope_dim=4, v_dim=3)
    own = {"attention/latent", "attention/q_norm/out", "attention/q_norm/rate"}
    own |= {"attention/kv_norm/rate"}
    assert sites_of_a_block(attention=latent) == (BLOCK - {"attention/values"}) | own
    router = {f"ffn/router_{name}" for name in ("logits", "scores", "choice", "weights")}
    shared = {"ffn/shared/hidden", "ffn/shared/out"}
    assert sites_of_a_block(ffn=MoE(4, shared=GatedMLP())) == BLOCK | router | shared


def test_shapes_of_the_sites_and_what_they_have_to_do_with_each_other(params):
    found = jit_forward(CFG, params, TOKENS, capture=("*",))
    assert set(found.captured) == {f"block_{i}/{s}" for i in range(2) for s in BLOCK} | ENDS
    at = found.captured.__getitem__
    shapes = {site: x.shape for site, x in found.captured.items()}
    assert shapes == {site: x.shape for site, x in site_shapes(CFG, 2, 6).items()}
    assert shapes["block_0/attention/probs"] == shapes["block_0/attention/scores"] == (2, 4, 6, 6)
    assert shapes["block_0/attention/heads"] == (2, 6, 4, 4)
    assert shapes["block_0/ffn_norm/rate"] == (2, 6, 1) and shapes["embed/out"] == (2, 6, 16)
    assert np.array_equal(at("head/logits"), found.logits_BTV)
    assert np.array_equal(at("position/out"), at("block_0/in"))
    assert np.array_equal(at("block_0/out"), at("block_1/in"))
    assert np.array_equal(at("block_0/in") + at("block_0/attention/out"), at("block_0/mid"))
    x = np.asarray(at("block_1/out"))
    centred = x - x.mean(-1, keepdims=True)
    np.testing.assert_allclose(centred * at("final_norm/rate"), at("final_norm/out"), atol=1e-5)


def test_sites_are_captured_by_pattern(params):
    some = jit_forward(CFG, params, TOKENS, capture=("block_*/attention/probs", "block_1/out"))
    names = ["block_0/attention/probs", "block_1/attention/probs", "block_1/out"]
    assert sorted(some.captured) == names


def test_a_site_that_is_not_there_is_an_error(params):
    with pytest.raises(ValueError, match=r"no such site: \['block_2/out'\]"):
        forward(CFG, params, TOKENS, patch={"block_2/out": 0.0, "block_1/out": 0.0})
    with pytest.raises(ValueError, match=r"no such site: \['block_9/\*'\]"):
        forward(CFG, params, TOKENS, capture=["block_*/out", "block_9/*"])


@pytest.mark.parametrize("mode", [{"remat": "full"}, {"scan": True}])
def test_taps_need_unrolled_layers(params, mode):
    with pytest.raises(ValueError, match="drop remat and scan"):
        forward(CFG, params, TOKENS, capture=("*",), **mode)


# --- off: nothing; on: nothing but what was asked -------------------------------------------------


@pytest.mark.parametrize(
    "boxes",
    [
        {},
        pytest.param(
            dict(norm=RMSNorm(), attention=GQA(4, qk_norm=RMSNorm(), sinks=True), ffn=GatedMLP()),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dict(attention=MLA(4, 6, 7, 5, 4, 3), ffn=MoE(4, shared=GatedMLP()), head=Untied()),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_without_capture_the_program_is_that_of_a_model_without_sites(boxes, monkeypatch):
    cfg = tiny(**boxes)
    shapes = jax.eval_shape(functools.partial(init_params, cfg), jax.random.key(0))

    def program():
        run = functools.partial(forward, cfg, dropout_key=jax.random.key(1))
        loss = lambda params: run(params, TOKENS).logits_BTV[..., :31].sum()  # noqa: E731
        text = str(jax.make_jaxpr(jax.value_and_grad(loss))(shapes))
        return re.sub(r"0x[0-9a-f]+", "", text)

    with_sites, replaced = program(), 0
    for module in [m for name, m in sys.modules.items() if name.startswith("jaxgpt.")]:
        if module is not taps and getattr(module, "tap", None) is tap:
            monkeypatch.setattr(module, "tap", lambda module, name, x: x)
            replaced += 1
        if module is not taps and getattr(module, "tap_of", None) is taps.tap_of:
            monkeypatch.setattr(module, "tap_of", lambda module, *names: None)
    assert replaced >= 6 and program() == with_sites


def test_capture_changes_no_value_and_computes_nothing_more(params):
    plain = jit_forward(CFG, params, TOKENS)
    taken = jit_forward(CFG, params, TOKENS, capture=("*",))
    assert np.array_equal(plain.logits_BTV, taken.logits_BTV) and plain.captured == {}
    stream = ("block_*/in", "block_*/mid", "block_*/out", "*/queries", "*/scores", "*_norm/out")
    quiet, asked = (
        str(jax.make_jaxpr(lambda p, c=c: forward(CFG, p, TOKENS, capture=c).logits_BTV)(params))
        for c in ((), stream)
    )
    assert quiet == asked


PRESETS = {cfg: name for name in MODELS for cfg in [shrunk(name)]}  # one of each kind


@pytest.mark.slow
@pytest.mark.parametrize("cfg", PRESETS, ids=PRESETS.get)
def test_a_captured_value_put_back_changes_no_bit(cfg):
    """Of every site of every public model, shrunk; `check_box` does it for every box and knob."""
    check_sites(cfg, worn(cfg))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "modern", "gemma2-2b", "olmo2-7b", "post-norm"])
def test_a_captured_value_changes_no_bit_of_another_program(name):
    """Compiled as by default, one program for each patch; docs/inside.md says what is left.

    The sites of the ends and of the second layer: a program takes two seconds to compile.
    """
    post = tiny(block=PostNorm(), norm=RMSNorm())
    cfg = post if name == "post-norm" else shrunk(name)
    params, run = worn(cfg), jax.jit(functools.partial(forward, cfg), static_argnames="capture")
    plain, looked = run(params, TOKENS), run(params, TOKENS, capture=("*",))
    assert np.array_equal(plain.logits_BTV, looked.logits_BTV)
    for site, x in looked.captured.items():
        if not site.startswith("block_0"):
            got = run(params, TOKENS, patch={site: x})
            assert np.array_equal(got.logits_BTV, plain.logits_BTV), site


# --- patches --------------------------------------------------------------------------------------


def test_a_patch_replaces_a_site_and_all_that_follows(params):
    clean = jit_forward(CFG, params, TOKENS, capture=("*",))
    other = jit_forward(CFG, params, TOKENS[::-1], capture=("*",))
    patch = {"block_0/out": other.captured["block_0/out"]}
    patched = jit_forward(CFG, params, TOKENS, capture=("*",), patch=patch)
    assert np.array_equal(patched.captured["block_0/mid"], clean.captured["block_0/mid"])
    assert np.array_equal(patched.captured["block_0/out"], patch["block_0/out"])
    np.testing.assert_allclose(patched.logits_BTV, other.logits_BTV, atol=1e-5)


def test_a_patch_may_be_a_function_and_its_name_a_pattern(params):
    look = functools.partial(jit_forward, CFG, params, TOKENS)
    heads = ("block_*/attention/heads",)
    clean = look(capture=heads).captured
    double = jax.tree_util.Partial(lambda factor, x: factor * x, 2.0)  # passes through jit
    taken = look(capture=heads, patch={"block_*/attention/heads": double}).captured
    assert np.array_equal(taken["block_0/attention/heads"], 2 * clean["block_0/attention/heads"])
    by_value = {site: 2 * x for site, x in clean.items()}
    first = {"block_0/attention/heads": by_value["block_0/attention/heads"]}
    one = look(patch={"block_0/attention/heads": double}).logits_BTV
    assert np.array_equal(one, look(patch=first).logits_BTV)
    both = {"block_0/*/heads": double, "*/heads": double}  # one after the other
    four = look(capture=heads, patch=both).captured["block_0/attention/heads"]
    assert np.array_equal(four, 4 * clean["block_0/attention/heads"])


def test_every_site_is_on_the_way_to_the_logits(params):
    clean = jit_forward(CFG, params, TOKENS, capture=("*",))
    bent = {site: x + 0.5 * jnp.cos(7 * x) for site, x in clean.captured.items()}
    pos_BT = jnp.broadcast_to(jnp.arange(6), TOKENS.shape)
    for place, site in enumerate(sorted(bent)):
        got = jit_put_back(CFG, params, TOKENS, pos_BT, bent, place).logits_BTV
        assert np.abs(got - clean.logits_BTV)[..., :31].max() > 1e-3, site


def test_a_patch_of_another_shape_is_named(params):
    want = r"a patch of shape \(2, 5, 16\) for block_1/mid of shape \(2, 6, 16\)"
    for patch in (jnp.ones((2, 5, 16)), lambda x: x[:, 1:]):
        with pytest.raises(ValueError, match=want):
            forward(CFG, params, TOKENS, patch={"block_1/mid": patch})


def test_patches_are_cast_and_broadcast(params):
    patch = {"block_1/ffn/hidden": np.float64(0.25), "block_0/out": np.ones(16, np.int32)}
    out = jit_forward(CFG, params, TOKENS, capture=tuple(patch), patch=patch, dtype=jnp.bfloat16)
    for site, value in (("block_1/ffn/hidden", 0.25), ("block_0/out", 1.0)):
        assert out.captured[site].dtype == jnp.bfloat16 and (out.captured[site] == value).all()


# --- transformations ------------------------------------------------------------------------------


def test_a_patch_under_vmap_and_grad(params):
    def run(scale, site="block_1/ffn/hidden"):
        out = forward(CFG, params, TOKENS, patch={site: lambda x: scale * x}, capture=[site])
        return out.logits_BTV[..., :31].sum(), out.captured[site]

    scales, step = jnp.array([0.0, 0.49, 0.5, 0.51]), 0.01
    sums, hidden = quick_jit(jax.vmap(run))(scales)
    assert hidden.shape == (4, 2, 6, 64)
    alone = quick_jit(run)
    for scale, total, value in zip(scales, sums, hidden, strict=True):
        one, found = alone(scale)
        np.testing.assert_allclose(total, one, rtol=1e-5)
        np.testing.assert_allclose(value, found, atol=1e-6)
    slope = quick_jit(jax.grad(lambda scale: run(scale)[0]))(0.5)
    np.testing.assert_allclose(slope, (sums[3] - sums[1]) / (2 * step), rtol=1e-2)


def test_taps_end_with_their_call():
    class Module(nn.Module):
        @nn.compact
        def __call__(self, x):
            return tap(self, "x", x)

    x, apply = jnp.ones(3), Module().apply
    with pytest.raises(RuntimeError), tapping(("*",)) as seen:
        assert np.array_equal(apply({}, x), x) and set(seen.captured) == {"x"}
        with tapping(patch={"x": 2.0}):
            assert np.array_equal(apply({}, x), 2 * x)
        with tapping():  # hides what is inside
            assert apply({}, x) is x
        raise RuntimeError
    assert apply({}, x) is x


# --- kernels and caches ---------------------------------------------------------------------------

WINDOWS = (LayerEdit(every=2, start=1, set={"attention.window": 3}),)
DECODED = {
    "windows": dict(attention=GQA(4, n_kv_heads=2), position=RoPE(), edits=WINDOWS),
    "sinks": dict(attention=GQA(4, sinks=True, softcap=2.0), position=RoPE()),
    "latent": dict(attention=MLA(4, 6, 7, 5, 4, 3), position=RoPE(), norm=RMSNorm()),
    "experts": dict(ffn=MoE(4, shared=GatedMLP()), norm=LayerNorm()),
}
LENGTH, SLOTS = 6, 8


QUICKEST = [("windows", "auto")]
KERNELS = [("windows", "xla")] + [(name, k) for name in DECODED for k in ("auto", "chunked")]


@pytest.mark.parametrize(
    ("name", "kernel"),
    [pytest.param(*p, marks=[pytest.mark.slow] * (p not in QUICKEST)) for p in KERNELS],
)
def test_what_is_captured_step_by_step_is_what_the_whole_text_gives(name, kernel):
    cfg = tiny(**DECODED[name])
    params = worn(cfg)
    run = quick_jit(functools.partial(forward, cfg, capture=("*",), kernel=kernel))
    whole, caches, steps = run(params, TOKENS).captured, cfg.init_caches(2, SLOTS), []
    for fed in (slice(0, 4), slice(4, 5), slice(5, 6)):
        pos_BT = jnp.broadcast_to(jnp.arange(LENGTH)[None, fed], TOKENS[:, fed].shape)
        out = run(params, TOKENS[:, fed], pos_BT=pos_BT, caches=caches)
        caches = out.caches
        steps.append(out.captured)
    assert set(whole) == set(steps[0])
    for site, want in whole.items():
        axis = 2 if site.endswith(("/scores", "/probs")) else 1  # B N T S
        got = jnp.concatenate([step[site] for step in steps], axis)
        if axis == 2:  # of slots not yet written nothing is said
            seen_TS = np.tri(LENGTH, dtype=bool)
            got, want = (jnp.where(seen_TS, x[..., :LENGTH], 0) for x in (got, want))
        got, want = (jnp.where(x > -jnp.inf, x, 0) for x in (got, want))  # padded vocabulary
        np.testing.assert_allclose(got, want, atol=3e-5 * max(1, np.abs(want).max()), err_msg=site)


@pytest.mark.parametrize("site", ["block_0/attention/heads", "block_1/mid"])
def test_a_patch_of_a_step_changes_what_comes_after(params, site):
    run = quick_jit(functools.partial(forward, CFG))
    whole = run(params, TOKENS).logits_BTV
    late = {site: jax.tree_util.Partial(lambda x: x.at[:, 3].multiply(-2))}
    want, caches, got = run(params, TOKENS, patch=late).logits_BTV, CFG.init_caches(2, SLOTS), []
    for t in range(LENGTH):
        patch = {site: jax.tree_util.Partial(lambda x: -2 * x)} if t == 3 else None
        pos_BT = jnp.full((2, 1), t)
        out = run(params, TOKENS[:, t : t + 1], pos_BT=pos_BT, caches=caches, patch=patch)
        caches = out.caches
        got.append(out.logits_BTV)
    got = jnp.concatenate(got, 1)
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert np.array_equal(want[:, :3], whole[:, :3])
    changed_T = np.abs(want - whole)[..., :31].max((0, 2)) > 1e-3
    last = site.startswith("block_1/mid")  # of the last layer: no later token reads it
    assert changed_T.tolist() == [False] * 3 + [True] + [not last] * 2
