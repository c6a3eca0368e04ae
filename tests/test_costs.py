# SPDX-License-Identifier: Apache-2.0
"""What is counted is what XLA compiles, and what the papers say of caches."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.moe import MoE
from jaxgpt.costs import (
    BYTES,
    Cost,
    cache_numbers,
    decode_costs,
    kv_bytes_per_token,
    prefill_costs,
    total,
    train_costs,
)
from jaxgpt.flops import count_params, train_flops_per_token
from jaxgpt.losses import token_nats
from jaxgpt.model import LayerEdit, ModelConfig, forward, param_shapes

T = 64
WIDE = ModelConfig(  # wide enough that what is no product is below two percent
    vocab_size=512, d_model=512, n_layers=1, context_length=T, attention=GQA(8), ffn=MLP(2048)
)
MODELS = {
    "multi-head": WIDE,
    "grouped": dataclasses.replace(
        WIDE, attention=GQA(8, 2), ffn=GatedMLP(1024), head=Untied(), n_layers=2
    ),
    "latent": dataclasses.replace(WIDE, attention=MLA(8, kv_rank=128, nope_dim=64, rope_dim=32)),
}


def xla_flops(function, *shapes):
    return jax.jit(function).lower(*shapes).compile().cost_analysis()["flops"]


def ids(rows, tokens):
    return jax.ShapeDtypeStruct((rows, tokens), "int32")


@pytest.mark.parametrize("name", MODELS)
def test_flops_of_a_step_are_those_that_xla_counts(name):
    cfg = MODELS[name]

    def loss(params, ids_BT):
        out = forward(cfg, params, ids_BT, kernel="reference")
        return token_nats(out.logits_BTV, ids_BT).sum()

    counted = xla_flops(jax.grad(loss), param_shapes(cfg), ids(2, T))
    assert total(train_costs(cfg, 2)).flops == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize("name", MODELS)
def test_flops_of_inference_are_those_that_xla_counts(name):
    cfg = dataclasses.replace(MODELS[name], d_model=1024)  # a step writes all slots: not products

    def read(params, ids_BT):
        return forward(cfg, params, ids_BT, kernel="reference", last_only=True).logits_BTV

    slots, tree = jax.tree.flatten(cfg.init_caches(2, T))

    def decode(params, slots, id_B1):
        caches = jax.tree.unflatten(tree, slots)
        pos_B1 = jnp.full((2, 1), T - 1)
        return forward(cfg, params, id_B1, pos_BT=pos_B1, caches=caches, last_only=True).logits_BTV

    counted = xla_flops(read, param_shapes(cfg), ids(2, T))
    assert total(prefill_costs(cfg, 2, T, causal=False)).flops == pytest.approx(counted, rel=0.02)
    counted = xla_flops(decode, param_shapes(cfg), slots, ids(2, 1))
    assert total(decode_costs(cfg, 2, T)).flops == pytest.approx(counted, rel=0.02)


def test_training_is_six_n_d_and_decoding_two_n():
    cfg = ModelConfig()
    costs = train_costs(cfg, 3, causal=True)
    per_token = train_flops_per_token(cfg, causal=True)
    assert total(costs).flops == pytest.approx(3 * 1024 * per_token)
    n = 12 * 12 * 768**2 + 50_257 * 768
    decode = decode_costs(cfg, 5, 100)
    assert total(decode).flops - decode["scores"].flops == 5 * 2 * n
    assert decode["scores"].flops == 5 * 2 * 12 * 100 * 2 * 768
    assert sum(one.flops for one in prefill_costs(cfg, 1, 7).values()) == pytest.approx(
        7 * 2 * (n - 50_257 * 768) + 2 * 50_257 * 768 + 7 * 2 * 12 * 4 * 2 * 768
    )


def test_the_boxes_and_what_moves():
    cfg = ModelConfig()
    sizes = count_params(cfg)
    costs = decode_costs(cfg, 2, 100, dtype="bfloat16", weights="int8")
    assert set(costs) == {*sizes, "head", "scores"}
    for box in ("attention", "ffn", "final_norm"):
        assert costs[box].weight_bytes == sizes[box]
    assert costs["head"].weight_bytes == sizes["embed"]  # tied
    assert costs["embed"].weight_bytes == 2 * 768
    assert costs["scores"].cache_bytes == 2 * 2 * (100 + 1) * 12 * 2 * 768
    untied = decode_costs(dataclasses.replace(cfg, head=Untied()), 2, 100, dtype="bfloat16")
    assert untied["head"].weight_bytes == 2 * sizes["embed"]
    assert untied["embed"].weight_bytes == 2 * 2 * 768
    # The batch reads the weights once.
    one, many = (total(decode_costs(cfg, rows, 100)) for rows in (1, 64))
    assert many.weight_bytes == pytest.approx(one.weight_bytes, rel=0.01)
    assert many.flops == 64 * one.flops and many.intensity > 10 * one.intensity
    step = train_costs(cfg, 1, dtype="bfloat16")
    assert step["ffn"].weight_bytes == 2 * 2 * sizes["ffn"]
    assert step["optimizer"] == Cost(weight_bytes=4.0 * 8 * sum(sizes.values()))


def test_caches_are_those_that_the_boxes_make():
    edits = (LayerEdit(start=1, stop=2, set={"attention.window": 8}),)
    boxes = {
        2 * 512: GQA(8),
        2 * 2 * 64: GQA(8, 2),
        2 * 64: GQA(8, 1),
        128 + 32: MLA(8, kv_rank=128, nope_dim=64, rope_dim=32),
    }
    for numbers, box in boxes.items():
        cfg = dataclasses.replace(WIDE, attention=box, n_layers=3)
        assert {cache_numbers(cfg, layer) for layer in cfg.layers} == {numbers}
        caches = cfg.init_caches(1, 1, "bfloat16")
        floats = [leaf for leaf in jax.tree.leaves(caches) if leaf.dtype == "bfloat16"]
        assert kv_bytes_per_token(cfg) == 2 * sum(leaf.size for leaf in floats) == 6 * numbers
    cfg = dataclasses.replace(WIDE, n_layers=3, edits=edits)
    read = decode_costs(cfg, 1, 20, dtype="bfloat16")["scores"].cache_bytes
    assert read == 2 * 1024 * (20 + 8 + 20 + 3)


def test_experts_are_read_as_rows_choose_them():
    moe = dataclasses.replace(WIDE, ffn=MoE(8, top_k=2, expert=GatedMLP(64)))
    experts = 8 * 3 * 512 * 64
    router = 512 * 8
    read = [decode_costs(moe, rows, 9)["ffn"].weight_bytes / 4 for rows in (1, 2, 1000)]
    assert read == pytest.approx(
        [router + experts / 4, router + experts * (1 - 0.75**2), router + experts]
    )
    assert decode_costs(moe, 1, 9)["ffn"].flops == 2 * (router + experts / 4)


def test_the_slower_limit_counts():
    cost = Cost(flops=100.0, weight_bytes=10.0, cache_bytes=20.0, other_bytes=20.0)
    assert (cost.bytes, cost.intensity) == (50.0, 2.0)
    assert cost.seconds(10.0, 100.0) == 10.0 and cost.seconds(1000.0, 5.0) == 10.0
    assert (cost + cost).bytes == 100.0 and Cost().intensity == 0.0
    assert BYTES["int4"] == BYTES["int8"] / 2
