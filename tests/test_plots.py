# SPDX-License-Identifier: Apache-2.0
import itertools
import math
import sys

import jax
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.errors import ConfigError, ResourceError
from jaxgpt.model import LayerEdit, init_params
from jaxgpt.study import plots
from jaxgpt.study.plots import attention_maps, plot_attention, plot_losses
from jaxgpt.testing import tiny

TEXT = "the quick brown fox\n\tjumps over $the$ lazy dog, and then it sleeps\n"


def records(n):
    """Of a run of n steps, each of them logged, evaluated eight times."""
    for step in range(1, n + 1):
        loss = 1.5 + 3 * math.exp(-5 * step / n)
        yield {"step": step, "loss_nats": loss, "lr": 1e-3 * step / n}
        if step % max(1, n // 8) == 0:
            yield {"step": step, "val_nats_per_token": loss + 0.1}


def maps(T, layers=(0, 2), heads=3):
    """Maps with the probabilities of a causal softmax."""
    weights_NTS = np.tril(np.random.default_rng(0).exponential(size=(heads, T, T)))
    return dict.fromkeys(layers, (weights_NTS / weights_NTS.sum(-1, keepdims=True)).astype("f4"))


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is saved, laid out."""
    found, save = [], plots.save_figure

    def note(figure, path):
        save(figure, path)
        figure.draw_without_rendering()
        found.append(figure)

    monkeypatch.setattr(plots, "save_figure", note)
    return found


def assert_apart(texts):
    """No two texts of a figure lie on each other, and none leaves it."""
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts if t.get_text()]
    for (a, one), (b, other) in itertools.combinations(boxes, 2):
        assert not one.overlaps(other), (a, b)
    for text, box in boxes:
        canvas = texts[0].figure.bbox
        assert canvas.containsx(box.x0) and canvas.containsx(box.x1), text
        assert canvas.containsy(box.y0) and canvas.containsy(box.y1), text


def pixels(path):
    from matplotlib.image import imread

    assert path.stat().st_size < 200_000
    return imread(path).shape[:2]


@pytest.mark.parametrize("n", [1, 5, 100, 2000])
def test_losses(tmp_path, figures, n):
    plot_losses(list(records(n)), tmp_path / "loss.png", name="my_$run$")
    assert pixels(tmp_path / "loss.png") == (600, 800)
    top, below = figures[0].axes
    legend = [t.get_text() for t in top.get_legend().get_texts()]
    last = 1.5 + 3 * math.exp(-5)
    assert [text.split(": ")[0] for text in legend] == ["training", "validation"]
    assert float(legend[0].split(": ")[1]) == pytest.approx(last, abs=0.02)
    assert float(legend[1].split(": ")[1]) == pytest.approx(last + 0.1, abs=0.02)
    assert top.get_ylabel() == "loss (nats per token)" and below.get_xlabel() == "step"
    assert below.get_ylabel() == "learning\nrate"
    assert top.get_title() == "my_$run$: loss" and not top.title.get_parse_math()
    labels = [top.title, top.yaxis.label, below.yaxis.label, below.xaxis.label]
    assert_apart(labels + top.get_yticklabels()[1:-1] + below.get_xticklabels()[1:-1])
    assert min(t.get_fontsize() for t in labels) * figures[0].dpi / 72 / 2 >= 8, "at 400 px"


def test_losses_of_a_run_without_validation_and_with_gaps(tmp_path, figures):
    some = [{"step": 1, "loss_nats": 2.0, "lr": 1.0}, {"step": 2, "loss_nats": None, "lr": 1.0}]
    plot_losses(some, tmp_path / "loss.png", name="a")
    assert len(figures[0].axes[0].get_legend().get_texts()) == 1
    assert figures[0].axes[0].lines[0].get_xdata().tolist() == [1]
    with pytest.raises(ConfigError, match="no loss to draw yet"):
        plot_losses([{"step": 1, "val_nats_per_token": None}], tmp_path / "no.png", name="a")
    assert not (tmp_path / "no.png").exists()


@pytest.mark.parametrize("T", [1, 8, 32, 64])
def test_attention_at_three_sizes(tmp_path, figures, T):
    plot_attention(maps(T), list(TEXT[:T]), tmp_path / "a.png", heads=(0, 2), name="run")
    (figure,) = figures
    *grid, bar = figure.axes
    titles = [axes.get_title() for axes in grid]
    assert titles == [f"layer {i}, head {j}" for i in (0, 2) for j in (0, 2)]
    assert bar.get_ylabel() == "attention probability"
    assert figure.get_supxlabel().startswith("key") and figure.get_supylabel().startswith("query")
    shown = "".join(label.get_text() for label in grid[2].get_xticklabels())
    assert shown == TEXT[:T].replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    for axes in grid[2:]:
        assert_apart(axes.get_xticklabels())
    assert_apart([*grid[0].get_yticklabels(), *grid[2].get_yticklabels(), figure._supylabel])
    height, width = pixels(tmp_path / "a.png")
    assert 700 <= height <= 2300 and 700 <= width <= 2300
    hidden_TS = grid[0].images[0].get_array().mask
    assert (hidden_TS == np.triu(np.ones((T, T), bool), 1)).all()


def test_any_token_can_be_shown(tmp_path, figures):
    """No missing glyph (a warning, and a box in the picture), no formula, nothing overlong."""
    tokens = ["the", " quick", "中", "\\xe2", " transformations", "$x$", "$", "", "\x07", "\x9b"]
    plot_attention(maps(10), tokens, tmp_path / "a.png", layers=[2], heads=[1])
    labels = figures[0].axes[0].get_xticklabels()
    assert [label.get_text() for label in labels[1:5]] == [
        "␣quick",
        "U+4E2D",
        "\\xe2",
        "␣transfor…",
    ]
    assert [label.get_text() for label in labels[8:]] == ["\\x07", "\\x9b"]
    assert_apart(labels)


def test_maps_that_are_not_there(tmp_path):
    for options in (dict(layers=[1]), dict(heads=[3]), dict(heads=[-1]), dict(heads=[])):
        with pytest.raises(ConfigError, match="layer"):
            plot_attention(maps(4), list("abcd"), tmp_path / "a.png", **options)
    assert list(tmp_path.iterdir()) == []


def test_the_maps_are_the_probabilities_of_the_model():
    cfg = tiny(edits=(LayerEdit(start=1, set={"attention.window": 3}),))
    params = init_params(cfg, jax.random.key(0))
    found = attention_maps(cfg, params, range(8), [1, 0])
    assert list(found) == [1, 0]
    for probs_NTS in found.values():
        assert probs_NTS.shape == (cfg.attention.n_heads, 8, 8)
        np.testing.assert_allclose(probs_NTS.sum(-1), 1, atol=1e-6)
        assert (probs_NTS[:, ~np.tri(8, dtype=bool)] == 0).all(), "the future"
    assert (found[1][:, np.tri(8, k=-3, dtype=bool)] == 0).all(), "past the window"
    assert (found[0][:, np.tri(8, dtype=bool)] > 0).all()


def test_texts_and_layers_that_have_no_maps():
    cfg = tiny()
    params = init_params(cfg, jax.random.key(0))
    for ids in ([], range(cfg.context_length + 1)):
        with pytest.raises(ConfigError, match=rf"{len(ids)} tokens.*{cfg.context_length}"):
            attention_maps(cfg, params, ids, [0])
    with pytest.raises(ConfigError, match=rf"no layer 7; fix: 0 to {cfg.n_layers - 1}"):
        attention_maps(cfg, params, [1], [7])


def test_what_cannot_be_drawn_leaves_the_old_picture(tmp_path, monkeypatch):
    some, path = list(records(3)), tmp_path / "loss.png"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(plots, "write_synced", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(ResourceError, match=r"loss\.png cannot be written: full"):
            plot_losses(some, path, name="a")
    with pytest.raises(ResourceError, match="No such file"):
        plot_losses(some, tmp_path / "absent" / "loss.png", name="a")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="fix: pip install matplotlib"):
        plot_losses(some, path, name="a")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_drawing_leaves_pyplot_alone(tmp_path):
    before = "matplotlib.pyplot" in sys.modules
    plot_losses(list(records(3)), tmp_path / "loss.png", name="a")
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_an_attention_without_probabilities():
    import dataclasses

    @dataclasses.dataclass(frozen=True)
    class Silent(GQA):
        def build(self, dims, name=None):
            return super().build(dims, name="renamed")

    cfg = tiny(attention=Silent(2))
    params = init_params(cfg, jax.random.key(0))
    with pytest.raises(ConfigError, match=r"Silent shows no attention: no such site: .*block_0"):
        attention_maps(cfg, params, [1, 2], [0])
