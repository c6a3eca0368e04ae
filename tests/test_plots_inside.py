# SPDX-License-Identifier: Apache-2.0
import functools

import numpy as np
import pytest
from test_plots import assert_apart, pixels

from jaxgpt.errors import ConfigError
from jaxgpt.study import plots
from jaxgpt.study.attribution import Attribution
from jaxgpt.study.plots_inside import (
    plot_attribution,
    plot_head_ablation,
    plot_induction,
    plot_layer_ablation,
    plot_lens,
    plot_patching,
)

MINUS = "\N{MINUS SIGN}"
RNG = np.random.default_rng(0)
L, N, T, V = 3, 4, 9, 7
TOKENS = ["<s>", " Once", " upon", " a", " $time$", ",", "\n", " transformations", ""]
WORDS = ["a", " b", "c$", "\n", " named", " Lily", " something long"]
EFFECTS = RNG.normal(size=(L, N)) * 0.01
LOGITS = 3 * RNG.normal(size=(L + 1, T, V))
PARTS = Attribution(
    heads=(RNG.normal(size=(1, 4)), RNG.normal(size=(1, 2))),
    attention=RNG.normal(size=(2, 1)),
    ffn=RNG.normal(size=(2, 1)),
    embedding=np.array([-0.001]),
    bias=np.array([0.5]),
    total=np.array([-3.25]),
)
DRAWN = {
    "heads": functools.partial(plot_head_ablation, EFFECTS),
    "layers": functools.partial(plot_layer_ablation, EFFECTS[:, :2]),
    "tokens": functools.partial(plot_patching, RNG.normal(size=(L, T)), tokens=TOKENS),
    "heads patched": functools.partial(plot_patching, EFFECTS, site="attention/heads"),
    "lens": functools.partial(plot_lens, LOGITS, TOKENS, WORDS.__getitem__),
    "attribution": functools.partial(plot_attribution, PARTS, what="She - He"),
    "induction": functools.partial(plot_induction, np.abs(RNG.normal(size=(24, 12))) / 3),
}


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """Draws one picture; the axes with the map, those of the bar, and the figure."""

    def run(name):
        found, save = [], plots.save_figure

        def note(figure, path):
            save(figure, path)
            figure.draw_without_rendering()
            found.append(figure)

        monkeypatch.setattr(plots, "save_figure", note)
        DRAWN[name](tmp_path / "a.png", name="my_$model$")
        (figure,) = found
        assert min(pixels(tmp_path / "a.png")) > 250
        return *figure.axes, figure

    return run


@pytest.mark.parametrize("name", DRAWN)
def test_texts_are_there_and_apart(draw, name):
    axes, bar, figure = draw(name)
    title = figure._suptitle
    assert title.get_text().startswith("my_$model$: ") and not title.get_parse_math()
    assert axes.get_ylabel().startswith(("layer", "stream")) and axes.get_xlabel()
    assert bar.get_ylabel() or bar.get_xlabel()
    ticks = [*axes.get_xticklabels(), *axes.get_yticklabels()]
    assert_apart([title, axes.xaxis.label, axes.yaxis.label, *ticks])
    assert_apart(axes.texts)
    bottom = axes.get_window_extent().transformed(axes.transData.inverted()).y0
    assert axes.images[0].get_array().shape[0] == len(axes.get_yticks()) and bottom < 0


def test_numbers_are_those_of_the_cells(draw):
    axes, _, _ = draw("heads")
    texts = [text.get_text() for text in axes.texts]
    assert len(texts) == L * N and {len(text.strip(MINUS)) for text in texts} == {5}
    first = texts[0].replace(MINUS, "-")
    assert abs(float(first) - EFFECTS[0, 0]) < 5e-4 and MINUS + "0.000" not in texts
    colours = axes.images[0]
    assert -colours.norm.vmin == colours.norm.vmax == np.abs(EFFECTS).max()
    assert not draw("induction")[0].texts  # too many cells


def test_the_lens_names_the_likeliest_token_and_its_probability(draw):
    axes, _, _ = draw("lens")
    shown = [plots.token_label(WORDS[i]) for i in LOGITS.argmax(-1).ravel()]
    assert [text.get_text() for text in axes.texts] == shown
    weights = np.exp(LOGITS[1, 2])
    share = axes.images[0].get_array()[1, 2]
    np.testing.assert_allclose(share, weights.max() / weights.sum())
    assert [t.get_text() for t in axes.get_yticklabels()] == ["0", "1", "2", "output"]


def test_attribution_says_what_the_heads_do_not(draw):
    axes, _, figure = draw("attribution")
    assert f"She - He, {MINUS}3.25 in all" in figure._suptitle.get_text()
    assert "embedding 0.00, biases 0.50" in figure._suptitle.get_text()
    values = axes.images[0].get_array()
    np.testing.assert_allclose(values[:, -1], PARTS.ffn[:, 0])
    np.testing.assert_allclose(values[1, :2], PARTS.heads[1][0])
    assert np.ma.filled(np.isnan(values), True)[1, 2:4].all()
    assert len(axes.texts) == 4 + 2 + 2


def test_what_is_too_wide_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="100 columns, at most 64"):
        plot_head_ablation(np.zeros((2, 100)), tmp_path / "a.png", name="a")
    assert list(tmp_path.iterdir()) == []
