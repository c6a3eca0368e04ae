# SPDX-License-Identifier: Apache-2.0
import dataclasses

import jax
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import Sandwich
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.moe import MoE
from jaxgpt.errors import ConfigError
from jaxgpt.flops import count_active_params, count_params, unpadded
from jaxgpt.model import LayerEdit, ModelConfig, param_shapes

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
