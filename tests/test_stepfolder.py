# SPDX-License-Identifier: Apache-2.0
import json
import random

import pytest
from checkpointing import names

from jaxgpt.errors import CheckpointError
from jaxgpt.train import stepfolder
from jaxgpt.train.stepfolder import BadStepError, make_meta, read_meta


@pytest.fixture
def step(tmp_path):
    """A step folder without arrays."""
    folder = tmp_path / "step_00000030"
    (folder / "meta").mkdir(parents=True)
    (folder / "commit_success.txt").write_text("x")
    meta = make_meta(30, {"params/w": "float32[2]:0123456789abcdef"}, 1.5, {"tokens": 2**40})
    (folder / "meta" / "metadata").write_text(json.dumps(meta))
    return folder


def test_meta_round_trip(step):
    meta = read_meta(step, 30)
    assert meta["val_loss"] == 1.5 and meta["extra"] == {"tokens": 2**40}
    assert make_meta(1, {}, float("nan"), {})["val_loss"] is None
    with pytest.raises(BadStepError, match="holds step 30"):
        read_meta(step, 31)


def test_flips_never_change_what_is_read(step):
    path = step / "meta" / "metadata"
    raw, whole, rng = path.read_bytes(), read_meta(step, 30), random.Random(1)
    refused = 0
    for _ in range(500):
        flipped = bytearray(raw)
        flipped[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            assert read_meta(step, 30) == whole
        except CheckpointError:
            refused += 1
    assert refused > 400


def test_putting_aside_finds_a_free_name_and_spares_link_targets(step):
    assert stepfolder.put_aside(step, "bad-30").name == "bad-30-1"
    step.symlink_to(step.parent / "bad-30-1")
    assert stepfolder.put_aside(step, "bad-30").name == "bad-30-2"
    assert (step.parent / "bad-30-1" / "commit_success.txt").exists()


def test_leftovers_are_deleted_and_nothing_else(step):
    root = step.parent
    for name in ("step_00000031.orbax-checkpoint-tmp", "trash-step_00000001-1", "notes", "99"):
        (root / name).mkdir()
    (root / "trash-link").symlink_to(step)
    stepfolder.delete_leftovers(root)
    assert names(root) == ["99", "notes", "step_00000030", "trash-link"]
    assert stepfolder.step_folders(root) == {30: step} and stepfolder.is_committed(step)
    stepfolder.delete_step(step)
    assert stepfolder.step_folders(root) == {}
