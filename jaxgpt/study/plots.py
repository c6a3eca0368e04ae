# SPDX-License-Identifier: Apache-2.0
"""Pictures as pure functions: the losses of a run, and who attends to whom.

matplotlib is imported where something is drawn, and only its objects are used, so that importing
this file is cheap and a caller's own figures are left alone. Where records, parameters and tokens
come from is the caller's.
"""

import contextlib
import functools
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig, forward
from jaxgpt.shapes import Params
from jaxgpt.train.files import refused, write_synced

TRAINING, VALIDATION, RATE = "#4477aa", "#cc3311", "#777777"  # apart for colour-blind eyes too
LONGER_SIDE_PX = 800
LONGEST = 10  # characters of a token that are shown
SIGNS = {"\n": "⏎", " ": "␣", "\t": "⇥", "\r": "␍"}


def plot_losses(records: Sequence[Mapping[str, Any]], path: Path, *, name: str) -> None:
    """Draw training and validation loss in nats per token, and below them the learning rate.

    Args:
      records: Of metrics.jsonl: `step` with `loss_nats` and `lr`, or with `val_nats_per_token`.
      path: The PNG file, replaced if it is there.
      name: Of the run, for the title.

    Raises:
      ConfigError: No record has a loss, or matplotlib is missing.
      ResourceError: The file cannot be written.
    """
    save_figure(loss_figure(records, name=name), path)


def loss_figure(records: Sequence[Mapping[str, Any]], *, name: str) -> Any:
    """What `plot_losses` draws, as a figure of matplotlib."""
    steps, losses = series(records, "loss_nats")
    val_steps, val_losses = series(records, "val_nats_per_token")
    if not len(steps) + len(val_steps):
        raise ConfigError("there is no loss to draw yet", where=name, fix="train some steps first")
    figure = new_figure(6.4, 4.8)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    smooth = smoothed(losses)
    if smooth is not losses:
        top.plot(steps, losses, color=TRAINING, alpha=0.3, linewidth=0.8)
    curves = (
        ("training", steps, smooth, TRAINING),
        ("validation", val_steps, val_losses, VALIDATION),
    )
    for what, x, y, color in curves:
        if len(x):
            marker = "o" if len(x) < 30 else ""
            top.plot(x, y, color=color, marker=marker, markersize=4, label=f"{what}: {y[-1]:.3f}")
    top.set_ylabel("loss (nats per token)")
    top.legend(frameon=False)
    top.set_title(f"{name}: loss", parse_math=False)
    rate_steps, rates = series(records, "lr")
    below.plot(rate_steps, rates, color=RATE)
    below.set_ylim(bottom=0)
    below.set_ylabel("learning\nrate")
    below.ticklabel_format(axis="y", scilimits=(-2, 3), useMathText=True)
    below.set_xlabel("step")
    for axes in (top, below):
        plain(axes)
    figure.align_ylabels()
    return figure


def attention_maps(
    cfg: ModelConfig, params: Params, ids: Sequence[int], layers: Sequence[int]
) -> dict[int, Float[np.ndarray, "N T S"]]:
    """The attention probabilities of some layers for one text.

    Args:
      cfg: The model.
      params: Its parameters.
      ids: The text's T tokens; S = T.
      layers: Which layers, from 0.

    Returns:
      For each layer, a row per query: how much it takes from each key. A row sums to 1.

    Raises:
      ConfigError: No tokens, more than the context, no such layer, or one whose attention has no
        probabilities.
    """
    if not 0 < len(ids) <= cfg.context_length:
        raise ConfigError(f"a text of {len(ids)} tokens, the context is {cfg.context_length}")
    for layer in layers:
        if not 0 <= layer < cfg.n_layers:
            raise ConfigError(f"no layer {layer}", fix=f"0 to {cfg.n_layers - 1}")
    sites = {layer: f"block_{layer}/attention/probs" for layer in layers}
    look = functools.partial(forward, cfg, capture=tuple(sites.values()))
    ids_BT = np.asarray(ids, np.int32)[None]
    try:
        captured = jax.jit(lambda params, ids_BT: look(params, ids_BT).captured)(params, ids_BT)
    except ValueError as error:  # a box of one's own, without the site
        kinds = sorted({type(cfg.layers[layer].attention).__name__ for layer in layers})
        raise ConfigError(f"{', '.join(kinds)} shows no attention: {error}") from error
    return {layer: np.asarray(captured[site][0], np.float32) for layer, site in sites.items()}


def plot_attention(
    maps: Mapping[int, Float[np.ndarray, "N T S"]],
    tokens: Sequence[str],
    path: Path,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] = (0, 1),
    name: str = "",
) -> None:
    """Draw attention maps: a row of pictures for each layer, a column for each head.

    What a causal mask hides is left white. The colour scale is that of the square root, from 0 to
    1, because most probabilities are small.

    Args:
      maps: As `attention_maps` returns them.
      tokens: The T tokens as text.
      path: The PNG file, replaced if it is there.
      layers: Which of the maps; None: all.
      heads: Which heads, from 0.
      name: Of the run, for the title.

    Raises:
      ConfigError: No such layer or head, or matplotlib is missing.
      ResourceError: The file cannot be written.
    """
    save_figure(attention_figure(maps, tokens, layers=layers, heads=heads, name=name), path)


