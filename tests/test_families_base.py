# SPDX-License-Identifier: Apache-2.0
import pytest

from jaxgpt.interop.families.base import edits_at, windows
from jaxgpt.model import LayerEdit, ModelConfig


@pytest.mark.parametrize(
    "layers, edits",
    [
        ([], []),
        ([1, 3, 5], [{"start": 1, "every": 2}]),
        ([0, 1], [{"stop": 2}]),
        ([5], [{"start": 5}]),
        ([1, 3], [{"start": 1, "every": 2, "stop": 4}]),
        ([0, 1, 4], [{"stop": 1}, {"start": 1, "stop": 2}, {"start": 4, "stop": 5}]),
    ],
)
def test_edits_reach_their_layers(layers, edits):
    change = {"set": {"attention.window": 3}}
    got = edits_at(layers, 6, **change)
    assert got == tuple(LayerEdit(**edit, **change) for edit in edits)
    cfg = ModelConfig(n_layers=6, edits=got)
    assert [i for i, layer in enumerate(cfg.layers) if layer.attention.window == 3] == layers


def test_windows_that_nobody_has_are_none():
    assert windows([False, False], 5) == windows([True, True], None) == (None, ())
    assert windows([True, True], 5) == (5, ())
