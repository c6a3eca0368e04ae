# SPDX-License-Identifier: Apache-2.0
"""Figures of the benchmarks, all alike: plain axes, units, colours apart for colour-blind eyes."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

BLUE, RED, GREEN, GREY = "#4477aa", "#cc3311", "#228833", "#777777"
DPI = 120


def figure(width, height):
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def log_axes(axes, x_values=None, x_label="", y_label=""):
    """Both axes logarithmic, numbers in plain digits, ticks at the values that were measured."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    if x_values is not None:
        axes.set_xticks(x_values, [f"{x:,}" for x in x_values])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    plain(axes)


def plain(axes):
    axes.grid(alpha=0.25, which="major")
    axes.spines[["top", "right"]].set_visible(False)


def save(made, path: Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=DPI, metadata={"Software": None})
    print(f"\ndrew {path}", flush=True)
