# SPDX-License-Identifier: Apache-2.0
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import MICRO, ROOT, TEXT, error_line

from jaxgpt import cli
from jaxgpt.config import from_yaml
from jaxgpt.presets import MODELS, RUNS
from jaxgpt.train import loop
from jaxgpt.train.runfolder import RunFolder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory; training is a note of what was asked for."""
    monkeypatch.chdir(tmp_path)
    calls = []

    def fit(folder, model, data, optim, train, *, lora, mesh, weights, **more):
        hooks, listeners, endings = (more[name] for name in ("hooks", "listeners", "endings"))
        assert lora.rank is None and weights is None
        assert (folder.path / ".lock").read_text().startswith(f"pid {os.getpid()} ")
        assert len(hooks) == 1 and len(endings) == 2 and not listeners
        calls.append((folder.path.name, model, data, optim, train))

    monkeypatch.setattr(loop, "fit", fit)
    return calls


def saved(name: str) -> None:
    """As if the run had saved a step."""
    (RunFolder(Path("runs", name)).checkpoints_path / "step_00000002").mkdir(parents=True)


def test_preset_options_and_run_name(folder):
    assert cli.train_main([]) == 0
    assert cli.train_main(["--preset", "gpt2-124m", "--model.n_layers=6"]) == 0
    assert cli.train_main(["--preset=tiny", "--run=mine", "--optim.lr", "1e-3"]) == 0
    assert [call[0] for call in folder] == ["tiny", "gpt2-124m", "mine"]
    assert folder[0][1:] == tuple(vars(RUNS["tiny"]()).values())[:4]
    assert folder[1][1].n_layers == 6 and folder[2][3].lr == 1e-3
    assert from_yaml(Path("runs/gpt2-124m/config.yaml").read_text()).model == folder[1][1]


def test_print_config_is_a_config_file(folder, capsys):
    assert cli.train_main(["--preset=tiny", "--train.seed=7", "--print_config"]) == 0
    printed = capsys.readouterr().out
    Path("run.yaml").write_text(printed)
    assert cli.train_main(["--config=run.yaml", "--train.steps=900"]) == 0
    assert folder[0][0] == "run" and (folder[0][4].seed, folder[0][4].steps) == (7, 900)
    assert folder[0][1] == RUNS["tiny"]().model
    assert not Path("runs/tiny").exists()


def test_a_box_from_the_current_folder(folder, monkeypatch):
    Path("my_norm.py").write_text(
        "import dataclasses\nfrom jaxgpt.boxes.norm import RMSNorm\n"
        "@dataclasses.dataclass(frozen=True)\nclass Mine(RMSNorm):\n    power: int = 2\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.train_main(["--model.norm=my_norm.Mine", "--model.norm.power=3"]) == 0
    assert type(folder[0][1].norm).__name__ == "Mine" and folder[0][1].norm.power == 3
    sys.modules.pop("my_norm")


def test_the_same_command_goes_on_and_another_is_refused(folder, capsys):
    words = ["--preset=tiny", "--optim.lr=2e-3"]
    assert cli.train_main(words) == 0
    saved("tiny")
    assert cli.train_main(words) == 0
    before = Path("runs/tiny/config.yaml").read_text()
    assert cli.train_main([*words, "--train.batch_size=6", "--model.norm=LayerNorm"]) == 2
    line = error_line(capsys)
    assert "train.batch_size: 12 -> 6" in line and "fix: --run=ANOTHER_NAME" in line
    assert "model.norm: RMSNorm(eps=1e-05, one_plus=False) -> LayerNorm(" in line
    assert Path("runs/tiny/config.yaml").read_text() == before and len(folder) == 2


def test_free_keys_may_change_and_the_first_start_stays_on_record(folder):
    assert cli.train_main(["--preset=tiny"]) == 0
    saved("tiny")
    before = Path("runs/tiny/config.yaml").read_text()
    free = ["--train.steps=9999", "--train.keep=9", "--train.save_every=9", "--train.log_every=9"]
    free += ["--train.eval_every=9", "--show.prompt=a", "--show.sample_tokens=9"]
    assert cli.train_main(["--preset=tiny", *free]) == 0
    assert folder[1][4].steps == 9999
    assert Path("runs/tiny/config.yaml").read_text() == before


def test_a_run_goes_on_by_its_name_alone(folder):
    assert cli.train_main(["--preset=tiny", "--run=mine", "--optim.lr=2e-3"]) == 0
    saved("mine")
    assert cli.train_main(["--run=mine", "--train.steps=2000"]) == 0
    assert (folder[1][3].lr, folder[1][4].steps) == (2e-3, 2000)


def test_a_run_that_never_saved_may_be_given_other_values(folder):
    assert cli.train_main(["--preset=tiny"]) == 0
    run = RunFolder(Path("runs/tiny"))
    run.tokenizer_path.touch()
    run.facts_path.touch()
    assert cli.train_main(["--preset=tiny"]) == 0
    assert run.tokenizer_path.exists(), "nothing changed"
    assert cli.train_main(["--preset=tiny", "--data.tokenizer=byte"]) == 0
    assert from_yaml(run.config_path.read_text()).data.tokenizer == "byte"
    assert not run.tokenizer_path.exists() and not run.facts_path.exists(), "made for the other"


def test_a_run_in_use(folder, capsys):
    assert cli.train_main(["--preset=tiny"]) == 0
    with RunFolder(Path("runs/tiny")).lock():
        assert cli.train_main(["--preset=tiny"]) == 5
    assert "in use by pid" in error_line(capsys)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--presett=tiny"], "did you mean --preset?"),
        (["--preset=tinny"], "did you mean --preset=tiny?"),
        (["--preset=zzz"], "one of tiny, shakespeare, wikitext2-char, gpt2-124m"),
        (["--model.n_layer=3"], "did you mean --model.n_layers?"),
        (["--preset"], "--preset: expected one argument"),
        (["--device=tpux"], "'cpu', 'gpu', 'tpu'"),
        (["--run=a b"], "is no run name"),
        (["--config=no.yaml"], "cannot read no.yaml"),
        (["--train.dtype=fp16"], "train.dtype=fp16 is not one of float32, bfloat16"),
        (["--optim.lr=-1"], "lr=-1.0 must be positive"),
        (["--model.attention.n_heads=3"], "d_model=128 is not divisible by n_heads=3"),
        (["stray"], "unexpected argument 'stray'"),
        (["--profile=9:3"], "profile=9:3 is no range of steps"),
    ],
)
def test_mistakes_end_with_2_and_one_line(folder, capsys, words, message):
    assert cli.train_main(words) == 2
    assert message in error_line(capsys)
    assert folder == [] and not Path("runs").exists()


def test_params_counts_the_true_vocabulary(folder, capsys):
    assert cli.main(["params", "gpt2"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"total +124,439,808\n", text) and re.search(r"embed +38,597,376", text)
    assert cli.main(["params", "gpt2", "--model.n_layers=1", "--model.ffn=GatedMLP"]) == 0
    assert "total" in capsys.readouterr().out
    assert cli.main(["params", "tiny", "--model.vocab_size=65"]) == 0
    capsys.readouterr()
    assert cli.main(["params", "tiny"]) == 2
    assert "vocab_size is None" in error_line(capsys)
    assert cli.main(["params", "gpt-2"]) == 2
    assert "did you mean gpt2?" in error_line(capsys)


def test_params_of_experts_and_names(capsys):
    assert cli.main(["params", "mixtral-8x7b"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"total +46,702,792,704\nused by one token +12,879,925,248 +27.6%\n", text)
    assert cli.main(["params", "--help"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\n  llama3-8b +Llama 3 8B: 8,030,261,248 parameters, as meta-llama/", text)
    assert all(f"\n  {name} " in text for name in {**RUNS, **MODELS})


def test_console_script(folder, capsys):
    assert cli.main([]) == cli.main(["--help"]) == 0
    assert "jaxgpt params" in capsys.readouterr().out
    assert cli.main(["trian"]) == 2
    assert "did you mean train?" in error_line(capsys)
    assert cli.main(["train", "--preset=tiny"]) == 0 and len(folder) == 1


@pytest.mark.slow
def test_training_outlives_its_reader(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    words = " ".join(["--preset=tiny", *MICRO])
    for name, redirect in (("pipe", "| head -1"), ("closed", ">&-"), ("full", ">/dev/full")):
        command = f'set -o pipefail; "$0" {ROOT}/train.py --run={name} {words} {redirect}'
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        out = subprocess.run(
            ["bash", "-c", command, sys.executable],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert (out.returncode, out.stderr) == (0, "")
        assert (tmp_path / "runs" / name / "checkpoints" / "step_00000004").is_dir()
