# SPDX-License-Identifier: Apache-2.0
"""Damaged steps: flipped bits, lost and truncated files, folders that only look like steps."""

import os
import random
import shutil

import pytest
from checkpointing import WANTED, fill, names, state

from jaxgpt.errors import CheckpointError, ResourceError
from jaxgpt.train import stepfolder
from jaxgpt.train.checkpoint import Checkpoints
from jaxgpt.train.digest import digest


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("good"))


@pytest.fixture
def folder(good, tmp_path):
    """A copy of three good steps: 10, 20, 30."""
    return shutil.copytree(good, tmp_path / "checkpoints")


def newest(folder):
    return folder / "step_00000030"


def recover(folder, expect_step, go_on=True):
    """Restore; the values are those of the step, and damaged steps are named and moved aside."""
    lines = []
    with Checkpoints(folder, warn=lines.append) as checkpoints:
        found = checkpoints.restore(*WANTED)
        assert digest([found.params, found.rest]) == digest([*state(found.step)])
        if expect_step is not None:
            assert found.step == expect_step
        bad = [f"step {s}" for s in (10, 20, 30) if s > found.step]
        assert len(lines) == len(bad) and all("\n" not in line for line in lines)
        for line, step in zip(reversed(lines), bad, strict=True):
            assert step in line and f"using step {found.step}" in line and "moved to bad-" in line
        # After the fallback the same steps can be saved again.
        for step in (20, 30, 40) if go_on else ():
            checkpoints.save(step, *state(step))
        assert not go_on or checkpoints.restore(*WANTED).step == 40
        assert not go_on or {20, 30, 40} <= set(checkpoints.steps())
    return lines


def test_twenty_random_flipped_bits(good, tmp_path):
    rng = random.Random(0)
    files = sorted(
        (p for p in newest(good).rglob("*") if p.is_file()), key=lambda p: -p.stat().st_size
    )
    data = [p for p in files if p.parent.name == "d"]
    fell_back = 0
    for n in range(20):
        copy = shutil.copytree(good, tmp_path / f"{n}")
        path = copy / rng.choice(data[:6] if n < 12 else files).relative_to(good)
        raw = bytearray(path.read_bytes())
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
        with Checkpoints(copy, read_only=True, warn=lambda line: None) as checkpoints:
            found = checkpoints.restore(*WANTED)
        assert digest([found.params, found.rest]) == digest([*state(found.step)])
        assert found.step in (20, 30) and found.extra == {"tokens": found.step * 2**40}
        fell_back += found.step == 20
    assert fell_back >= 3


def test_a_flipped_value_names_the_array(folder, monkeypatch):
    # The storage below does not notice: the meta file of other values does the same.
    for item in ("params", "rest"):
        shutil.rmtree(newest(folder) / item)
        shutil.copytree(folder / "step_00000020" / item, newest(folder) / item)
    (line,) = recover(folder, 20)
    assert "params/block_0/scale fails its digest" in line


@pytest.mark.parametrize("damage", ["half", "empty", "byte", "absent"])
@pytest.mark.parametrize(
    "which",
    [
        "params/_METADATA",
        "params/manifest.ocdbt",
        "rest/manifest.ocdbt",
        "params/d/*",
        "rest/ocdbt.process_0/d/*",
        "meta/metadata",
        "_CHECKPOINT_METADATA",
        "params/_sharding",
        "params/array_metadatas/process_0",
    ],
)
def test_truncated_and_lost_files(folder, which, damage):
    path = max(newest(folder).glob(which), key=lambda p: p.stat().st_size)
    raw = path.read_bytes()
    if damage == "absent":
        path.unlink()
    else:
        path.write_bytes({"half": raw[: len(raw) // 2], "empty": b"", "byte": raw[:-1]}[damage])
    recover(folder, 20 if which == "meta/metadata" else None, go_on=damage == "half")


def test_every_small_file_is_empty_after_a_power_loss(folder):
    for path in newest(folder).rglob("*"):
        if path.is_file() and path.parent.name != "d":
            path.write_bytes(b"")
    recover(folder, 20)


def half_copied(folder):
    shutil.copytree(newest(folder), folder / "step_00000099")
    shutil.rmtree(folder / "step_00000099" / "params")


def link(folder):
    (folder / "step_00000099").symlink_to(newest(folder))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda f: (f / "step_00000099").mkdir(), "no commit_success.txt"),
        (lambda f: (f / "step_00000099").write_text("x"), "no commit_success.txt"),
        (half_copied, "holds step 30"),
        (link, "is a link"),
        (lambda f: shutil.copytree(newest(f), f / "step_00000099"), "holds step 30"),
    ],
)
def test_what_only_looks_like_the_newest_step(folder, make, reason):
    victim = digest_of_files(newest(folder))
    make(folder)
    lines = []
    with Checkpoints(folder, warn=lines.append) as checkpoints:
        assert checkpoints.restore(*WANTED).step == 30
    assert len(lines) == 1 and reason in lines[0] and "step 99" in lines[0]
    assert names(folder)[0] == "bad-99-1" and "step_00000099" not in names(folder)
    assert digest_of_files(newest(folder)) == victim


