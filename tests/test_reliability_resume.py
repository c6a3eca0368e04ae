# SPDX-License-Identifier: Apache-2.0
"""Going on to the very same bits, in the same process, on other devices, and never by accident.

Rows B1 to B6, B8, C11, I8 and case T07, beyond what test_loop.py does: stops at any step, a hash of
every batch, one device and eight. Stops of real processes are in test_reliability_faults.py.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path

import jax
import pytest
from checkpointing import run_python
from commandline import error_line
from commands import (
    ENV,
    LAST,
    LIMIT_S,
    TEXT,
    checkpoints,
    digest,
    make_run,
    steps,
    train,
    tree,
)

from jaxgpt.data.batches import Batches
from jaxgpt.train.files import read_metrics

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the run's helpers need Linux")


def records(folder: Path) -> list[dict]:
    """What was logged, without the clock."""
    found = read_metrics(folder / "runs/micro/metrics.jsonl")
    return [
        {k: v for k, v in r.items() if not re.search("wall_s|_per_s|mfu|_bytes", k)} for r in found
    ]


def losses(folder: Path) -> list[float]:
    return [r["loss_nats"] for r in records(folder) if "loss_nats" in r]


@pytest.fixture
def seen(monkeypatch):
    """Hashes of the training batches, in the order in which they are made."""
    return note_batches(monkeypatch.setattr)


def note_batches(set_attribute, stops=()):
    """Have each batch noted, and SIGTERM sent while that of one of these steps is made."""
    made, noted, left = Batches.batch, [], list(stops)

    def noting(self, step, *args):
        batch = made(self, step, *args)
        content = b"".join(bytes(x) for x in jax.tree.leaves(batch))
        noted.append([step, hashlib.sha256(content).hexdigest()])
        if left and step + 1 == left[0]:
            os.kill(os.getpid(), signal.SIGTERM)
            left.pop(0)
        return batch

    set_attribute(Batches, "batch", noting)
    return noted


# --- the same machine -----------------------------------------------------------------------------

MORE = ("--train.accumulate=2", "--train.save_every=100", "--train.dispatch=1")


@pytest.mark.parametrize("stops", [(1, 9), pytest.param((7, 8, 16, 19), marks=pytest.mark.slow)])
def test_stopped_anywhere_and_gone_on_with(fresh, monkeypatch, stops):
    """Case T07, rows B6, C11: at steps that save nothing by themselves; an epoch is eight steps."""
    noted = note_batches(monkeypatch.setattr, stops)
    for stop in stops:
        assert train(*MORE) == 143
        assert steps(fresh)[-1] == stop
    assert train(*MORE) == 0
    stopped = digest(fresh), records(fresh), list(noted)
    noted.clear()
    shutil.rmtree(fresh / "runs")
    assert train(*MORE) == 0
    assert (digest(fresh), records(fresh), noted) == stopped
    assert [step for step, _ in noted] == list(range(LAST))
    assert len({content for _, content in noted}) == LAST


def test_training_in_a_thread(finished, fresh):
    """Row I8: as a notebook does; no handler is touched."""
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    codes = []
    thread = threading.Thread(target=lambda: codes.append(train()))
    thread.start()
    thread.join()
    assert codes == [0] and digest(fresh) == digest(finished)
    assert before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]


# --- another number of devices --------------------------------------------------------------------

WIDE = ("--train.batch_size=8", "--train.save_every=10")
ON_DEVICES = """
import json, os, signal
from pathlib import Path
import jax
from commands import train
from test_reliability_resume import WIDE, note_batches
noted = note_batches(setattr, {stops})
for folder in {folders}:
    os.chdir(folder)
    codes = [train(*WIDE) for _ in range(1 + len({stops}))]
    Path("noted.json").write_text(json.dumps([jax.device_count(), codes, noted]))
    noted.clear()
"""


def on_devices(n, *folders, stops=()):
    """The runs in these folders, begun or gone on with on n devices in another process.

    Returns:
      The batches of each.
    """
    for folder in folders:
        folder.mkdir(exist_ok=True)
        (folder / "text.txt").write_text(TEXT)
    env = {name: value for name, value in ENV.items() if name != "PYTHONPATH"}
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={n}"
    code = ON_DEVICES.format(folders=list(map(str, folders)), stops=stops)
    code, _, err = run_python(code, limit_s=LIMIT_S, **env)
    assert code == 0 and err.count("\n") == err.count("error: stopped") == len(stops), err
    batches = []
    for folder in folders:
        devices, codes, noted = json.loads((folder / "noted.json").read_text())
        assert devices == n and codes == [143] * len(stops) + [0]
        batches.append(noted)
    return batches


def half(folder, target):
    """A copy of a finished run as it was after step 10."""
    shutil.copytree(folder, target)
    shutil.rmtree(checkpoints(target) / "step_00000020")
    return target


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A folder with runs on `one` device and on `eight`, and their batches."""
    folder = tmp_path_factory.mktemp("wide")
    with pytest.MonkeyPatch.context() as patch:
        noted = note_batches(patch.setattr)
        (folder / "one").mkdir()
        make_run(folder / "one", *WIDE)
    half(folder / "one", folder / "to eight")
    return folder, noted, on_devices(8, folder / "eight", folder / "to eight")


@pytest.mark.slow
def test_one_device_and_eight(wide, seen, monkeypatch):
    """Row B5: the same batches in the same order, and the same losses to 1e-5."""
    folder, batches, (eight, to_eight) = wide
    assert [step for step, _ in batches] == list(range(LAST))
    monkeypatch.chdir(half(folder / "eight", folder / "to one"))
    assert train(*WIDE) == 0
    assert batches == eight and batches[10:] == to_eight == seen
    want = losses(folder / "one")
    assert len(want) == LAST
    for other in ("eight", "to eight", "to one"):
        assert losses(folder / other) == pytest.approx(want, abs=1e-5)


@pytest.mark.slow
def test_eight_devices_and_four(wide, tmp_path):
    """Rows B5, B6: stopped twice bitwise on as many, and to 1e-5 on fewer."""
    folder, batches, _ = wide
    assert on_devices(8, tmp_path / "stopped", stops=(3, 12)) == [batches]
    assert digest(tmp_path / "stopped") == digest(folder / "eight")
    assert records(tmp_path / "stopped") == records(folder / "eight")
    assert on_devices(4, half(folder / "eight", tmp_path / "four")) == [batches[10:]]
    assert losses(tmp_path / "four") == pytest.approx(losses(folder / "one"), abs=1e-5)


# --- other values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("--model.n_layers=2", "model.n_layers: 1 -> 2"),  # B1
        ("--train.dtype=bfloat16", "train.dtype: 'float32' -> 'bfloat16'"),  # B2
        ("--optim.lr=0.02", "optim.lr: 0.01 -> 0.02"),  # B4
        ("--train.batch_size=8", "train.batch_size: 4 -> 8"),  # B8
        ("--train.accumulate=2", "train.accumulate: 1 -> 2"),
        ("--train.seed=1", "train.seed: 0 -> 1"),
    ],
)
def test_other_values_than_at_the_start(finished, monkeypatch, capfd, change, line):
    """Rows B1 to B4, B8, B10: refused in one line before anything is read."""
    monkeypatch.chdir(finished)
    before = tree(finished)
    assert train("--train.steps=40", change) == 2
    said = error_line(capfd)
    assert f"the run was started with other values: {line}" in said and "steps" not in said
    assert said.endswith("fix: --run=ANOTHER_NAME\n") and tree(finished) == before
