# SPDX-License-Identifier: Apache-2.0
"""What the train command shows beside numbers, and the plot command, on one micro run."""

import os
import shutil
import sys
import types
from pathlib import Path

import pytest
from commandline import MICRO, TEXT, error_line

from jaxgpt import cli
from jaxgpt.config import RunConfig, from_yaml
from jaxgpt.study import plots, runs
from jaxgpt.study.config import ShowConfig
from jaxgpt.train.files import read_metrics

PLAIN = [word for word in MICRO if not word.startswith("--show.")]
SHOWN = ["--preset=tiny", *PLAIN, "--show.prompt=the ", "--show.sample_tokens=20"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with one finished micro run, and what it printed."""
    path = tmp_path_factory.mktemp("shown")
    (path / "text.txt").write_text(TEXT)
    before, lines = os.getcwd(), []
    os.chdir(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda line, **_: lines.append(line))
        try:
            assert cli.train_main(SHOWN) == 0
        finally:
            os.chdir(before)
    return path, lines


@pytest.fixture
def copy(trained, tmp_path, monkeypatch):
    """A copy of that folder to work in."""
    shutil.copytree(trained[0], tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy" / "runs" / "tiny"


def test_a_sample_at_every_evaluation(trained):
    path, lines = trained
    samples = read_metrics(path / "runs/tiny/samples.jsonl")
    assert [sample["step"] for sample in samples] == [2, 4]
    assert all(sample["prompt"] == "the " and len(sample["text"]) == 20 for sample in samples)
    assert all(set(sample["text"]) <= set(TEXT) for sample in samples)
    for sample in samples:
        assert f"step {sample['step']}  sample: {'the ' + sample['text']!r}" in lines


def test_pictures_at_the_end(trained):
    path, lines = trained
    for name in ("loss.png", "attention.png"):
        picture = path / "runs" / "tiny" / name
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert lines.index(f"drew {picture}") > lines.index("saved step 4"), "first the checkpoint"


def test_a_finished_run_is_not_drawn_again(copy, capsys):
    before = {path: path.stat().st_mtime_ns for path in copy.iterdir()}
    assert cli.train_main([*SHOWN, "--show.prompt=fox"]) == 0
    assert "nothing is done" in capsys.readouterr().out
    del before[copy / ".lock"]
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())


def test_going_on_keeps_the_samples_once(copy):
    with (copy / "samples.jsonl").open("a") as file:  # of steps that were lost, one line torn
        file.write('{"step": 6, "prompt": "lost", "text": ""}\n{"step": 8, "prompt')
    assert cli.train_main([*SHOWN, "--train.steps=6", "--show.prompt=fox"]) == 0
    samples = read_metrics(copy / "samples.jsonl")
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [
        (2, "the "),
        (4, "the "),
        (6, "fox"),
    ]


def test_what_is_shown_never_stops_a_run(copy, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plots, "write_synced", full)
    assert cli.train_main([*SHOWN, "--train.steps=6", "--show.prompt=né"]) == 0
    out = capsys.readouterr().out
    assert out.count("warning: no sample: ") == 1 and "'é' (U+00E9)" in out
    for name in ("loss.png", "attention.png"):
        assert f"warning: no {name}: {name} cannot be written: No space left" in out
    assert (copy / "checkpoints" / "step_00000006").is_dir()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.train_main([*SHOWN, "--train.steps=7"]) == 0
    assert "warning: no loss.png: pictures need matplotlib" in capsys.readouterr().out


def test_loggers_get_the_records_and_may_fail(copy, capsys, monkeypatch):
    records, ends = [], []

    def log(numbers, step):
        records.append(step)
        if step == 6:
            raise RuntimeError("offline")

    run = types.SimpleNamespace(log=log, finish=lambda: ends.append(1))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run))
    words = [*SHOWN, "--train.steps=8", "--show.wandb=project", "--train.log_every=1"]
    assert cli.train_main([*words, "--show.sample_tokens=0", "--show.pictures=false"]) == 0
    assert "warning: WandB gets no more records: offline" in capsys.readouterr().err
    assert records == [5, 6] and ends == [1]
    steps = [record["step"] for record in read_metrics(copy / "metrics.jsonl")]
    assert steps[-6:] == [5, 6, 6, 7, 8, 8]


def test_a_missing_logger_ends_with_2_before_training(copy, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert cli.train_main(["--run=new", *SHOWN, "--show.wandb=project"]) == 2
    assert "fix: pip install wandb" in error_line(capsys)
    assert not Path("runs/new/tokens").exists()


def test_configurations_without_the_group_have_its_defaults():
    assert from_yaml("train: {steps: 500}").show == ShowConfig() == RunConfig().show


@pytest.mark.parametrize(
    "word, message",
    [
        ("--show.sample_tokens=-1", "sample_tokens=-1 is below 0; fix: 0: no samples"),
        ("--show.wandb=", "--show.wandb=PROJECT"),
        ("--show.tensorbord=true", "did you mean --show.tensorboard?"),
        ("--show.pictures=maybe", "show.pictures=maybe is not bool"),
    ],
)
def test_mistakes(tmp_path, capsys, monkeypatch, word, message):
    monkeypatch.chdir(tmp_path)
    assert cli.train_main([word]) == 2
    assert message in error_line(capsys)


def test_plot_draws_what_is_asked_for(copy, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(runs, "plot_attention", lambda *a, **options: drawn.append((a, options)))
    (copy / "loss.png").unlink()
    words = ["--text=fox dog", "--layers", "0", "--heads", "1", "0", "--checkpoint=best"]
    assert cli.main(["plot", "tiny", *words]) == 0
    assert capsys.readouterr().out == f"{copy / 'loss.png'}\n{copy / 'attention.png'}\n"
    assert (copy / "loss.png").exists()
    (maps, tokens, _), options = drawn[0]
    assert tokens == list("fox dog") and maps[0].shape == (2, 7, 7)
    assert options == dict(layers=[0], heads=[1, 0], name="tiny")
    assert cli.main(["plot"]) == 0, "the newest run, its validation text"
    (_, tokens, _), options = drawn[1]
    assert len(tokens) == 16 and "".join(tokens) in TEXT
    assert (options["layers"], list(options["heads"])) == ([0], [0, 1])


@pytest.mark.parametrize(
    "words, code, message",
    [
        (["nope"], 4, "fix: --run with one of tiny"),
        (["--layers", "0", "3"], 2, "no layer 3; fix: 0 to 0"),
        (["--heads", "2"], 2, "no map of layer 0, head 2; fix: there are 2 heads"),
        (["--heads", "x"], 2, "invalid int value: 'x'"),
        (["--text=né"], 2, "'é' (U+00E9)"),
        (["--text=the quick brown fox"], 2, "a text of 19 tokens, the context is 16"),
        (["--checkpoint=3"], 4, "no step 3"),
        (["--head", "1"], 2, "unknown name --head"),
    ],
)
def test_plot_mistakes(copy, capsys, words, code, message):
    assert cli.main(["plot", *words]) == code
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
