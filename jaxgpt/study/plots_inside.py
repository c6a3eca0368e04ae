# SPDX-License-Identifier: Apache-2.0
"""Pictures of what is inside: maps of layers against heads or tokens, the last layer on top.

What they show is computed in `ablation.py` and `attribution.py`; attention maps are in `plots.py`.
All return a figure of matplotlib, which a notebook shows, and write a file if they are given one.
"""

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jaxgpt.errors import ConfigError
from jaxgpt.study import plots
from jaxgpt.study.attribution import Attribution

CELL_INCH = 0.62, 0.36
SMALL_INCH = 0.62, 0.18  # where there are too many cells for numbers in them
MOST_NUMBERS = 200
MOST_COLUMNS = 64
PARTS = ("attention", "FFN")


def plot_head_ablation(
    effects_LN: Float[Array | np.ndarray, "L N"], path: Path | None = None, *, name: str
) -> Any:
    """Draw what `ablate_heads` returns.

    Args:
      effects_LN: The rise of the loss, in nats per token.
      path: A PNG file to write, replaced if it is there.
      name: Of the model, for the title.

    Raises:
      ConfigError: Too many columns to draw, or matplotlib is missing.
      ResourceError: The file cannot be written.
    """
    return _draw(
        path,
        effects_LN,
        title=f"{name}: the loss without each head",
        x="head",
        bar="rise of the loss\n(nats per token)",
    )


def plot_layer_ablation(
    effects_L2: Float[Array | np.ndarray, "L 2"], path: Path | None = None, *, name: str
) -> Any:
    """Draw what `ablate_layers` returns; arguments and errors as `plot_head_ablation`."""
    return _draw(
        path,
        effects_L2,
        title=f"{name}: the loss without each sub-layer",
        x="sub-layer",
        columns=PARTS,
        bar="rise of the loss\n(nats per token)",
    )


def plot_patching(
    returned: Float[Array | np.ndarray, "L slices"],
    path: Path | None = None,
    *,
    name: str,
    tokens: Sequence[str] | None = None,
    site: str = "in",
) -> Any:
    """Draw what `activation_patching` returns.

    Args:
      returned: The share of the logit difference that returns.
      path: A PNG file to write, replaced if it is there.
      name: Of the model, for the title.
      tokens: Of the corrupted prompt, where it is patched token by token; None: head by head.
      site: What was patched.

    Raises:
      ConfigError: Too many columns to draw, or matplotlib is missing.
      ResourceError: The file cannot be written.
    """
    return _draw(
        path,
        returned,
        title=f"{name}: share of the answer that the clean block_i/{site} brings back",
        x="head" if tokens is None else "token of the corrupted prompt",
        columns=None if tokens is None else [plots.token_label(token) for token in tokens],
        bar="share of the\nlogit difference",
    )


