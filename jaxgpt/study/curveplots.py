# SPDX-License-Identifier: Apache-2.0
"""Pictures of several runs: lanes with the interval of their mean, final losses, reference curves.

As in `plots.py`, matplotlib is imported where something is drawn.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.errors import ConfigError
from jaxgpt.study import plots
from jaxgpt.study.curves import WINDOW, Reference, band, cautious, limit, losses_of, smoothed
from jaxgpt.study.lanes import LaneRun, by_kind, label, read_lanes
from jaxgpt.study.plots import RATE, TRAINING, VALIDATION, new_figure, plain
from jaxgpt.study.student import half_width

COLORS = (TRAINING, VALIDATION, "#228833", "#aa3377", "#ccbb44", "#66ccee")  # Paul Tol's, bright
STYLES = ("-", "--", ":", "-.")
LEGEND_ROWS = 12


def draw_lanes(folder: Path) -> str:
    """Draw `lanes.png` in a folder of lanes, and `final.png` where one number differs.

    Returns:
      The paths, for people.

    Raises:
      ConfigError: No lanes, no losses yet, or matplotlib is missing.
      ResourceError: A file cannot be written.
    """
    lanes = read_lanes(folder)
    drawn = [folder / "lanes.png"]
    plot_lanes(lanes, drawn[0], name=folder.name)
    key = swept(lanes)
    if key is not None and any(lane.final_loss() is not None for lane in lanes):
        drawn.append(folder / "final.png")
        plot_final(lanes, key, drawn[1], name=folder.name)
    return ", ".join(map(str, drawn))


def swept(lanes: Sequence[LaneRun]) -> str | None:
    """The name of the one number that differs beside seeds; None: there is none, or several."""
    keys = {key for lane in lanes for key, _ in lane.kind}
    values = [value for lane in lanes for _, value in lane.kind]
    numbers = all(isinstance(value, int | float) and value > 0 for value in values)
    return keys.pop() if len(keys) == 1 and numbers else None


def plot_lanes(lanes: Sequence[LaneRun], path: Path, *, name: str) -> None:
    """Draw the mean loss of lanes that differ in seeds alone, with its 95% t-interval.

    Training losses are smoothed over five records, with the interval as a band; validation losses
    are dots with bars. Lanes that diverged are left out, and the legend counts them.

    Args:
      lanes: With their records.
      path: The PNG file, replaced if it is there.
      name: Of the folder, for the title.

    Raises:
      ConfigError: There is no loss yet, or matplotlib is missing.
      ResourceError: The file cannot be written.
    """
    figure = new_figure(6.4, 4.8)
    axes, drawn = figure.subplots(), False
    kinds = by_kind(lanes)
    for i, (kind, own) in enumerate(kinds.items()):
        whole = [lane for lane in own if lane.diverged is None]
        color, style = COLORS[i % len(COLORS)], STYLES[i // len(COLORS) % len(STYLES)]
        training = [smoothed(losses_of(lane.records, "loss_nats")) for lane in whole]
        scores = [losses_of(lane.records, "val_nats_per_token") for lane in whole]
        finals = [loss for lane in whole if (loss := lane.final_loss()) is not None]
        ended = f": {np.mean(finals):.4f}" if finals else ""
        lost = f", {len(own) - len(whole)} diverged" if len(whole) < len(own) else ""
        alone = f"training, mean of {WINDOW} records{lost}"
        said = f"{label(kind)}{ended}{lost}" if kind else alone
        drawn |= _mean(axes, training, color, label=said, linestyle=style)
        _bars(axes, scores, color if kind else VALIDATION, None if kind else f"validation{ended}")
    if not drawn:
        raise ConfigError("there is no loss to draw yet", where=name, fix="train some steps first")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    seeds = max(map(len, kinds.values()))
    of = f"mean of {seeds} seeds and its 95% interval" if seeds > 1 else "one seed each"
    axes.set_title(f"{name}: {of}", parse_math=False)
    entries = len(axes.get_legend_handles_labels()[0])
    legend: dict[str, Any] = dict(frameon=False, alignment="left")
    if any(kinds):
        legend["title"] = f"line: training, mean of {WINDOW} records\ndots: validation"
    if entries > 6:
        legend |= dict(fontsize=8, ncols=math.ceil(entries / LEGEND_ROWS))
    axes.legend(**legend)
    plain(axes)
    plots.save_figure(figure, path)


def plot_final(lanes: Sequence[LaneRun], key: str, path: Path, *, name: str) -> None:
    """Draw the last validation loss against a number, a learning rate say: each lane, and means.

    Args:
      lanes: With their records.
      key: The number's dotted name.
      path: The PNG file, replaced if it is there.
      name: Of the folder, for the title.

    Raises:
      ConfigError: matplotlib is missing.
      ResourceError: The file cannot be written.
    """
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    ends = [(float(lane.values[key]), loss) for lane in lanes if (loss := lane.final_loss())]
    x = sorted({value for value, _ in ends})
    groups = [[loss for value, loss in ends if value == at] for at in x]
    axes.plot(*zip(*ends, strict=True), "o", color=RATE, markersize=4, label="a lane")
    halves = [half_width(float(np.std(g, ddof=1)), len(g)) if len(g) > 1 else 0.0 for g in groups]
    said = "mean and its 95% interval" if any(halves) else "mean"
    means = [float(np.mean(g)) for g in groups]
    axes.errorbar(x, means, yerr=halves, color=TRAINING, capsize=3, label=said)
    lost = sorted({float(lane.values[key]) for lane in lanes if lane.diverged is not None})
    for i, value in enumerate(lost):
        told = None if i else "with a lane that diverged"
        axes.axvline(value, color=VALIDATION, linestyle=":", label=told)
    axes.set_xscale("log")
    every = sorted({*x, *lost})
    axes.set_xticks(every, [f"{value:g}" for value in every], rotation=45 if len(every) > 6 else 0)
    axes.minorticks_off()
    title = "learning rate" if key == "optim.lr" else key
    axes.set(xlabel=title, ylabel="validation loss (nats per token)")
    axes.set_title(f"{name}: validation loss at the end", parse_math=False)
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    plots.save_figure(figure, path)


def plot_reference(
    records: Sequence[Mapping[str, Any]], reference: Reference, path: Path, *, name: str
) -> None:
    """Draw a run on the reference curve of its recipe.

    Args:
      records: Of its metrics.jsonl.
      reference: The curve.
      path: The PNG file, replaced if it is there.
      name: Of the run, for the title.

    Raises:
      ConfigError: matplotlib is missing.
      ResourceError: The file cannot be written.
    """
    figure = new_figure(6.4, 4.8)
    axes = figure.subplots()
    known, scores = reference.training, reference.validation
    mean, sd = np.array(known.mean), np.array(known.sd)
    off = limit(known) * sd
    said = f"{reference.name}: where its runs stay, by {known.n} seeds"
    axes.fill_between(known.steps, mean - off, mean + off, color=RATE, alpha=0.3, lw=0, label=said)
    axes.plot(known.steps, mean, color=RATE, linewidth=1, label=f"{reference.name}: mean")
    own = losses_of(records, "loss_nats")
    ours = smoothed({step: own[step] for step in own if step in set(known.steps)})
    axes.plot(
        list(ours),
        list(ours.values()),
        color=TRAINING,
        label=f"{name}: training, mean of {WINDOW} records",
    )
    error = np.array(cautious(scores).sd) * limit(scores, 1)
    style = dict(fmt="_", color="#222222", capsize=5, zorder=4)
    said = f"{reference.name}: where validation stays"
    axes.errorbar(scores.steps, scores.mean, yerr=error, label=said, **style)
    ended = losses_of(records, "val_nats_per_token")
    style = dict(marker="o", linestyle="", color=VALIDATION, markersize=4, zorder=5)
    axes.plot(list(ended), list(ended.values()), label=f"{name}: validation", **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(f"{name} on the reference curve of {reference.name}", parse_math=False)
    axes.legend(frameon=False)
    plain(axes)
    plots.save_figure(figure, path)


def _mean(axes: Any, curves: Sequence[Mapping[int, float]], color: str, **line: Any) -> bool:
    """A mean with the band of its interval, or the only curve; whether there was one."""
    curves = [curve for curve in curves if curve]
    if len(curves) == 1:
        axes.plot(list(curves[0]), list(curves[0].values()), color=color, **line)
    elif curves:
        found = band(curves)
        mean = np.array(found.mean)
        half = np.array([half_width(sd, found.n) for sd in found.sd])
        axes.fill_between(found.steps, mean - half, mean + half, color=color, alpha=0.25, lw=0)
        axes.plot(found.steps, mean, color=color, **line)
    return bool(curves)


def _bars(axes: Any, curves: Sequence[Mapping[int, float]], color: str, said: str | None) -> None:
    """Means with their intervals as bars."""
    curves = [curve for curve in curves if curve]
    style = dict(fmt="o", color=color, markersize=4, capsize=3, label=said)
    if len(curves) == 1:
        axes.errorbar(list(curves[0]), list(curves[0].values()), **style)
    elif curves:
        found = band(curves)
        half = [half_width(sd, found.n) for sd in found.sd]
        axes.errorbar(found.steps, found.mean, yerr=half, **style)
