# SPDX-License-Identifier: Apache-2.0
import sys
import types

import pytest

from jaxgpt.errors import ConfigError
from jaxgpt.study.loggers import TensorBoard, WandB

RECORDS = [
    {"step": 10, "tokens": 640, "loss_nats": 2.5, "lr": 1e-3},
    {"step": 20, "tokens": 1280, "val_nats_per_token": 2.25},
]


@pytest.fixture
def wandb(monkeypatch):
    """A module of that name, which notes what it is asked for."""
    calls = []
    run = types.SimpleNamespace(
        log=lambda numbers, step: calls.append((step, numbers)),
        finish=lambda: calls.append("finish"),
    )

    def init(**options):
        calls.append(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, calls=calls))
    return calls


def test_wandb_gets_config_records_and_an_end(tmp_path, wandb):
    folder = tmp_path / "mine"
    folder.mkdir()
    logger = WandB(folder, "project", {"train": {"steps": 20}})
    for record in RECORDS:
        logger(record)
    logger.close()
    options, *records, end = wandb
    assert options["project"] == "project" and options["name"] == "mine"
    assert options["config"] == {"train": {"steps": 20}} and options["dir"] == str(folder)
    assert records == [
        (10, {"tokens": 640, "loss_nats": 2.5, "lr": 1e-3}),
        (20, {"tokens": 1280, "val_nats_per_token": 2.25}),
    ]
    assert end == "finish"


def test_wandb_goes_on_with_the_same_run(tmp_path, wandb):
    for name in ("a", "a", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
        WandB(tmp_path / name, "project", {})
    first, again, other = [options["id"] for options in wandb]
    assert first == again != other and len(first) == 16
    assert {options["resume"] for options in wandb} == {"allow"}


def test_wandb_that_does_not_start(tmp_path, monkeypatch):
    def init(**options):
        raise RuntimeError("api_key not configured\n(no-tty)")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with pytest.raises(ConfigError, match=r"configured \(no-tty\); fix: wandb login"):
        WandB(tmp_path, "project", {})


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"--show\.wandb needs .*fix: pip install wandb"):
        WandB(tmp_path, "project", {})
    with pytest.raises(ConfigError, match=r"--show\.tensorboard .*fix: pip install tensorboardX"):
        TensorBoard(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_event_files(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    logger = TensorBoard(tmp_path)
    assert list(tmp_path.iterdir()) == [], "a finished run is left alone"
    logger.close()
    for record in RECORDS:
        logger(record)
    logger.close()
    (file,) = tmp_path.iterdir()
    content, events = file.read_bytes(), []
    while content:  # length, its checksum, the event, its checksum
        length = int.from_bytes(content[:8], "little")
        events.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    found = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert found == [
        (10, "tokens", 640),
        (10, "loss_nats", 2.5),
        (10, "lr", pytest.approx(1e-3)),
        (20, "tokens", 1280),
        (20, "val_nats_per_token", 2.25),
    ]
    assert any(e.step == 10 and e.session_log.status for e in events), "hides what was interrupted"
