# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of what `mup.py` ran: how far activations move, and the loss by rate.

Source: Yang et al. 2022, appendix D.1 and figure 1, https://arxiv.org/abs/2203.03466
"""

import itertools
from pathlib import Path

import drawing
import numpy as np

SITES = {
    "embed/out": "embedding",
    "block_{last}/attention/scores": "attention scores",
    "block_{last}/attention/heads": "head outputs",
    "block_{last}/ffn/hidden": "hidden units of the FFN",
    "block_{last}/out": "residual stream, last block",
    "head/logits": "logits",
}
LAST = 0.2
"""Share of the steps whose losses are averaged."""
COLORS = {False: drawing.RED, True: drawing.BLUE}
NAMES = {False: "standard", True: "muP"}
WIDTH_COLORS = ("#bbcc33", "#44aa99", "#4477aa", "#332288", "#882255")


def slope(widths, values) -> float:
    """Of a straight line through all points, on logarithmic axes."""
    return float(np.polyfit(np.log2(widths), np.log2(values), 1)[0])


def final_loss(losses, steps: int) -> float:
    """The mean of the last ones; infinite where the run did not come so far."""
    last = losses[-max(1, round(LAST * steps)) :]
    return float(np.mean(last)) if len(losses) == steps and np.isfinite(last).all() else np.inf


def transfer_table(runs, steps: int, base: int) -> dict[tuple[bool, int], dict[float, float]]:
    """By parametrisation and width: the loss by log2 of the rate.

    It is the mean over the seeds that all of them have: each seed has batches of its own.
    """
    cells: dict[tuple[bool, int], dict[float, dict[int, float]]] = {}
    for run in runs:
        row = cells.setdefault((run["mup"], run["width"]), {})
        row.setdefault(run["log2_rate"], {})[run["seed"]] = final_loss(run["losses"], steps)
    if (False, base) in cells:  # one and the same there, run once
        cells[True, base] = cells[False, base]
    seeds = sorted(set.intersection(*(set(one) for row in cells.values() for one in row.values())))
    return {
        key: {rate: float(np.mean([one[s] for s in seeds])) for rate, one in sorted(row.items())}
        for key, row in sorted(cells.items())
    }


def best(row: dict[float, float]) -> float:
    """log2 of the best rate: the vertex of the parabola through the best one and its neighbours."""
    rates, losses = list(row), list(row.values())
    i = int(np.argmin(losses))
    if not 0 < i < len(rates) - 1 or not np.isfinite(losses[i - 1 : i + 2]).all():
        return rates[i]
    a, b, _ = np.polyfit(rates[i - 1 : i + 2], losses[i - 1 : i + 2], 2)
    return float(-b / (2 * a))


def signed(number: float) -> str:
    """In two digits, zero without a sign of its own."""
    return f"{round(number, 2) + 0.0:+.2f}"


def power(log2: float) -> str:
    """Of two, for a figure."""
    return f"$2^{{{log2:g}}}$"


def draw_coordinates(record, base: int, path: Path) -> None:
    """A panel for each site, a line for each parametrisation and number of steps."""
    made = drawing.figure(9.6, 6.0)
    panels = made.subplots(2, -(-len(SITES) // 2), squeeze=False).flat
    rows, looks = record["rows"], record["looks"]
    widths = sorted({row["width"] for row in rows})
    for number, (axes, title) in enumerate(zip(panels, SITES.values(), strict=True)):
        for mup, i in itertools.product((False, True), range(len(looks))):
            values = [mean_change(rows, width, mup, base)[number][i] for width in widths]
            shown = dict(color=COLORS[mup], alpha=(i + 1) / len(looks), markersize=4)
            style = "o-" if mup else "s--"
            text = f"{NAMES[mup]}: slope {signed(slope(widths, values))}"
            label = text if i + 1 == len(looks) else None
            axes.plot(widths, values, style, label=label, **shown)
        drawing.log_axes(axes, widths, "width d", "mean |change|")
        axes.set_title(title, fontsize=11)
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.3)  # room for the legend
        axes.legend(frameon=False, fontsize=8.5, loc="upper left")
    made.suptitle(
        f"How far activations move in {', '.join(map(str, looks))} steps (pale to full) "
        f"at the rate {power(record['log2_rate'])}",
        fontsize=12,
    )
    drawing.save(made, path)


def mean_change(rows, width: int, mup: bool, base: int) -> np.ndarray:
    """Over seeds: sites by looks. At the base both are one and the same."""
    found = [
        row["changes"]
        for row in rows
        if row["width"] == width and (row["mup"] == mup or width == base)
    ]
    return np.mean(found, axis=0)


def draw_transfer(table, steps: int, path: Path) -> None:
    """Loss against rate for each width, the best of each marked: standard, then muP."""
    made = drawing.figure(9.6, 4.4)
    panels = made.subplots(1, 2, sharey=True)
    widths = sorted({width for _, width in table})
    finite = [loss for row in table.values() for loss in row.values() if np.isfinite(loss)]
    low = min(finite)
    for axes, mup in zip(panels, (False, True), strict=True):
        found = []
        for color, width in zip(WIDTH_COLORS, widths, strict=False):
            row = table[mup, width]
            found.append(best(row))
            rates = [2.0**rate for rate in row]
            axes.plot(
                rates, list(row.values()), "-o", color=color, markersize=3.5, label=f"{width}"
            )
            rate = min(row, key=row.__getitem__)
            axes.plot([2.0**rate], [row[rate]], "*", color=color, markersize=13, mec="black")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("learning rate")
        axes.set_ylim(low - 0.05, min(max(finite), low + 1.0))
        growth = slope(widths, [2.0**rate for rate in found])
        axes.set_title(f"{NAMES[mup]}: best rate goes with $d^{{{signed(growth)}}}$", fontsize=11)
        drawing.plain(axes)
    panels[1].legend(frameon=False, title="width d", loc="upper center")
    last = max(1, round(LAST * steps))
    panels[0].set_ylabel(
        f"training loss (nats per character),\nsteps {steps - last + 1} to {steps}"
    )
    drawing.save(made, path)
