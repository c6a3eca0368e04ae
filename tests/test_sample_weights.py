# SPDX-License-Identifier: Apache-2.0
import dataclasses
import functools
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_parity import MODELS, greedy

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import FFNBox
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.rope import RoPE
from jaxgpt.boxes.weights import Cast, Int4, Int8, Weight
from jaxgpt.errors import ConfigError
from jaxgpt.interop.load import load
from jaxgpt.sample.generate import generate
from jaxgpt.sample.weights import for_decoding
from jaxgpt.testing.tools import jit_forward, tiny, worn

LLAMA = dict(
    attention=GQA(n_heads=4, n_kv_heads=2, qk_norm=RMSNorm()),
    ffn=GatedMLP(d_ff=24, use_bias=True),
    position=RoPE(),
)
CFG = tiny(**LLAMA)
EXPERTS = MoE(n_experts=4, top_k=2, expert=GatedMLP(d_ff=24))
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]
TOKENS = jnp.asarray([[3, 1, 4, 1, 5, 9]])


def leaves(params):
    """Arrays and weights by path."""
    found, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, Weight))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in found}


def logits(cfg, params, **call):
    return np.asarray(jit_forward(cfg, params, TOKENS, **call).logits_BTV, np.float32)[
        ..., : cfg.vocab_size
    ]


def test_products_of_one_input_are_joined():
    got = leaves(for_decoding(CFG, worn(CFG)))
    assert got["block_0/attention/qkv/kernel"].shape == (16, 32)
    assert got["block_1/attention/qkv/bias"].shape == (32,)
    assert got["block_1/ffn/gate_up/kernel"].shape == (16, 48)
    assert not any(f"/{name}/" in path for path in got for name in ("q", "k", "v", "gate"))
    assert not any(isinstance(x, Weight) for x in got.values())  # float32, on a CPU


@pytest.mark.parametrize(
    "cfg",
    [
        CFG,
        pytest.param(dataclasses.replace(CFG, ffn=EXPERTS, head=Untied()), marks=pytest.mark.slow),
    ],
    ids=["dense", "experts"],
)
def test_joined_float32_decodes_as_the_raw_parameters(cfg):
    params = worn(cfg)
    stored = for_decoding(cfg, params)
    np.testing.assert_allclose(logits(cfg, stored), logits(cfg, params), atol=1e-5)
    want = generate(cfg, params, PROMPTS, max_new_tokens=8)
    got = generate(cfg, stored, PROMPTS, max_new_tokens=8)
    assert got.ids == want.ids
    np.testing.assert_allclose(got.log_probs, want.log_probs, atol=1e-5)


def test_captures_name_the_same_sites():
    params = worn(CFG)
    capture = ("block_*/attention/*", "block_*/ffn/*")
    want = jit_forward(CFG, params, TOKENS, capture=capture).captured
    got = jit_forward(CFG, for_decoding(CFG, params), TOKENS, capture=capture).captured
    assert set(got) == set(want)
    for site in got:
        np.testing.assert_allclose(got[site], want[site], atol=1e-4, err_msg=site)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_what_is_quantised(weights):
    cfg = dataclasses.replace(CFG, ffn=EXPERTS)
    params = worn(cfg)
    got = leaves(for_decoding(cfg, params, weights=weights))
    kind = {"int8": Int8, "int4": Int4}[weights]
    kinds = {
        "embed/embedding": Int8,
        "block_0/attention/qkv/kernel": kind,
        "block_1/attention/out/kernel": kind,
    }
    assert {path: type(x) for path, x in got.items() if isinstance(x, Weight)} == kinds | {
        path.replace("_0", "_1"): kind for path in kinds if "qkv" in path
    } | {"block_0/attention/out/kernel": kind}
    assert got["block_0/ffn/router/kernel"] is params["block_0"]["ffn"]["router"]["kernel"]
    assert got["block_0/attention/q_norm/scale"].dtype == jnp.float32


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_the_dtype_is_that_of_the_computation(weights):
    stored = for_decoding(CFG, worn(CFG), dtype=jnp.bfloat16, weights=weights)
    assert jit_forward(CFG, stored, TOKENS).logits_BTV.dtype == jnp.bfloat16
    assert jit_forward(CFG, stored, TOKENS, dtype=jnp.float32).logits_BTV.dtype == jnp.float32
    generate(CFG, stored, PROMPTS, max_new_tokens=4)


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_a_model_computes_with_what_the_weights_say(weights):
    """As the plain model whose matrices are the arrays of the weights."""
    cfg = dataclasses.replace(CFG, embed=Embed(width=8), head=Untied(use_bias=True))
    stored = for_decoding(cfg, worn(cfg), dtype=jnp.bfloat16, weights=weights)
    found = leaves(stored)
    assert len([x for x in found.values() if isinstance(x, Weight)]) == 11

    def plain(path, x):
        if not isinstance(x, Weight):
            return x
        return x.matrix() if path[-1].key == "embedding" else x.array()

    dense = jax.tree_util.tree_map_with_path(plain, stored, is_leaf=lambda x: isinstance(x, Weight))
    got = logits(cfg, stored, dtype=jnp.float32)
    np.testing.assert_allclose(got, logits(cfg, dense, dtype=jnp.float32), atol=2e-4)


