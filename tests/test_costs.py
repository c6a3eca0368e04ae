# SPDX-License-Identifier: Apache-2.0
"""What is counted is what XLA compiles, and what the papers say of caches."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import AttentionBox
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.moe import MoE
from jaxgpt.costs import (
    BYTES,
    Cost,
    cache_numbers,
    cost_rules,
    decode_costs,
    kv_bytes_per_token,
    prefill_costs,
    total,
    train_costs,
)
from jaxgpt.flops import count_active_params, count_params, train_flops_per_token
from jaxgpt.losses import token_nats
from jaxgpt.model import LayerEdit, ModelConfig, forward, param_shapes

T = 32
WIDE = ModelConfig(  # wide enough that what is no product is below two percent
    vocab_size=512, d_model=1024, n_layers=1, context_length=T, attention=GQA(8), ffn=MLP(4096)
)
LATENT = MLA(8, kv_rank=128, nope_dim=64, rope_dim=32)
EDITS = (LayerEdit(stop=1, ffn=MLP(2048)), LayerEdit(start=1, attention=GQA(16, 4)))


def wide(**boxes):
    return dataclasses.replace(WIDE, **boxes)


MODELS = {
    "multi-head, tied": WIDE,
    "grouped, gated, untied": wide(attention=GQA(8, 2), ffn=GatedMLP(1536), head=Untied()),
    "multi-query, heads of another width": wide(attention=GQA(8, 1, head_dim=96)),
    "latent": wide(attention=LATENT),
    "latent queries": wide(attention=dataclasses.replace(LATENT, q_rank=256), head=Untied()),
    "mixed layers": wide(n_layers=3, ffn=GatedMLP(1024), edits=EDITS),
    "projected embedding": wide(embed=Embed(width=256)),
    # Slots, and as many as there are choices: shapes that XLA knows. See `test_grouped.py` for the
    # form that sorts, whose products are in loops.
    "experts": wide(ffn=MoE(2, top_k=2, expert=GatedMLP(2048), capacity_factor=1.0)),
    "shared expert": wide(ffn=MoE(4, 2, GatedMLP(2048), MLP(1024), capacity_factor=1.0)),
}


def ids(rows, tokens):
    return jax.ShapeDtypeStruct((rows, tokens), "int32")


def lowered(cfg, what):
    """The program of a pass over two rows; its sizes are all that there is of its arguments."""
    training_mode = {"dropout_key": jax.random.key(0)} if isinstance(cfg.ffn, MoE) else {}
    call = functools.partial(forward, cfg, kernel="reference", **training_mode)

    def loss(params, ids_BT):
        return token_nats(call(params, ids_BT).logits_BTV, ids_BT).sum()

    def read(params, ids_BT):
        return call(params, ids_BT, last_only=True).logits_BTV

    slots, tree = jax.tree.flatten(cfg.init_caches(2, T))

    def write(params, id_B1, *slots):
        caches = jax.tree.unflatten(tree, slots)
        out = call(params, id_B1, pos_BT=jnp.full((2, 1), T - 1), caches=caches, last_only=True)
        return out.logits_BTV

    params = param_shapes(cfg)
    if what == "decode":
        return jax.jit(write).lower(params, ids(2, 1), *slots)
    return jax.jit(jax.grad(loss) if what == "training" else read).lower(params, ids(2, T))


def flops(cfg, what):
    costs = {
        "training": lambda: train_costs(cfg, 2),
        "prefill": lambda: prefill_costs(cfg, 2, T, causal=False),
        "decode": lambda: decode_costs(cfg, 2, T),
    }
    return total(costs[what]()).flops


PASSES = [(name, what) for name in MODELS for what in ("training", "prefill", "decode")]
PASSES.remove(("shared expert", "decode"))  # one token fills a slot of every expert, chosen or not


@pytest.mark.parametrize(("name", "what"), PASSES)
def test_flops_are_those_that_xla_counts(name, what):
    cfg = MODELS[name]
    assert flops(cfg, what) == pytest.approx(lowered(cfg, what).cost_analysis()["flops"], rel=0.02)


@pytest.mark.parametrize("what", ["training", "decode"])
def test_compiling_changes_no_product(what):
    counted = lowered(WIDE, what).compile().cost_analysis()["flops"]
    assert flops(WIDE, what) == pytest.approx(counted, rel=0.02)


def test_a_window_is_counted_as_the_least_that_it_needs():
    """XLA counts all keys: the reference masks those outside. Only the scores cost less."""
    cfg = wide(attention=GQA(8, window=8))
    for what in ("training", "prefill", "decode"):
        seen = lowered(cfg, what).cost_analysis()["flops"]
        assert flops(WIDE, what) == pytest.approx(seen, rel=0.02)
    near, all_keys = (train_costs(one, 2) for one in (cfg, WIDE))
    assert near["scores"].flops == all_keys["scores"].flops * 8 / T
    assert {**near, "scores": None} == {**all_keys, "scores": None}
    assert decode_costs(cfg, 2, T)["scores"].flops == decode_costs(WIDE, 2, 8)["scores"].flops


def test_a_step_may_have_fewer_tokens_than_the_context():
    short = dataclasses.replace(WIDE, context_length=8)
    assert {**train_costs(WIDE, 2, 8), "optimizer": None, "position": None} == {
        **train_costs(short, 2),
        "optimizer": None,
        "position": None,
    }
    assert train_costs(WIDE, 2) == train_costs(WIDE, 2, T)


def test_rules_beside_what_is_counted():
    cfg = ModelConfig()
    train, prefill, decode, cache = cost_rules(cfg, 3, 1024)
    n = sum(count_params(cfg).values())
    assert (train.value, prefill.value, decode.value) == (6 * n * 3072, 2 * n * 3072, 2 * n * 3)
    assert train.exact == total(train_costs(cfg, 3, causal=True)).flops
    assert prefill.exact == total(prefill_costs(cfg, 3, 1024)).flops
    assert decode.exact == total(decode_costs(cfg, 3, 1024)).flops
    assert cache.value == cache.exact == 2 * 12 * 768 * 2 and cache.percent == 0
    # 6 N D: tables of positions and norms are no products, the scores are.
    assert [round(rule.percent, 1) for rule in (train, prefill, decode)] == [-6.4, 31.8, -12.6]
    grouped = dataclasses.replace(cfg, attention=GQA(12, 3))
    assert cost_rules(grouped, 1, 1024, dtype="float32")[3].percent == pytest.approx(300)
    experts = dataclasses.replace(cfg, ffn=MoE(8, 2, GatedMLP(64)))
    assert cost_rules(experts, 1, 9)[0].value == 6 * 9 * count_active_params(experts)


@dataclasses.dataclass(frozen=True)
class Nothing(AttentionBox):
    """Attention of another class, without a parameter or a cache."""

    def build(self, dims, name=None):
        return _Nothing(name=name)


class _Nothing(nn.Module):
    def __call__(self, x_BTD, visibility, cache=None, dropout_key=None):
        return x_BTD, cache


def test_attention_of_other_classes_has_no_rule_for_its_cache():
    rules = cost_rules(wide(attention=Nothing()), 1, 9)
    assert [rule.formula for rule in rules] == ["6 N D", "2 N T", "2 N"]


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
        cfg = wide(d_model=512, attention=box, n_layers=3)
        assert {cache_numbers(cfg, layer) for layer in cfg.layers} == {numbers}
        caches = cfg.init_caches(1, 1, "bfloat16")
        floats = [leaf for leaf in jax.tree.leaves(caches) if leaf.dtype == "bfloat16"]
        assert kv_bytes_per_token(cfg) == 2 * sum(leaf.size for leaf in floats) == 6 * numbers
    cfg = wide(d_model=512, n_layers=3, edits=edits)
    read = decode_costs(cfg, 1, 20, dtype="bfloat16")["scores"].cache_bytes
    assert read == 2 * 1024 * (20 + 8 + 20 + 3)


def test_experts_are_read_as_rows_choose_them():
    moe = wide(d_model=512, ffn=MoE(8, top_k=2, expert=GatedMLP(64)))
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
