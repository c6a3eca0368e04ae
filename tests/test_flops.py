# SPDX-License-Identifier: Apache-2.0
import dataclasses

import counting
import jax
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import Sandwich
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.rope import RoPE
from jaxgpt.cli.help import summary
from jaxgpt.errors import ConfigError
from jaxgpt.flops import (
    count_active_params,
    count_layers,
    count_params,
    param_rules,
    train_flops_per_token,
    unpadded,
)
from jaxgpt.model import LayerEdit, ModelConfig, forward, param_shapes
from jaxgpt.presets import MODELS

SMALL = ModelConfig(vocab_size=65, d_model=8, n_layers=3, context_length=5, attention=GQA(2))


def total(cfg):
    return sum(count_params(cfg).values())


def test_by_box_and_without_padding():
    counts = count_params(SMALL)
    assert counts == {
        "embed": 65 * 8,
        "position": 5 * 8,
        "attention_norm": 3 * 16,
        "attention": 3 * 4 * (64 + 8),
        "ffn_norm": 3 * 16,
        "ffn": 3 * (2 * 8 * 32 + 32 + 8),
        "final_norm": 16,
    }
    untied = dataclasses.replace(SMALL, head=Untied())
    assert count_params(untied)["head"] == 65 * 8
    assert list(count_params(dataclasses.replace(SMALL, block=Sandwich())))[2:7] == [
        "attention_norm",
        "attention",
        "attention_out_norm",
        "ffn_norm",
        "ffn",
    ]
    with pytest.raises(ConfigError, match="vocab_size is None"):
        count_params(dataclasses.replace(SMALL, vocab_size=None))


def test_mixed_stacks_are_counted_like_whole_models():
    edits = (
        LayerEdit(every=2, start=1, set={"attention.window": 3}),
        LayerEdit(start=2, stop=4, ffn=GatedMLP(d_ff=20)),
        LayerEdit(start=4, attention=GQA(4, 1)),
    )
    cfg = dataclasses.replace(SMALL, n_layers=6, edits=edits)
    sizes = [leaf.size for leaf in jax.tree.leaves(param_shapes(unpadded(cfg)))]
    assert total(cfg) == sum(sizes)


@pytest.mark.parametrize("name", MODELS)
def test_closed_forms_give_the_number_of_every_preset(name):
    """As `test_presets.py` has it from the modules and from the public checkpoints."""
    cfg = MODELS[name]()
    assert f" {counting.n_params(unpadded(cfg)):,} parameters" in summary(MODELS[name])


def test_kinds_of_layers():
    edits = (
        LayerEdit(every=2, start=1, set={"attention.window": 3}),
        LayerEdit(start=5, ffn=MoE(4, 1, GatedMLP(12))),
    )
    cfg = dataclasses.replace(SMALL, n_layers=6, edits=edits)
    kinds = count_layers(cfg)
    assert [(kind.n_layers, kind.layer) for kind in kinds] == [
        (3, cfg.layers[0]),
        (2, cfg.layers[1]),
        (1, cfg.layers[5]),
    ]
    counts = count_params(cfg)
    around = sum(counts[box] for box in ("embed", "position", "final_norm"))
    assert around + sum(kind.n_layers * kind.n_params for kind in kinds) == total(cfg)
    assert around + sum(kind.n_layers * kind.n_active for kind in kinds) == count_active_params(cfg)
    assert [kind.n_params - kind.n_active for kind in kinds] == [0, 0, 3 * 3 * 8 * 12]


def test_rules_for_parameters():
    """Exact where they are made for; else they tell what a model has besides."""
    plain = dict(norm=RMSNorm(), final_norm=RMSNorm(), position=RoPE(), ffn=MLP(use_bias=False))
    cfg = dataclasses.replace(SMALL, attention=GQA(2, use_bias=False), **plain)
    matrices, layers, table, whole = param_rules(cfg)
    assert matrices.value == 3 * 12 * 64 and matrices.exact == 3 * (12 * 64 + 2 * 8)
    assert [rule.percent for rule in (layers, table, whole)] == [0, 0, 0]
    assert whole.exact == total(cfg)
    # Biases, a second vector in each norm, positions.
    matrices, layers, table, whole = param_rules(SMALL)
    assert layers.exact - layers.value == 3 * 11 * 8 and table.percent == 0
    assert whole.exact - whole.value == 3 * 11 * 8 + 8 + 5 * 8 and whole.percent < 0
    untied = param_rules(dataclasses.replace(SMALL, head=Untied()))[2]
    assert (untied.value, untied.exact, untied.percent) == (520, 1040, -50)


