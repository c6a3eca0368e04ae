# SPDX-License-Identifier: Apache-2.0
import dataclasses
import itertools
import random

import pytest

from jaxgpt.boxes.base import Box, NormBox
from jaxgpt.boxes.norm import NoNorm, RMSNorm
from jaxgpt.configlib import kind_of, our_boxes
from jaxgpt.errors import ConfigError
from jaxgpt.model import LayerEdit, ModelConfig
from jaxgpt.testing.levels import EDITS, EXCLUDED, LEVELS
from jaxgpt.testing.pairs import Pairs, build, settings
from jaxgpt.train.optimizers import OptimBox

OURS = {name: box for name, box in our_boxes().items() if not issubclass(box, OptimBox)}
BOXES = tuple(OURS.values())
KNOWN = settings(BOXES, LEVELS)


def text(row):
    return {str(setting) for setting in row}


def test_every_box_and_knob_has_settings():
    found = {setting.field for setting in KNOWN}
    assert set(ModelConfig.__dataclass_fields__) <= found
    for name, box in OURS.items():
        for field in dataclasses.fields(box):
            assert any(f.endswith(f"({name}).{field.name}") for f in found), f"{name}.{field.name}"
        assert any(setting.value is box for setting in KNOWN), name
    edited = {
        f.name
        for e in itertools.chain(*EDITS)
        for f in dataclasses.fields(e)
        if getattr(e, f.name) != f.default
    }
    assert edited == {f.name for f in dataclasses.fields(LayerEdit)}


def test_a_new_knob_without_levels_is_named():
    @dataclasses.dataclass(frozen=True)
    class PowerNorm(NormBox):
        one_plus: bool = False
        power: float = 2.0

    with pytest.raises(LookupError, match=r"no levels for PowerNorm\.power"):
        settings([*BOXES, PowerNorm], LEVELS)
    more = settings([*BOXES, PowerNorm], LEVELS | {"PowerNorm.power": (2.0, 3.0)})
    assert {"norm=PowerNorm", "attention(GQA).qk_norm(PowerNorm).power=3.0"} <= text(more)


def test_levels_are_of_knobs_that_there_are():
    classes = our_boxes() | {"ModelConfig": ModelConfig}
    for name in LEVELS:
        owner, *inner, knob = name.split(".")
        fields = ModelConfig.__dataclass_fields__ if owner == "ModelConfig" else {}
        owners = [classes[owner]]
        for field in inner:
            kind = kind_of(owners[0].__dataclass_fields__[field].type)
            owners = [box for box in BOXES if issubclass(box, kind)]
        assert any(knob in box.__dataclass_fields__ for box in owners), name
        assert fields or issubclass(classes[owner], Box)


@pytest.fixture(scope="module")
def rows():
    return Pairs(KNOWN, EXCLUDED).rows()


def test_all_valid_pairs_are_covered(rows):
    def meets(a, b):
        """Whether one model may have both, from what each needs."""
        chosen = {}
        for setting in (*a.chain, *b.chain):
            if chosen.setdefault(setting.field, setting) != setting:
                return False
        names = text(chosen.values())
        return not any(x in names and y in names for x, y in EXCLUDED)

    covered = {pair for row in rows for pair in itertools.combinations(sorted(text(row)), 2)}
    valid = [
        tuple(sorted((str(a), str(b)))) for a, b in itertools.combinations(KNOWN, 2) if meets(a, b)
    ]
    assert len(valid) > 20_000 and not [pair for pair in valid if pair not in covered]
    assert len(rows) < 200  # twelve minutes on two cores


def test_rows_are_models_and_always_the_same(rows):
    assert len({build(row) for row in rows}) == len(rows)
    known = [s for s in KNOWN if s.field.split("(")[0] in ("norm", "attention", "embed")]
    first, again, other = (Pairs(known).rows(seed) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("pair", EXCLUDED, ids=" and ".join)
def test_an_excluded_pair_is_refused_in_any_model(pair):
    pairs = Pairs(KNOWN, [other for other in EXCLUDED if other != pair])
    for seed in range(20):
        with pytest.raises(ConfigError, match=EXCLUDED[pair]):
            build(pairs.row(*pair, random.Random(seed)))


def test_an_unknown_conflict_is_named():
    known = [s for s in KNOWN if s.field.startswith(("position", "attention"))]
    with pytest.raises(ConfigError, match=r"no model has both .*; fix: add it to EXCLUDED"):
        Pairs(known).rows()


def test_a_knob_is_there_only_with_its_box():
    known = [s for s in KNOWN if s.field.startswith("norm")]
    rows = Pairs(known).rows()
    assert {build(row).norm for row in rows} >= {NoNorm(), RMSNorm(one_plus=True)}
    for row in rows:
        assert len({s.box for s in row} - {None}) == (0 if "norm=NoNorm" in text(row) else 1)
