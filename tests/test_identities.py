# SPDX-License-Identifier: Apache-2.0
"""Boxes and knobs that are the same function: two models, parameters in common, equal logits."""

import dataclasses

import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import OutputNorm, Parallel, PostNorm, PreNorm, Sandwich
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Tied, Untied
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.norm import LayerNorm, NoNorm, RMSNorm
from jaxgpt.boxes.position import Learned, NoPosition
from jaxgpt.boxes.rope import RoPE
from jaxgpt.boxes.scaling import DynamicNTK, LinearScaling, Llama3Scaling, NTKScaling, YaRN
from jaxgpt.model import LayerEdit
from jaxgpt.testing import tiny, worn
from jaxgpt.testing.tools import logits, tokens

TOKENS_BT, POS_BT = tokens()
H = dict(norm=NoNorm(), final_norm=NoNorm())
ROPE = dict(attention=GQA(2), position=RoPE(theta=100.0))


def rope(scaling):
    return ROPE | dict(position=RoPE(theta=100.0, scaling=scaling))


# One tuple per identity: two models whose parameters have the same names and shapes.
SAME = {
    "as many key/value heads as query heads: multi-head attention": (
        dict(attention=GQA(4)),
        dict(attention=GQA(4, n_kv_heads=4)),
    ),
    "a window of the whole row: none": (dict(), dict(attention=GQA(4, window=12))),
    "the default scale and width of a head, given": (
        dict(),
        dict(attention=GQA(4, head_dim=4, scale=0.5)),
    ),
    "output bias as the others": (dict(), dict(attention=GQA(4, use_out_bias=True))),
    "a norm of queries and keys that is none": (dict(), dict(attention=GQA(4, qk_norm=NoNorm()))),
    "a high soft cap on scores: none": (dict(), dict(attention=GQA(4, softcap=1e4))),
    "a high soft cap on logits: none": (dict(), dict(head=Tied(softcap=1e5))),
    "a high limit in a gated FFN: none": (
        dict(ffn=GatedMLP()),
        dict(ffn=GatedMLP(limit=1e6, up_offset=0.0)),
    ),
    "d_ff of None: four times d_model": (dict(), dict(ffn=MLP(d_ff=64))),
    "an embedding of d_model columns: no projection": (dict(), dict(embed=Embed(width=16))),
    "linear scaling by 1: plain rope": (ROPE, rope(LinearScaling(1.0))),
    "NTK scaling by 1: plain rope": (ROPE, rope(NTKScaling(1.0))),
    "dynamic NTK within the trained length: plain rope": (ROPE, rope(DynamicNTK(2.0, 16))),
    "llama3 scaling by 1: plain rope": (ROPE, rope(Llama3Scaling(1.0, original_length=8))),
    "YaRN by 1: plain rope": (ROPE, rope(YaRN(1.0, original_length=8))),
    "post-norm without norm: pre-norm without": (
        H | dict(block=PreNorm()),
        H | dict(block=PostNorm()),
    ),
    "sandwich without norm: pre-norm without": (
        H | dict(block=PreNorm()),
        H | dict(block=Sandwich()),
    ),
    "output norm without norm: pre-norm without": (
        H | dict(block=PreNorm()),
        H | dict(block=OutputNorm()),
    ),
    "parallel without norm: of one or of two": (
        H | dict(block=Parallel()),
        H | dict(block=Parallel(one_norm=True)),
    ),
    "an edit of every layer: the model edited": (
        dict(edits=(LayerEdit(set={"attention.window": 3}, ffn=MLP(activation="relu")),)),
        dict(attention=GQA(4, window=3), ffn=MLP(activation="relu")),
    ),
    "no rope in every layer: no position": (
        dict(position=RoPE(), edits=(LayerEdit(position=NoPosition()),)),
        dict(position=NoPosition()),
    ),
    "a longer context: as many rows more": (
        dict(position=RoPE(theta=100.0)),
        dict(position=RoPE(theta=100.0), context_length=99),
    ),
}


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize("name", SAME)
def test_two_models_are_one(name):
    one, other = (tiny(**boxes) for boxes in SAME[name])
    params = worn(one)
    want = logits(one, params, TOKENS_BT)
    close(logits(other, params, TOKENS_BT), want)
    assert np.abs(want).max() > 0.1


def changed(params, **leaves):
    """Parameters with each block's leaves of these names, "attention/k/kernel", mapped."""
    params = {name: dict(value) for name, value in params.items()}
    for block in [name for name in params if name.startswith("block_")]:
        for path, change in leaves.items():
            *parents, last = path.split("/")
            node = params[block]
            for name in parents:
                node[name] = dict(node.get(name, {}))
                node = node[name]
            node[last] = change(node.get(last))
            if node[last] is None:
                del node[last]
    return params


def assert_same(one, params, other, others, tolerance=1e-5):
    close(logits(other, others, TOKENS_BT), logits(one, params, TOKENS_BT), tolerance)


