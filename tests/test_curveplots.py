# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from test_plots import assert_apart, figures, pixels  # noqa: F401 - a fixture

from jaxgpt.errors import ConfigError
from jaxgpt.study.curveplots import draw_lanes, plot_final, plot_lanes, plot_reference, swept
from jaxgpt.study.curves import Band, Reference
from jaxgpt.study.lanes import LaneNotes, LaneRun

RATES = (1e-3, 2e-3, 4e-3)


def records(offset):
    for step in range(10, 401, 10):
        yield {"step": step, "loss_nats": 1.5 + offset + 2 * math.exp(-step / 100), "lr": 1e-3}
        if step % 200 == 0:
            yield {"step": step, "val_nats_per_token": 1.6 + offset}


def seeds(n, rate=None, diverged=None):
    more = {} if rate is None else {"optim.lr": rate}
    shift = 0 if rate is None else abs(math.log(rate / 2e-3)) / 10
    name = "" if rate is None else f"lr{rate:g}-"
    return [
        LaneRun(
            f"{name}seed{i}", {**more, "train.seed": i}, list(records(shift + 0.01 * i)), diverged
        )
        for i in range(n)
    ]


def texts(axes):
    legend = axes.get_legend()
    found = [axes.title, axes.xaxis.label, axes.yaxis.label, *legend.get_texts()]
    return [*found, legend.get_title()]


def test_the_mean_of_seeds_and_its_interval(tmp_path, figures):  # noqa: F811
    plot_lanes(seeds(3), tmp_path / "lanes.png", name="my_$lanes$")
    assert pixels(tmp_path / "lanes.png") == (600, 800)
    (axes,) = figures[0].axes
    assert axes.get_title() == "my_$lanes$: mean of 3 seeds and its 95% interval"
    said = [text.get_text() for text in axes.get_legend().get_texts()]
    assert said == ["training, mean of 5 records", "validation: 1.6100"]
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    half = 4.302652729749464 * 0.01 / 3**0.5  # Student's t of two degrees of freedom
    end = 1.51 + 2 * np.mean([math.exp(-step / 100) for step in (360, 370, 380, 390, 400)])
    assert np.isclose(band, end - half).any() and np.isclose(band, end + half).any()
    assert_apart(texts(axes))


def test_kinds_of_lanes_and_those_that_diverged(tmp_path, figures):  # noqa: F811
    lanes = [lane for rate in RATES for lane in seeds(3, rate, 50 if rate == 4e-3 else None)]
    lanes += seeds(2, 4e-3)
    plot_lanes(lanes, tmp_path / "lanes.png", name="rates")
    (axes,) = figures[0].axes
    said = [text.get_text() for text in axes.get_legend().get_texts()]
    assert said == ["lr=0.001: 1.6793", "lr=0.002: 1.6100", "lr=0.004: 1.6743, 3 diverged"]
    assert_apart(texts(axes))
    plot_final(lanes, "optim.lr", tmp_path / "final.png", name="rates")
    (axes,) = figures[1].axes
    assert axes.get_xlabel() == "learning rate"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.001", "0.002", "0.004"]
    said = [text.get_text() for text in axes.get_legend().get_texts()]
    assert said == ["a lane", "with a lane that diverged", "mean and its 95% interval"]
    assert_apart([*texts(axes), *axes.get_xticklabels()])


def test_a_folder_of_lanes(tmp_path):
    notes = LaneNotes({f"lr{rate:g}": {"optim.lr": rate} for rate in RATES})
    notes.write(tmp_path)
    with pytest.raises(ConfigError, match="no loss to draw yet"):
        draw_lanes(tmp_path)
    for name in notes.lanes:
        (tmp_path / name).mkdir()
        line = '{"step": 1, "loss_nats": 1.0}\n{"step": 1, "val_nats_per_token": 2.0}\n'
        (tmp_path / name / "metrics.jsonl").write_text(line)
    assert draw_lanes(tmp_path) == f"{tmp_path / 'lanes.png'}, {tmp_path / 'final.png'}"
    assert swept(seeds(2)) is None and swept(seeds(1, 1e-3)) == "optim.lr"
    assert swept([LaneRun("a", {"model.init.residual": "zero"}, [])]) is None
    with pytest.raises(ConfigError, match="no lanes there"):
        draw_lanes(tmp_path / "lr0.001")


def test_a_run_on_a_curve(tmp_path, figures):  # noqa: F811
    steps = list(range(10, 401, 10))
    mean = [1.5 + 2 * math.exp(-step / 100) for step in steps]
    training, scores = Band(steps, mean, [0.01] * 40, 6), Band([200, 400], [1.6] * 2, [0.01] * 2, 6)
    curve = Reference("tiny", {}, {}, training, scores, 0)
    plot_reference(list(records(0.1)), curve, tmp_path / "reference.png", name="mine")
    (axes,) = figures[0].axes
    assert axes.get_title() == "mine on the reference curve of tiny"
    assert len(axes.get_legend().get_texts()) == 5
    assert_apart(texts(axes))