def plot_lens(
    logits_DTV: Float[Array | np.ndarray, "depths T V"],
    tokens: Sequence[str],
    text: Callable[[int], str],
    path: Path | None = None,
    *,
    name: str,
) -> Any:
    """Draw what `logit_lens` returns for one text: the likeliest next token, and how likely it is.

    Args:
      logits_DTV: Of each depth.
      tokens: The T tokens as text.
      text: Of any token id.
      path: A PNG file to write, replaced if it is there.
      name: Of the model, for the title.

    Raises:
      ConfigError: Too many columns to draw, or matplotlib is missing.
      ResourceError: The file cannot be written.
    """
    logits = np.asarray(logits_DTV, np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    top_DT = logits.argmax(-1)
    return _draw(
        path,
        weights.max(-1) / weights.sum(-1),
        title=f"{name}: the likeliest next token, read from the stream at each depth",
        x="token that is read",
        columns=[plots.token_label(token) for token in tokens],
        y="stream before layer",
        rows=[*map(str, range(len(logits) - 1)), "output"],
        bar="its probability",
        notes=[[plots.token_label(text(int(i))) for i in row] for row in top_DT],
        share=True,
        wide=1.25,
    )


def plot_attribution(
    found: Attribution, path: Path | None = None, *, name: str, what: str, row: int = 0
) -> Any:
    """Draw what `direct_attribution` returns for one prompt: heads, then the FFN of each layer.

    Args:
      found: The parts.
      path: A PNG file to write, replaced if it is there.
      name: Of the model, for the title.
      what: The logit difference: "She - He".
      row: Which prompt.

    Raises:
      ConfigError: Too many columns to draw, or matplotlib is missing.
      ResourceError: The file cannot be written.
    """
    heads = found.heads or tuple(whole_B[:, None] for whole_B in found.attention)
    most = max(part.shape[1] for part in heads)
    shares = np.full((len(heads), most + 1), np.nan)
    for layer, part_BN in enumerate(heads):
        shares[layer, : part_BN.shape[1]] = part_BN[row]
        shares[layer, most] = found.ffn[layer, row]
    columns = [f"head {i}" for i in range(most)] if found.heads else [PARTS[0]]
    embedding, bias = (_number(x[row], 1.0) for x in (found.embedding, found.bias))
    return _draw(
        path,
        shares,
        title=f"{name}: who writes {what}, {_number(found.total[row], 1.0)} in all\n"
        f"(of which embedding {embedding}, biases {bias})",
        x="part of the layer",
        columns=[*columns, PARTS[1]],
        bar="share of the logit\ndifference",
    )


def plot_induction(
    scores_LN: Float[Array | np.ndarray, "L N"], path: Path | None = None, *, name: str
) -> Any:
    """Draw what `induction_scores` returns; arguments and errors as `plot_head_ablation`."""
    return _draw(
        path,
        scores_LN,
        title=f"{name}: who looks behind the earlier occurrence",
        x="head",
        bar="attention probability",
        share=True,
    )


def _draw(
    path: Path | None,
    values: Any,
    *,
    title: str,
    x: str,
    bar: str,
    columns: Sequence[str] | None = None,
    y: str = "layer",
    rows: Sequence[str] | None = None,
    notes: Sequence[Sequence[str]] | None = None,
    share: bool = False,
    wide: float = 1.0,
) -> Any:
    """A map with a number or a note in each cell, if they are few; the last row on top.

    A share goes from 0 to 1; other values are coloured by their sign, as far as the largest goes.
    """
    values = np.asarray(values, np.float64)
    n_rows, n_columns = values.shape
    if n_columns > MOST_COLUMNS:
        raise ConfigError(f"{n_columns} columns, at most {MOST_COLUMNS} can be drawn")
    columns = [*map(str, range(n_columns))] if columns is None else columns
    written = notes is not None or values.size <= MOST_NUMBERS
    cell_inch = CELL_INCH if written else SMALL_INCH
    width, height = wide * cell_inch[0] * n_columns, cell_inch[1] * n_rows
    figure = plots.new_figure(max(5.6, width + 1.9), max(2.4, height + 1.4))
    axes = figure.subplots()
    top = 1.0 if share else max(np.nanmax(np.abs(values)), 1e-12)
    scale: dict[str, Any] = dict(vmin=0, vmax=1, cmap="YlGnBu")
    if not share:
        scale = dict(vmin=-top, vmax=top, cmap="RdBu_r")
    image = axes.imshow(values, origin="lower", aspect="auto", **scale)
    for i, j in np.ndindex(values.shape):
        if written and np.isfinite(values[i, j]):
            strong = values[i, j] > 0.6 if share else abs(values[i, j]) > 0.6 * top
            text = notes[i][j] if notes else _number(values[i, j], top)
            color = "white" if strong else "black"
            axes.text(
                j, i, text, ha="center", va="center", fontsize=8, color=color, parse_math=False
            )
    room = figure.get_figwidth() / n_columns  # an inch has room for about twelve characters
    turned = 90 if max(map(len, columns)) > 12 * room else 0
    axes.set_xticks(range(n_columns), columns, rotation=turned, fontsize=9, parse_math=False)
    axes.set_yticks(range(n_rows), rows or [*map(str, range(n_rows))], fontsize=9)
    axes.tick_params(length=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    most = int(11 * figure.get_figwidth())  # characters of a line
    lines = [part for line in title.splitlines() for part in textwrap.wrap(line, most)]
    figure.suptitle("\n".join(lines), fontsize=11, parse_math=False)
    figure.colorbar(image, ax=axes, pad=0.02, aspect=max(12, n_rows)).set_label(bar)
    if path is not None:
        plots.save_figure(figure, path)
    return figure


def _number(x: Any, top: float) -> str:
    """With two digits or more for the largest of its kind; no minus in front of zero."""
    decimals = min(max(2, 1 - math.floor(math.log10(top))), 9)
    text = f"{float(x):.{decimals}f}"
    return text.strip("-") if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")