@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_grouped_heads_are_heads_repeated(n_kv_heads):
    grouped, whole = (tiny(attention=GQA(4, n_kv_heads=n)) for n in (n_kv_heads, None))

    def repeat(leaf):
        heads = leaf.reshape(-1, n_kv_heads, 4).repeat(4 // n_kv_heads, 1)
        return heads.reshape(*leaf.shape[:-1], -1)

    paths = [f"attention/{name}/{leaf}" for name in "kv" for leaf in ("kernel", "bias")]
    params = worn(grouped)
    assert_same(grouped, params, whole, changed(params, **dict.fromkeys(paths, repeat)))


@pytest.mark.parametrize("ffn", [MLP(), GatedMLP(use_bias=True, limit=1.0)], ids=repr)
@pytest.mark.parametrize("kind", ["one", "equal", "shared"])
def test_experts_without_a_choice_are_dense(ffn, kind):
    """One expert; several that are equal; and the shared one where the others give nothing."""
    dense, params = tiny(ffn=ffn), worn(tiny(ffn=ffn))
    n = 1 if kind == "one" else 4
    moe = MoE(n, top_k=min(n, 2), expert=ffn, shared=ffn if kind == "shared" else None)
    router = {"kernel": np.random.default_rng(0).normal(size=(16, n)).astype(np.float32)}

    def experts(layer):
        stacked = {
            name: {leaf: np.stack([a] * n) for leaf, a in part.items()}
            for name, part in layer.items()
        }
        if kind == "shared":
            nothing = {leaf: 0 * a for leaf, a in stacked["down"].items()}
            return dict(router=router, shared=layer, experts=stacked | {"down": nothing})
        return dict(router=router, experts=stacked)

    assert_same(dense, params, tiny(ffn=moe), changed(params, ffn=experts))


def test_no_weight_on_sinks_is_no_sinks():
    plain, sinking = tiny(), tiny(attention=GQA(4, sinks=True))
    low = {"attention/sinks": lambda _: np.full(4, -1e9, np.float32)}
    params = worn(plain)
    assert_same(plain, params, sinking, changed(params, **low))
    with pytest.raises(AssertionError):
        high = {"attention/sinks": lambda _: np.zeros(4, np.float32)}
        assert_same(plain, params, sinking, changed(params, **high))


def test_a_window_of_one_leaves_the_values():
    """Each token sees itself: queries and keys do nothing."""
    cfg = tiny(attention=GQA(4, window=1), position=RoPE())
    params = worn(cfg)
    other = {f"attention/{name}/kernel": lambda a: -2 * a for name in "qk"}
    assert_same(cfg, params, cfg, changed(params, **other))


def test_scales_shared_by_heads_are_equal_scales_of_each():
    shared, each = (
        tiny(attention=GQA(4, n_kv_heads=2, qk_norm=RMSNorm(), qk_norm_of=of))
        for of in ("head", "each_head")
    )
    params = worn(shared)
    tile = {
        "attention/q_norm/scale": lambda a: np.stack([a] * 4),
        "attention/k_norm/scale": lambda a: np.stack([a] * 2),
    }
    assert_same(shared, params, each, changed(params, **tile))


def test_one_plus_the_scale_is_the_scale_less_one():
    plain, plus = (tiny(norm=RMSNorm(one_plus=on)) for on in (False, True))
    params = worn(plain)
    less = {f"{name}_norm/scale": lambda a: a - 1 for name in ("attention", "ffn")}
    assert_same(plain, params, plus, changed(params, **less))


def test_a_bias_of_zero_is_none():
    with_bias = tiny(norm=LayerNorm(), ffn=MLP(), attention=GQA(4))
    without = tiny(
        norm=LayerNorm(use_bias=False), ffn=MLP(use_bias=False), attention=GQA(4, use_bias=False)
    )
    params = worn(without)

    def zeros(width):
        return lambda _: np.zeros(width, np.float32)

    biases = {f"{name}_norm/bias": zeros(16) for name in ("attention", "ffn")}
    biases |= {f"attention/{name}/bias": zeros(16) for name in ("q", "k", "v", "out")}
    biases |= {"ffn/up/bias": zeros(64), "ffn/down/bias": zeros(16)}
    assert_same(without, params, with_bias, changed(params, **biases))


def test_a_tied_head_is_the_table_transposed():
    tied, untied = tiny(embed=Embed()), tiny(head=Untied())
    params = worn(tied)
    head = {"out": {"kernel": params["embed"]["embedding"].T}}
    assert_same(tied, params, untied, dict(params) | {"head": head})


def test_a_scaled_embedding_is_a_larger_table():
    plain, scaled = (tiny(head=Untied(), embed=Embed(scale=on)) for on in (False, True))
    params = worn(scaled)
    table = {"embedding": 4 * params["embed"]["embedding"]}
    assert_same(scaled, params, plain, dict(params) | {"embed": table})


@pytest.mark.parametrize("offset", [0, 2])
def test_an_offset_leaves_out_the_first_rows(offset):
    plain, moved = tiny(position=Learned()), tiny(position=Learned(offset=offset))
    params = worn(moved)
    rows = {"embedding": params["position"]["embedding"][offset:]}
    assert_same(moved, params, plain, dict(params) | {"position": rows})


def test_parallel_branches_are_serial_where_attention_writes_nothing():
    """With one norm of both branches and nothing from attention, the FFN sees what it did."""
    parallel, serial = tiny(block=Parallel()), tiny(block=PreNorm())
    params = worn(parallel)
    silent = {f"attention/out/{leaf}": lambda a: 0 * a for leaf in ("kernel", "bias")}
    assert_same(parallel, changed(params, **silent), serial, changed(params, **silent))


def test_identities_would_notice_a_difference():
    one, other = tiny(), dataclasses.replace(tiny(), attention=GQA(4, window=11))
    params = worn(one)
    with pytest.raises(AssertionError):
        assert_same(one, params, other, params)
