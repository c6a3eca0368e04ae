# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.init import Normal
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.position import NoPosition
from jaxgpt.boxes.rope import RoPE
from jaxgpt.interop.same import differences, distance, resolved
from jaxgpt.model import LayerEdit
from jaxgpt.testing import tiny

MIXED = tiny(position=RoPE(), ffn=MoE(expert=GatedMLP(8)))


def differ(one, other):
    return differences(resolved(one), resolved(other))


@pytest.mark.parametrize(
    "one, other",
    [
        (GQA(4), GQA(4, 4, 4, use_out_bias=True, scale=0.5)),
        (GQA(4, use_out_bias=None), GQA(4, qk_norm_of="all")),  # of no norm
        (MLA(4, rope_dim=2, nope_dim=2), MLA(4, rope_dim=2, nope_dim=2, scale=0.5)),
        (MLP(), MLP(d_ff=64)),
        (GatedMLP(), GatedMLP(d_ff=64)),
        (MoE(), MoE(balance_coef=0.1, z_coef=0.1, capacity_factor=1.0, top_groups=1)),
        (MoE(balance_rate=0.1), MoE(balance_rate=0.001)),
        (MoE(expert=GatedMLP()), MoE(expert=GatedMLP(64))),
    ],
)
def test_what_is_said_or_left_open_is_the_same(one, other):
    name = "attention" if isinstance(one, GQA | MLA) else "ffn"
    assert (
        differ(tiny(position=RoPE(), **{name: one}), tiny(position=RoPE(), **{name: other})) == []
    )


def test_what_only_training_reads_does_not_count():
    cfg = tiny()
    other = dataclasses.replace(cfg, dropout=0.5, init=Normal(), vocab_multiple=1)
    assert cfg != other and differ(cfg, other) == []
    assert differ(cfg, dataclasses.replace(cfg, embed=Embed(width=16))) == []


def test_edits_count_by_the_layers_that_they_make():
    window = {"attention.window": 4}
    cfg = tiny(
        attention=GQA(4, window=4), edits=(LayerEdit(start=1, set={"attention.window": None}),)
    )
    assert differ(cfg, tiny(edits=(LayerEdit(stop=1, set=window),))) == []
    roped = (LayerEdit(position=RoPE()),)
    assert differ(tiny(position=NoPosition(), edits=roped), tiny(position=RoPE())) == []


def test_differences_are_named_once_with_both_values():
    cfg = tiny(position=RoPE(), n_layers=3)
    one = differ(cfg, dataclasses.replace(cfg, attention=GQA(4, 2), head=Untied()))
    assert one == ["attention.n_kv_heads is 4, there 2", "head is Tied, there Untied"]
    window = {"attention.window": 4}
    edited = dataclasses.replace(cfg, edits=(LayerEdit(start=1, set=window),))
    assert differ(cfg, edited) == ["attention.window is None, there 4 in layer 1 and 1 more"]
    norm = dataclasses.replace(cfg, attention=GQA(4, qk_norm=RMSNorm()))
    [text] = differ(cfg, norm)
    assert text == "attention.qk_norm is None, there RMSNorm(eps=1e-05, one_plus=False)"
    learned = tiny(n_layers=3)
    assert differ(cfg, learned) == ["position is RoPE, there Learned"]


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 30},
        {"context_length": 8},
        {"ffn": MoE(expert=GatedMLP(8), balance_rate=0.1)},
        {"ffn": MoE(expert=GatedMLP(8), normalize=False)},
        {"position": RoPE(theta=5e5)},
        {"embed": Embed(scale=True)},
    ],
)
def test_what_changes_the_model_counts(change):
    assert differ(MIXED, dataclasses.replace(MIXED, **change))


def test_a_box_of_another_class_is_further_away_than_one_knob():
    cfg = tiny()
    knob = dataclasses.replace(cfg, ffn=MLP(activation="relu"))
    other = dataclasses.replace(cfg, ffn=GatedMLP())
    near, far = (distance(resolved(cfg), resolved(each)) for each in (knob, other))
    assert 0 == distance(resolved(cfg), resolved(cfg)) < near < far
