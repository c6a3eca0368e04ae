# SPDX-License-Identifier: Apache-2.0
import pytest
from runpages import records
from test_plots import assert_apart

from jaxgpt.study.page_curves import norm_figure, positive, speed_figure


@pytest.mark.parametrize("n", [20, 400, 4000])
def test_curves_have_names_and_units_that_lie_apart(n):
    some = list(records(n, 10))
    figure = norm_figure(some, name="my_$run$")
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == [
        "gradient norm\nbefore clipping",
        "norm of update /\nnorm of weights",
        "largest score\nof attention",
    ]
    speed = speed_figure(some, name="my_$run$")
    assert speed.axes[0].get_ylabel() == "tokens per second"
    if n > 20:
        assert "goes on" in speed.axes[0].get_legend().get_texts()[0].get_text()
    for made in (figure, speed):
        made.draw_without_rendering()
        assert made.axes[-1].get_xlabel() == "step"
        assert made.axes[0].get_title().startswith("my_$run$: ")
        texts = [made.axes[0].title, made.axes[-1].xaxis.label]
        assert_apart(texts + [axes.yaxis.label for axes in made.axes])


def test_what_is_not_on_record_is_not_drawn():
    assert norm_figure([], name="a") is None and speed_figure([{"step": 1}], name="a") is None
    some = [{"step": 1, "grad_norm": None}, {"step": 2, "grad_norm": 3.0}, {"grad_norm": 4.0}]
    assert len(norm_figure(some, name="a").axes) == 1
    steps, values = positive([*some, {"step": 3, "grad_norm": 0.0}], "grad_norm")
    assert (steps.tolist(), values.tolist()) == ([2], [3.0])
