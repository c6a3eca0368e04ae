# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from their first cell to their last, without jupyter, on a small text."""

import ast
import dataclasses
import json
import math
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from jaxgpt.presets import RUNS

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(path, kind):
    book = json.loads(path.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_what_is_stored(path):
    """Small, without traces of the machine it ran on, with short texts between the cells."""
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < 300_000
    for place in ("/work", "/home", "/root", "/tmp", "/Users", "Traceback"):
        assert place not in text, place
    assert all(len(cell) < 600 for cell in cells(path, "markdown"))
    for code in cells(path, "code"):
        ast.parse(code)


@pytest.mark.slow
def test_decoder_only_wikitext2(tmp_path, monkeypatch, capsys):
    path = ROOT / "notebooks" / "decoder_only_wikitext2.ipynb"
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 100)
    monkeypatch.setenv("TEXT", str(text))
    monkeypatch.setenv("STEPS", "3")
    monkeypatch.setenv("NEW_CHARACTERS", "5")
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = {"__name__": "__main__"}
    try:
        for number, code in enumerate(cells(path, "code")):
            exec(compile(code, f"{path.name}, code cell {number}", "exec"), names)
        curve, attention = map(plt.figure, plt.get_fignums())
        line = curve.axes[0].lines[0]
        image, labels = attention.axes[0].images[0], attention.axes[0]
    finally:
        plt.close("all")

    preset = RUNS["wikitext2-char"]()
    losses, vocab_size = names["losses"], names["tokenizer"].vocab_size
    assert names["cfg"] == dataclasses.replace(preset.model, vocab_size=vocab_size)
    assert len(losses) == 3 and losses[2] < losses[0] and list(line.get_ydata()) == losses
    assert abs(losses[0] - math.log(vocab_size)) < 0.7
    assert names["score"].n_tokens == 450 - 1
    probs_TS = np.asarray(image.get_array())
    assert probs_TS.shape == (64, 64) and not np.triu(probs_TS, 1).any()
    assert np.allclose(probs_TS.sum(1), 1, atol=1e-5)
    assert (labels.get_xlabel(), labels.get_ylabel()) == ("key position", "query position")
    assert attention.axes[1].get_ylabel() == "attention probability"
    printed = capsys.readouterr().out
    assert "4,500 characters" in printed and "step   0  loss" in printed
    assert len(printed.rpartition(" nats per character\n")[2].removesuffix("\n")) == 1 + 5
    assert list(tmp_path.iterdir()) == [text]


@pytest.mark.slow
def test_inside(shared, monkeypatch, capsys):
    path = ROOT / "notebooks" / "inside.ipynb"
    monkeypatch.setenv("MODEL", str(shared / "data" / "stories260k"))
    matplotlib.use("Agg")
    names = {"__name__": "__main__"}
    for number, code in enumerate(cells(path, "code")):
        exec(compile(code, f"{path.name}, code cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "260,032 parameters, 5 layers, 8 heads" in printed
    stored = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in stored for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", ()) for output in outputs) == 6
    said = "".join("".join(output.get("text", ())) for output in outputs)
    lines = [line for line in said.splitlines() if "." not in line]  # but for rounded numbers
    assert len(lines) > 20 and set(lines) <= set(printed.splitlines())
    assert " Lily. Tim loved to play with his toys." in said and " Lily. Tim" in printed
    answers, found = names["ends"], names["found"]
    assert answers[1] > 6 and answers[0] < -4 and abs(found.total - answers[1]).max() < 1e-3
    assert (
        names["returned_LT"][2, [12, 14]].min() > 0.4
        and np.abs(names["returned_LT"][:, :10]).max() < 1e-3
    )
