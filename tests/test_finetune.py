# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning a real, small model on another text: it gets better, and resumes to the same bits."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from jaxgpt import cli
from jaxgpt.study import runs
from jaxgpt.train.files import read_metrics
from jaxgpt.train.stepfolder import read_meta, step_folders

STEPS = 20
WORDS = (
    "--data.path=text.txt",
    "--model.context_length=64",
    "--model.dropout=0.1",
    f"--train.steps={STEPS}",
    "--train.batch_size=8",
    "--train.eval_every=10",
    "--train.save_every=10",
    "--optim.lr=1e-3",
    "--optim.warmup_steps=2",
    "--show.sample_tokens=1",
    "--show.pictures=false",
)
LORA = ("--lora.rank=8", "--lora.targets=attention/*", "--optim.lr=1e-2")


@pytest.fixture(scope="module")
def place(shared, tmp_path_factory):
    """A folder with 100 kB of Shakespeare."""
    folder = tmp_path_factory.mktemp("tuned")
    text = (shared / "data/tinyshakespeare.txt").read_bytes()
    (folder / "text.txt").write_bytes(text[:100_000])
    return folder


def train(place, shared, *words) -> int:
    model = f"--init-from={shared / 'data/stories260k'}"
    with contextlib.chdir(place):
        return cli.train_main([model, *WORDS, *words])


def losses(run: Path) -> dict[int, float]:
    records = read_metrics(run / "metrics.jsonl")
    key = "val_nats_per_token"
    return {record["step"]: record[key] for record in records if key in record}


def digest(run: Path) -> dict[str, str]:
    return read_meta(step_folders(run / "checkpoints")[STEPS], STEPS)["digest"]


def check_frozen(run: Path) -> None:
    """Of a run with adapters they alone have changed."""
    steps = step_folders(run / "checkpoints")
    first, last = (read_meta(steps[step], step)["digest"] for step in (10, STEPS))
    params = {path for path in last if path.startswith("params/")}
    adapters = {path for path in params if path.startswith("params/lora/")}
    assert len(adapters) == 2 * 4 * 5  # a and b of q, k, v and out in five blocks
    assert {path for path in params if first[path] != last[path]} == adapters


def stop(self, step, params, metrics):
    """In the place of the hook that samples: a signal at the first evaluation behind the start."""
    if step == 10:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    "words", [(), pytest.param(LORA, marks=pytest.mark.slow)], ids=["all", "lora"]
)
def test_it_gets_better_and_resumes_exactly(place, shared, monkeypatch, words):
    name = "lora" if words else "all"
    assert train(place, shared, *words, f"--run={name}") == 0
    whole = place / "runs" / name
    loss = losses(whole)
    assert list(loss) == [0, 10, STEPS]
    assert loss[STEPS] < loss[10] < loss[0] - 1, loss
    with monkeypatch.context() as patch:
        patch.setattr(runs.Sampler, "__call__", stop)
        assert train(place, shared, *words, f"--run={name}-cut") == 143
    cut = place / "runs" / f"{name}-cut"
    assert list(step_folders(cut / "checkpoints")) == [10]
    assert train(place, shared, *words, f"--run={name}-cut") == 0
    assert digest(cut) == digest(whole)
    assert losses(cut) == loss
    if words:
        check_frozen(whole)