def attention_figure(
    maps: Mapping[int, Float[np.ndarray, "N T S"]],
    tokens: Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] = (0, 1),
    name: str = "",
) -> Any:
    """What `plot_attention` draws, as a figure of matplotlib."""
    layers = list(maps) if layers is None else layers
    if not (len(layers) and len(heads) and len(tokens)):
        raise ConfigError("no layer, head or token to draw")
    for layer in layers:
        for head in heads:
            if layer not in maps or not 0 <= head < len(maps[layer]):
                known = f"{len(maps[layer])} heads" if layer in maps else f"layers {list(maps)}"
                raise ConfigError(f"no map of layer {layer}, head {head}", fix=f"there are {known}")
    side_inch = max(2.8, 0.15 * len(tokens))
    figure = new_figure(side_inch * len(heads) + 1.4, (side_inch + 0.3) * len(layers) + 0.9)
    grid = figure.subplots(len(layers), len(heads), squeeze=False)
    for axes, layer, head in _cells(grid, layers, heads):
        probs_TS = maps[layer][head]
        hidden_TS = np.triu(np.ones_like(probs_TS, bool), 1)
        image = axes.imshow(
            np.ma.array(probs_TS, mask=hidden_TS), cmap="YlGnBu", norm=_square_root()
        )
        axes.set_title(f"layer {layer}, head {head}", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(xticks=[], yticks=[])
    _name_tokens(grid, [token_label(token) for token in tokens])
    figure.supxlabel("key: the token that is read", fontsize=11)
    figure.supylabel("query: the token that reads", fontsize=11)
    if name:
        figure.suptitle(f"{name}: attention", parse_math=False)
    bar = figure.colorbar(image, ax=list(grid.flat), shrink=min(1, 2.8 / side_inch), pad=0.02)
    bar.set_label("attention probability")
    bar.set_ticks([0, 0.01, 0.1, 0.25, 0.5, 1], labels=["0", "0.01", "0.1", "0.25", "0.5", "1"])
    return figure


def plain(axes: Any) -> None:
    """A grid behind the curves, no frame, and whole numbers of steps along the lower side."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _cells(grid: Any, layers: Sequence[int], heads: Sequence[int]) -> Iterator[tuple]:
    """Every axes of a grid with its layer and head."""
    for row, layer in zip(grid, layers, strict=True):
        for axes, head in zip(row, heads, strict=True):
            yield axes, layer, head


def _name_tokens(grid: Any, labels: Sequence[str]) -> None:
    """The tokens along the left and the lower side; long ones stand upright below."""
    font = dict(fontsize=8 if len(labels) > 16 else 10, family="monospace", parse_math=False)
    rotation = 0 if max(map(len, labels)) <= 1 else 90
    for axes in grid[:, 0]:
        axes.set_yticks(range(len(labels)), labels, **font)
    for axes in grid[-1]:
        axes.set_xticks(range(len(labels)), labels, rotation=rotation, **font)
    for axes in grid.flat:
        axes.tick_params(length=0)


def new_figure(width_inch: float, height_inch: float) -> Any:
    """An empty figure that no other code knows of.

    Raises:
      ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        what = f"pictures need matplotlib: {error}"
        raise ConfigError(what, fix="pip install matplotlib") from error
    dpi = max(100, LONGER_SIDE_PX / max(width_inch, height_inch))
    return Figure(figsize=(width_inch, height_inch), dpi=dpi, layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write the PNG so that it is the old one or the new one, whole."""
    content = io.BytesIO()
    figure.savefig(content, format="png", pil_kwargs={"optimize": True})
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(temporary, content.getvalue())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise refused(error, path, f"{path.name} cannot be written") from error


def _square_root() -> Any:
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0, vmax=1)


def series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that have one; null stands for NaN."""
    found = [(r["step"], r[key]) for r in records if r.get(key) is not None and "step" in r]
    return np.array([s for s, _ in found]), np.array([v for _, v in found], float)


def smoothed(values: np.ndarray) -> np.ndarray:
    """The mean over a fiftieth of all values around each; of few values, the values themselves."""
    half = len(values) // 100
    if not half:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(len(values))
    low, high = np.maximum(ends - half, 0), np.minimum(ends + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def token_label(token: str) -> str:
    """A token as the font can show it: signs for white space, code points for what it lacks."""
    known = _known_characters()
    shown = "".join(
        c if ord(c) in known else repr(c)[1:-1] if ord(c) < 256 else f"U+{ord(c):04X}"
        for c in (SIGNS.get(c, c) for c in token)
    )
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


@functools.cache
def _known_characters() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans Mono")).get_charmap())
