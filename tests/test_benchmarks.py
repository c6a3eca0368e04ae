# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of speed run whole at a tiny size; what they share holds what it says."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from jaxgpt.costs import Cost
from jaxgpt.study.machine import Limits

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
OURS = ("harness", "drawing", "serve", "training", "decoding", "roofline", "scaling", "planning")
OURS += ("capture",)
QUICK = ("--rounds=1", "--turn-seconds=0.001", "--largest=256", "--bytes=65536")


@pytest.fixture
def load(monkeypatch):
    """Imports a benchmark as its folder sees it, and forgets it afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    def module(name):
        found = importlib.import_module(name)
        monkeypatch.setattr(importlib.import_module("harness"), "tune_cpu", lambda: True)
        return found

    yield module
    for name in OURS:
        sys.modules.pop(name, None)


def run(load, name, tmp_path, *words):
    file = tmp_path / "out.json"
    load(name).main(["--shape=tiny", *QUICK, f"--out={file}", *words])
    return json.loads(file.read_text())


PEER = """
import sys
sys.path.insert(0, {folder!r})
from serve import serve
def start(settings):
    print("noise on stdout")
    return {{"named": settings["name"]}}, {{"steps": lambda n: {{"seconds": 0.25 * n}}}}
serve(start)
"""


@pytest.fixture
def peer(load, tmp_path, monkeypatch):
    """A peer that says that each step takes a quarter of a second."""
    harness = load("harness")
    script = tmp_path / "peer.py"
    script.write_text(PEER.format(folder=str(FOLDER)))
    monkeypatch.setattr(harness, "HERE", FOLDER)
    return lambda **settings: harness.Peer(sys.executable, str(script), settings)


def test_peers_answer_line_by_line(peer, capfd):
    one = peer(name="fake")
    assert one.facts == {"named": "fake"}
    assert [one.ask(what="steps", n=n)["seconds"] for n in (1, 3)] == [0.25, 0.75]
    one.close()
    assert one._process.returncode == 0
    assert "noise" in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="ended with 1"):
        peer(nameless=True)
    assert "KeyError" in capfd.readouterr().err


def test_competitors_run_by_turns_and_are_compared(load):
    harness = load("harness")
    order = []

    def turn(name, seconds):
        return lambda: order.append(name) or seconds

    cost, limits = Cost(flops=1e9, weight_bytes=1e9), Limits("float32", 2e9, 4e9, 4e9)
    table = harness.compete(
        "title",
        [
            harness.Competitor("ours", turn("a", 1.0), cost, 10, ours=True, facts={"note": "n"}),
            harness.Competitor("theirs", turn("b", 2.0), cost, 10),
        ],
        limits,
        rounds=2,
    )
    assert order == ["a", "b", "a", "b"]
    assert [row["ratio"] for row in table["rows"]] == [{"theirs": 2.0}, {}]
    assert [row["share_of_limit"] for row in table["rows"]] == [0.5, 0.25]
    text = harness.markdown(table)
    assert "| ours | 1,000 | 1,000 | 0% | 10 | 1 | 50.0% | 1 | 25.0% | theirs 2.00 |" in text
    assert text.endswith("\nours: n") and "2 GFLOP/s in float32, read 4 GB/s" in text


def test_units_fill_a_turn(load):
    asked = []

    def run(n):
        asked.append(n)
        return 0.1

    turn = load("harness").in_turns(run, 1.0)
    assert turn() == 0.1 and asked == [1, 10]


def test_training_runs(load, tmp_path, monkeypatch):
    training = load("training")
    monkeypatch.setattr(training, "peers", lambda *_: [("fake", sys.executable, {"name": "fake"})])
    script = tmp_path / "peer.py"
    script.write_text(PEER.format(folder=str(FOLDER)))
    whole = training.Peer
    monkeypatch.setattr(training, "Peer", lambda python, _, how: whole(python, str(script), how))
    record = run(load, "training", tmp_path)
    rows = record["tables"][0]["rows"]
    assert [row["name"] for row in rows] == ["jaxgpt, 1 a dispatch", "fake"]
    assert all(row["ms_best"] > 0 and row["gflops"] > 0 for row in rows)
    assert rows[1]["named"] == "fake" and rows[0]["ratio"]["fake"] > 0
    assert record["machine"]["jax"] and record["commit"] and record["tables"][0]["limits"]


def test_shapes_of_training_are_those_of_the_peers(load):
    training = load("training")
    from jaxgpt.flops import count_params

    sizes = {
        name: sum(count_params(shape.model).values()) for name, shape in training.SHAPES.items()
    }
    assert sizes["notes"] == 632_032  # PyTorch's model with 96 characters
    assert sizes["nanogpt-cpu"] == 804_096  # with the positions, which nanoGPT's print leaves out
    assert sizes["gpt2-124m"] == 124_373_760  # nanoGPT without biases, 50,304 rows
    options = type("Options", (), {})()
    options.nanogpt, options.nanogpt_python, options.torch_python = "checkout", None, "python"
    options.modes = ["eager", "compiled"]
    found = [*training.peers(options, training.SHAPES["notes"], 32)]
    names = [name for name, _, _ in found]
    assert names == ["nanoGPT eager", "nanoGPT compiled", "PyTorch eager", "PyTorch compiled"]
    assert [settings["compile"] for _, _, settings in found] == [False, True] * 2
    assert "checkout" not in found[2][2] and found[0][2]["n_embd"] == 128


def test_decoding_runs(load, tmp_path):
    record = run(load, "decoding", tmp_path)
    titles = [table["title"] for table in record["tables"]]
    assert [title.split(", ")[-1] for title in titles] == [
        "prefill of 8 tokens",
        "decode of 6 tokens behind 3",
    ]
    for table in record["tables"]:
        assert [row["name"] for row in table["rows"]] == ["jaxgpt float32", "jaxgpt int8"]
    float32, int8 = (row["weights"] for row in record["tables"][1]["rows"])
    assert float32 > 3.9 and int8 < float32


def test_times_without_a_cache_are_summed_over_lengths(load):
    decoding = load("decoding")
    assert decoding.summed([0, 10], [1.0, 3.0]) == 2.0
    assert decoding.summed([0, 10, 20], [1.0, 3.0, 3.0]) == 2.5


@pytest.mark.slow
def test_roofline_and_scaling_draw(load, tmp_path):
    figure = tmp_path / "roofline.png"
    record = run(load, "roofline", tmp_path, f"--figure={figure}")
    assert figure.read_bytes().startswith(b"\x89PNG")
    names = [row["name"] for row in record["tables"][0]["rows"]]
    assert names == ["training, 1 x 32", "prefill, 1 x 16", "decode, batch 1", "decode, batch 2"]
    figures = [tmp_path / name for name in ("times.png", "memory.png")]
    words = [
        f"--{kind}={file}" for kind, file in zip(("figure", "memory-figure"), figures, strict=True)
    ]
    record = run(load, "scaling", tmp_path, *words)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in figures)
    assert set(record["memory_bytes"]) == {"chunked", "reference"}
    assert [row["value"] for row in record["tables"][0]["rows"]] == [1, 2]


@pytest.mark.slow
def test_capture_runs(load, tmp_path):
    tables = run(load, "capture", tmp_path)["tables"]
    titles = [table["title"].split(":")[0] for table in tables]
    assert titles == ["forward pass", "loss and gradients"]
    for table in tables:
        without, captured = table["rows"]
        assert without["ratio"] == {} and captured["ratio"]["without"] > 0


@pytest.mark.slow
def test_planning_compares(load, tmp_path):
    tables = tmp_path / "tables.md"
    record = run(load, "planning", tmp_path, f"--markdown={tables}")
    assert [row["devices"] for row in record["memory"]] == [1, 4]
    assert all(abs(row["error"]) < 0.25 for row in record["memory"])
    assert record["memory"][0]["resident"] > 0
    (timed,) = record["time"]
    assert timed["fitted"] and abs(timed["error"]) < 0.2 and record["efficiency"]["products"] > 0
    text = tables.read_text()
    assert "| memory of a step |" in text and "| time of a step |" in text
