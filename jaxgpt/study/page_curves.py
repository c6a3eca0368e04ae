# SPDX-License-Identifier: Apache-2.0
"""The curves of a run's page beside the loss: gradient norm, size of the updates, speed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxgpt.study.plots import TRAINING, VALIDATION, new_figure, plain, series, smoothed

Records = Sequence[Mapping[str, Any]]

PANELS = {
    "grad_norm": ("gradient norm\nbefore clipping", TRAINING),
    "update_ratio": ("norm of update /\nnorm of weights", "#228833"),
    "max_attention_logit": ("largest score\nof attention", "#aa3377"),
}


def norm_figure(records: Records, *, name: str) -> Any | None:
    """Gradient norm, relative update and largest attention score by step, on logarithmic axes.

    Args:
      records: Of metrics.jsonl.
      name: Of the run.

    Returns:
      A figure of matplotlib; None where there is nothing to draw.
    """
    found = {key: positive(records, key) for key in PANELS}
    found = {key: each for key, each in found.items() if len(each[0])}
    if not found:
        return None
    figure = new_figure(6.4, 0.7 + 1.6 * len(found))
    panels = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (key, (steps, values)) in zip(panels, found.items(), strict=True):
        label, color = PANELS[key]
        smooth = smoothed(values)
        if smooth is not values:
            axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
        _line(axes, steps, smooth, color)
        if values.max() > 3 * values.min():
            axes.set_yscale("log")
        axes.set_ylabel(label, fontsize=9)
        plain(axes)
    panels[0].set_title(f"{name}: gradients and updates", parse_math=False)
    panels[-1].set_xlabel("step")
    figure.align_ylabels()
    return figure


def speed_figure(records: Records, *, name: str) -> Any | None:
    """Tokens per second by step, averages since the start of each process; see `norm_figure`."""
    steps, rates = positive(records, "tokens_per_s")
    if not len(steps):
        return None
    figure = new_figure(6.4, 2.4)
    axes = figure.subplots()
    _line(axes, steps, rates, TRAINING)
    begins = [r["step"] for r in records if r.get("first_step_wall_s") is not None][1:]
    for i, step in enumerate(begins):
        label = "a process goes on" if i == 0 else None
        axes.axvline(step, color=VALIDATION, linestyle=":", label=label)
    if begins:
        axes.legend(frameon=False)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("step")
    axes.set_title(f"{name}: speed", parse_math=False)
    plain(axes)
    return figure


def positive(records: Records, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that have one above zero."""
    steps, values = series(records, key)
    return steps[values > 0], values[values > 0]


def _line(axes: Any, steps: np.ndarray, values: np.ndarray, color: str) -> None:
    axes.plot(steps, values, color=color, marker="o" if len(steps) < 30 else "", markersize=4)