def digest_of_files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_stands_in_the_way_of_a_save_is_moved(folder):
    (folder / "step_00000040").mkdir()
    lines = []
    with Checkpoints(folder, warn=lines.append) as checkpoints:
        checkpoints.save(40, *state(40))
    assert "step 40 is damaged" in lines[0]
    assert Checkpoints(folder, read_only=True).restore(*WANTED).step == 40


def test_missing_commit_file_and_foreign_names(folder):
    (newest(folder) / "commit_success.txt").unlink()
    for name in ("99", "foo", "step_1", "step_00000050.orbax-checkpoint-tmp"):
        (folder / name).mkdir()
    with Checkpoints(folder, read_only=True) as checkpoints:
        assert checkpoints.steps() == [10, 20]
    recover(folder, 20)
    assert "step_00000050.orbax-checkpoint-tmp" not in names(folder)


@pytest.mark.parametrize("read_only", [True, False])
def test_all_damaged(folder, read_only):
    for step in folder.iterdir():
        (step / "meta" / "metadata").write_text("{")
    before = digest_of_files(folder)
    with Checkpoints(folder, read_only=read_only) as checkpoints:
        with pytest.raises(CheckpointError, match=r"step 30: .*, step 20: .*, step 10: ") as error:
            checkpoints.restore(*WANTED)
        with pytest.raises(CheckpointError, match="no usable checkpoint: step 20"):
            checkpoints.restore(*WANTED, step=20)
    assert error.value.exit_code == 4 and "\n" not in str(error.value)
    assert digest_of_files(folder) == before


def test_reading_only_moves_nothing(folder):
    (newest(folder) / "meta" / "metadata").write_text("{")
    before = digest_of_files(folder)
    lines = []
    with Checkpoints(folder, read_only=True, warn=lines.append) as checkpoints:
        assert checkpoints.restore_params(WANTED[0]).step == 20
    assert len(lines) == 1 and "moved" not in lines[0]
    assert digest_of_files(folder) == before


def test_a_newer_format_is_refused_not_moved(folder, monkeypatch):
    monkeypatch.setattr(stepfolder, "FORMAT_VERSION", 2)
    monkeypatch.setattr(stepfolder, "FORMAT_SINCE", "9.1")
    fill(folder, steps=[40])
    monkeypatch.undo()
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(CheckpointError, match=r"written by jaxgpt .*, needs >= 9\.1") as error:
            checkpoints.restore(*WANTED)
        checkpoints.save(50, *state(50))  # looks for the best step among all
    assert error.value.exit_code == 4 and "step_00000040" in names(folder)


def test_future_file_times_do_not_count(folder):
    os.utime(folder / "step_00000010", (4e9, 4e9))
    assert Checkpoints(folder, read_only=True).restore(*WANTED).step == 30


def test_a_step_deleted_while_it_is_read(folder, monkeypatch):
    checkpoints = Checkpoints(folder, read_only=True)
    read = checkpoints._storage.read
    deleted = iter([30, 20])

    def deleting(step, wanted):
        if (number := next(deleted, None)) is not None:
            shutil.rmtree(folder / f"step_000000{number}")
        return read(step, wanted)

    monkeypatch.setattr(checkpoints._storage, "read", deleting)
    assert checkpoints.restore(*WANTED).step == 10
    deleted = iter([10])
    assert checkpoints.restore(*WANTED) is None


def test_memory_and_rights_are_no_damage(folder, monkeypatch):
    before = names(folder)
    with Checkpoints(folder) as checkpoints:
        for error in (MemoryError("out"), PermissionError(13, "Permission denied")):

            def fails(*args, error=error, **options):
                raise ValueError("wrapped") from error

            monkeypatch.setattr(checkpoints._storage._orbax.handler, "restore", fails)
            with pytest.raises(ResourceError, match=r"could not be read.*step_00000030"):
                checkpoints.restore(*WANTED)
    assert names(folder) == before