def test_rounding_is_what_is_lost():
    params = worn(CFG)
    want = logits(CFG, params)

    def error(**options):
        got = logits(CFG, for_decoding(CFG, params, **options), dtype=jnp.float32)
        return np.sqrt(np.square(got - want).mean() / np.square(want).mean())

    errors = [error(), error(dtype=jnp.bfloat16), error(weights="int8"), error(weights="int4")]
    assert errors[0] < 1e-5 < errors[1] < 0.05 and 1e-5 < errors[2] < 0.05
    assert errors[2] < errors[3] < 1, errors


def test_bfloat16_is_what_forward_casts_to():
    params = worn(CFG)
    stored = for_decoding(CFG, params, dtype=jnp.bfloat16)
    raw, got = logits(CFG, params, dtype=jnp.bfloat16), logits(CFG, stored)
    np.testing.assert_allclose(got, raw, atol=0.05 * np.abs(raw).max())
    kernel = stored["block_0"]["ffn"]["down"]["kernel"]
    assert isinstance(kernel, Cast)
    down = params["block_0"]["ffn"]["down"]["kernel"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(kernel.array(), down.astype(np.float32))


def test_stored_parameters_stay_as_they_are():
    once = for_decoding(CFG, worn(CFG), weights="int8")
    again = for_decoding(CFG, once, weights="int8")
    assert jax.tree.structure(again) == jax.tree.structure(once)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(once), strict=True))


def test_it_can_be_traced_and_refuses_other_words():
    convert = jax.jit(functools.partial(for_decoding, CFG, weights="int8"))
    assert isinstance(convert(worn(CFG))["embed"]["embedding"], Int8)
    with pytest.raises(ConfigError, match="weights='int2'; fix: None or one of float32"):
        for_decoding(CFG, worn(CFG), weights="int2")


# --- boxes of one's own ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Own(FFNBox):
    """A box that reads a kernel of its own, and parameters named as those of GatedMLP."""

    def build(self, dims, name=None):
        return _Own(name=name)


class _Own(nn.Module):
    @nn.compact
    def __call__(self, x_BTD, valid_BT, dropout_key=None):
        D = x_BTD.shape[-1]
        kernel = self.param("kernel", nn.initializers.normal(0.5), (D, D))
        return nn.Dense(D, name="gate")(x_BTD) * nn.Dense(D, name="up")(x_BTD @ kernel), {}


@dataclasses.dataclass(frozen=True)
class OwnGQA(GQA):
    """A subclass with a module of its own."""

    def build(self, dims, name=None):
        return super().build(dims, name)


def test_boxes_of_ones_own_keep_what_they_read():
    cfg = tiny(ffn=Own(), attention=OwnGQA(n_heads=4))
    params = worn(cfg)
    stored = for_decoding(cfg, params, weights="int8")
    found = leaves(stored)
    assert not isinstance(found["block_0/ffn/kernel"], Weight)
    assert not isinstance(found["block_0/ffn/gate/kernel"], Weight)
    assert isinstance(found["block_0/attention/q/kernel"], Int8)  # a `Dense`, whoever calls it
    rough = np.abs(logits(cfg, stored) - logits(cfg, params)).max()
    assert rough < 0.1 * np.abs(logits(cfg, params)).max()


def test_the_example_of_a_box_decodes(monkeypatch):
    examples = Path(__file__).resolve().parents[1] / "examples"
    if not examples.is_dir():
        pytest.skip("no examples beside these tests")
    monkeypatch.syspath_prepend(str(examples))
    import my_attention

    monkeypatch.setitem(sys.modules, "my_attention", my_attention)
    cfg = tiny(attention=my_attention.MeanPool())
    stored = for_decoding(cfg, worn(cfg), weights="int8")
    assert isinstance(stored["block_0"]["attention"]["out"]["kernel"], Int8)
    assert len(generate(cfg, stored, PROMPTS, max_new_tokens=3).ids[0]) == 3


def test_mla_joins_nothing_and_keeps_what_it_cuts():
    cfg = tiny(attention=MLA(n_heads=2, kv_rank=8, q_rank=8, nope_dim=4, rope_dim=4, v_dim=4))
    params = worn(cfg)
    found = leaves(for_decoding(cfg, params, dtype=jnp.bfloat16, weights="int8"))
    assert found["block_0/attention/kv_up/kernel"].dtype == jnp.bfloat16
    for name in ("q_down", "q_up", "kv_down", "out"):
        assert isinstance(found[f"block_0/attention/{name}/kernel"], Int8)
    got = generate(cfg, for_decoding(cfg, params), PROMPTS, max_new_tokens=5).ids
    assert got == generate(cfg, params, PROMPTS, max_new_tokens=5).ids


SOME = {"gpt2", "llama-bias", "qwen3", "deepseek-v2-lite"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SOME else pytest.mark.slow) for n in MODELS.split()]
)
def test_families(shared, name):
    cfg, params, _ = load(shared / "parity" / name)
    [want] = np.load(shared / "parity" / name / "ref.npz")["greedy"].tolist()
    stored = for_decoding(cfg, params)
    assert greedy(cfg, stored, want[:8], len(want) - 8) == want
    ids = jnp.asarray([want])
    raw, whole = (jit_forward(cfg, p, ids).logits_BTV for p in (params, stored))
    np.testing.assert_allclose(
        whole, raw, atol=1e-5 * float(jnp.abs(raw[..., : cfg.vocab_size]).max())
    )
    rough = jit_forward(cfg, for_decoding(cfg, params, weights="int8"), ids).logits_BTV
    assert np.isfinite(rough[..., : cfg.vocab_size]).all()
