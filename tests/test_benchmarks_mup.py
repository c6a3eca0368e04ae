# SPDX-License-Identifier: Apache-2.0
"""The muP benchmark whole, at widths where a step takes a millisecond."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
TEXT = "the quick brown fox jumps over the lazy dog\n" * 30
SMALL = ("--widths", "16", "32", "--layers=1", "--context=16", "--batch=4", "--check-seeds=2")
FAST = {"xla_backend_optimization_level": 0}


@pytest.fixture
def mup(tmp_path, monkeypatch):
    """The benchmark as its folder sees it; a text in the current folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("mup")
    monkeypatch.setattr(module, "COMPILER_OPTIONS", FAST)
    monkeypatch.setattr(importlib.import_module("harness"), "tune_cpu", lambda: True)
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    yield module
    for name in ("mup", "mup_figures", "harness", "drawing"):
        sys.modules.pop(name, None)


def run(mup, *words):
    mup.main(["--text=text.txt", "--out=mup.json", *SMALL, *words])
    return json.loads(Path("mup.json").read_text())


def test_coordinates_grow_without_mup_and_runs_are_kept(mup):
    first = run(mup, "--steps=4", "--log2-rates", "-8", "-7", "--transfer=t.png")
    assert first["coordinates"] is None and Path("t.png").read_bytes().startswith(b"\x89PNG")
    keys = [(one["width"], one["mup"], one["log2_rate"]) for one in first["runs"]]
    assert keys == [(w, m, r) for w, m in ((16, False), (32, False), (32, True)) for r in (-8, -7)]
    assert all(len(one["losses"]) == 4 for one in first["runs"])
    wide = {one["mup"]: one["losses"] for one in first["runs"] if one["width"] == 32}
    assert wide[False][-1] < wide[True][-1], "at one rate wide models move further without it"

    record = run(mup, "--steps=4", "--log2-rates", "-7", "--coordinates=c.png", "--transfer=t.png")
    assert record["runs"] == first["runs"], "none of them again"
    assert Path("c.png").read_bytes().startswith(b"\x89PNG")
    rows = record["coordinates"]["rows"]
    slopes, figures = {}, importlib.import_module("mup_figures")
    for muped in (False, True):
        changes = [figures.mean_change(rows, width, muped, 16)[:, -1] for width in (16, 32)]
        slopes[muped] = [figures.slope((16, 32), pair) for pair in zip(*changes, strict=True)]
    for site, standard, with_mup in zip(mup.SITES, slopes[False], slopes[True], strict=True):
        if site != "embed/out":
            assert standard > with_mup + 0.4, site
    assert abs(slopes[False][0] - slopes[True][0]) < 0.1, "the embedding has no width to sum over"

    with pytest.raises(SystemExit, match=r"mup\.json is of another setting"):
        run(mup, "--steps=5", "--transfer=t.png")


def test_losses_become_a_table_by_width(mup):
    def one(width, muped, rate, *losses, seed=0):
        key = {"width": width, "mup": muped, "log2_rate": rate, "seed": seed}
        return key | {"losses": list(losses)}

    runs = [one(8, False, -2, 3.0, 2.0), one(8, False, -2, 3.0, 1.0, seed=1)]
    table = mup.transfer_table(runs, 2, 8)
    assert table[False, 8] == table[True, 8] == {-2: 1.5}
    runs += [one(16, True, -1, 3.0, 1.5), one(16, True, -2, 3.0, float("nan"))]
    runs += [one(16, True, -3, 3.0), one(16, True, -1, 3.0, 9.0, seed=1)]
    table = mup.transfer_table(runs, 2, 8)
    assert table[True, 8] == {-2: 2.0}, "of the seed that all have"
    assert table[True, 16] == {-3: np.inf, -2: np.inf, -1: 1.5}
    assert list(table[True, 16]) == [-3, -2, -1]


def test_the_best_rate_lies_between_those_that_were_run(mup):
    assert mup.best({-3: 2.25, -2: 1.25, -1: 1.25}) == pytest.approx(-1.5)
    assert mup.best({-4: 4.25, -3: 1.25, -2: 0.25, -1: 1.25}) == pytest.approx(-2)
    assert mup.best({-3: 1.25, -2: 0.25, -1: 0.75}) == pytest.approx(-1.83, abs=0.01)
    assert mup.best({-3: 1.25, -2: 0.25, -1: np.inf}) == -2, "no parabola without a neighbour"


def test_the_ids_are_characters_of_the_beginning(mup):
    ids_T, vocab = mup.read(Path("text.txt"), 100)
    assert vocab == len(set(TEXT[:100])) and len(ids_T) == 90
    assert ids_T.tolist() == [sorted(set(TEXT[:100])).index(c) for c in TEXT[:90]]