def test_the_base_boxes_may_be_edited_away():
    whole = LayerEdit(attention=GQA(2))  # 3 heads would not divide d_model
    cfg = dataclasses.replace(SMALL, attention=GQA(3), edits=(whole,))
    assert count_params(cfg) == count_params(SMALL)


@pytest.mark.parametrize("expert", [GatedMLP(12), MLP(12)])
def test_active_parameters_are_those_of_the_chosen_experts(expert):
    moe = MoE(n_experts=4, top_k=1, expert=expert, shared=MLP(6))
    cfg = dataclasses.replace(SMALL, ffn=moe, edits=(LayerEdit(stop=1, ffn=MLP(16)),))
    one = count_params(dataclasses.replace(SMALL, n_layers=1, ffn=expert))["ffn"]
    assert total(cfg) - count_active_params(cfg) == 2 * 3 * one  # layers, experts not chosen
    assert count_active_params(SMALL) == total(SMALL)


def test_flops_of_gpt2_in_both_conventions():
    """PaLM's appendix B: 6 N + 12 L H Q T, N without what is looked up, added or scaled by."""
    cfg = ModelConfig()
    n = 12 * 12 * 768**2 + 50_257 * 768
    assert train_flops_per_token(cfg, causal=False) == 6 * n + 12 * 12 * 768 * 1024
    assert train_flops_per_token(cfg, causal=True) == 6 * n + 12 * 12 * 768 * 1025 / 2


def attention_flops(**boxes):
    """Beside the kernels: full, causal."""
    cfg = dataclasses.replace(SMALL, **boxes)
    both = [train_flops_per_token(cfg, causal=causal) for causal in (False, True)]
    one = dataclasses.replace(cfg, context_length=1)
    per_key = train_flops_per_token(one, causal=False)  # one key: 6 N (H + P) beside the kernels
    return [flops - per_key for flops in both]


def test_flops_follow_windows_widths_and_experts():
    """SMALL has T 5, L 3, D 8: two heads of 4."""
    assert attention_flops() == [3 * 6 * 2 * 8 * (keys - 1) for keys in (5, 3)]
    # A window of 2 over 5 tokens: 1 + 2 + 2 + 2 + 2 keys.
    window = attention_flops(attention=GQA(2, window=2))
    assert window == pytest.approx([3 * 6 * 2 * 8 * (keys - 1) for keys in (2, 9 / 5)])
    latent = attention_flops(attention=MLA(3, kv_rank=6, nope_dim=5, rope_dim=4, v_dim=2))
    assert latent == [3 * 6 * 3 * 11 * (keys - 1) for keys in (5, 3)]

    def kernels(**boxes):
        cfg = dataclasses.replace(SMALL, **boxes)
        keys = 3 * 6 * 2 * 8 * 5
        return (train_flops_per_token(cfg, causal=False) - keys) / 6

    rest = 3 * 4 * 64 + 65 * 8
    assert kernels(ffn=MLP(6)) == kernels(ffn=MLP(6), head=Untied()) == 3 * 2 * 8 * 6 + rest
    moe = MoE(n_experts=4, top_k=2, expert=GatedMLP(12), shared=MLP(6))
    assert kernels(ffn=moe) == 3 * (2 * 3 * 8 * 12 + 4 * 8 + 2 * 8 * 6) + rest
    narrow = kernels(ffn=MLP(6), embed=Embed(width=4))
    assert narrow == 3 * 2 * 8 * 6 + 3 * 4 * 64 + 65 * 4 + 2 * 8 * 4


@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_those_that_xla_counts(causal):
    """The kernels and the full products of a forward pass are a third, up to what is no product."""
    cfg = ModelConfig(
        vocab_size=256, d_model=128, n_layers=2, context_length=64, attention=GQA(4), ffn=MLP(512)
    )
    ids = jax.ShapeDtypeStruct((1, 64), "int32")
    run = jax.jit(lambda params, ids: forward(cfg, params, ids).logits_BTV)
    counted = run.lower(param_shapes(cfg), ids).compile().cost_analysis()["flops"]
    ratio = counted / (train_flops_per_token(cfg, causal=causal) / 3 * 64)
    assert 1.0 <= ratio < (1.2 if causal else 1.05)
