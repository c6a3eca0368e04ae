# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.head import Untied
from jaxgpt.flops import count_params
from jaxgpt.model import ModelConfig


@pytest.mark.parametrize(
    ("d_model", "n_layers", "n_heads", "total"),
    [
        (768, 12, 12, 124_439_808),
        (1024, 24, 16, 354_823_168),
        (1280, 36, 20, 774_030_080),
        (1600, 48, 25, 1_557_611_200),
    ],
)
def test_gpt2_sizes_are_exact(d_model, n_layers, n_heads, total):
    cfg = ModelConfig(d_model=d_model, n_layers=n_layers, attention=GQA(n_heads))
    assert sum(count_params(cfg).values()) == total


def test_by_box_and_without_padding():
    cfg = ModelConfig(vocab_size=65, d_model=8, n_layers=3, context_length=5, attention=GQA(2))
    counts = count_params(cfg)
    assert counts == {
        "embed": 65 * 8,
        "position": 5 * 8,
        "attention_norm": 3 * 16,
        "attention": 3 * 4 * (64 + 8),
        "ffn_norm": 3 * 16,
        "ffn": 3 * (2 * 8 * 32 + 32 + 8),
        "final_norm": 16,
    }
    untied = dataclasses.replace(cfg, head=Untied())
    assert count_params(untied)["head"] == 65 * 8
