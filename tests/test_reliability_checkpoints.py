# SPDX-License-Identifier: Apache-2.0
"""A run's checkpoints under flipped bits, odd clocks, links and caches: A13, A18, A25, A29, A32.

What a damaged step does to the commands is in test_reliability_faults.py; every kind of damage to
every kind of file is in test_restore.py.
"""

import hashlib
import os
import random
import shutil
import sys
import time

import jax
import numpy as np
import pytest
from commands import LAST, MICRO, Command, checkpoints, digest, steps, train, unfinished

from jaxgpt import cli
from jaxgpt.train.checkpoint import Checkpoints
from jaxgpt.train.digest import by_path
from jaxgpt.train.files import read_metrics
from jaxgpt.train.runfolder import RunFolder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the run's helpers need Linux")


def hashes(found) -> dict[str, str]:
    """Hash of each array's bytes: another one than that which is stored with them."""

    def content(leaf):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    leaves = by_path({"params": found.params, "rest": found.rest})
    return {p: hashlib.sha256(content(leaf).tobytes()).hexdigest() for p, leaf in leaves.items()}


@pytest.fixture
def wanted(copy, monkeypatch):
    """The abstract state that the train command asks its checkpoints for."""
    asked = []
    restore = Checkpoints.restore

    def noting(self, *abstract, **options):
        asked.append(abstract)
        return restore(self, *abstract, **options)

    monkeypatch.setattr(Checkpoints, "restore", noting)
    assert train() == 0
    monkeypatch.undo()
    monkeypatch.chdir(copy)
    return asked[0]


@pytest.mark.parametrize("flips", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_flipped_bits_are_never_believed(copy, wanted, flips):
    """Row A13: any bit of any file of the newest step; what is read is a step as it was saved."""
    folder, rng = checkpoints(copy), random.Random(flips)

    def read():
        with Checkpoints(folder, read_only=True, warn=lambda line: None) as there:
            return there.restore(*wanted)

    good = {LAST: hashes(read())}
    aside = (folder / "step_00000020").rename(copy / "aside")
    good[15] = hashes(read())
    aside.rename(folder / "step_00000020")
    files = sorted(p for p in (folder / "step_00000020").rglob("*") if p.is_file())
    sizes, fell_back = [p.stat().st_size for p in files], 0
    for _ in range(flips):
        # Every other one in the arrays' data, however small a part of the bytes that is.
        data = [s * (p.parent.name == "d") for p, s in zip(files, sizes, strict=True)]
        (path,) = rng.choices(files, rng.choice([sizes, data]))
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        found = read()
        assert hashes(found) == good[found.step], path
        fell_back += found.step == 15
        path.write_bytes(whole)
    assert hashes(read()) == good[LAST] and fell_back > flips // 4
    print(f"{flips} flips: 0 wrong values, {fell_back} fell back to the step before")


def test_leftovers_of_a_running_save_stay(copy):
    """Row A18: they are deleted by the next trainer, not by who is refused or only reads."""
    names = ("step_00000025.orbax-checkpoint-tmp", "step_00000025.orbax-checkpoint-tmp-17")
    for name in (*names, "trash-step_00000005-1"):
        (checkpoints(copy) / name / "params").mkdir(parents=True)
    with RunFolder(copy / "runs/micro").lock():
        assert train() == 5
        assert cli.sample_main(["--run=micro", "--max-new-tokens=1"]) == 0
        assert len(unfinished(copy)) == 3
    assert train() == 0
    assert unfinished(copy) == [] and steps(copy) == [5, 10, 15, 20]


def test_clocks_that_jump_do_not_count(finished, copy, monkeypatch):
    """Row A25: files of the future, and a clock that runs backwards, also in the log."""
    for step in (5, 10):
        os.utime(checkpoints(copy) / f"step_{step:08d}", (4e9, 4e9))
    shutil.rmtree(checkpoints(copy) / "step_00000020")
    now = iter(range(10**9, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    assert train() == 0
    assert digest(copy) == digest(finished)
    records = read_metrics(copy / "runs/micro/metrics.jsonl")
    assert len(records) == LAST + 4
    for record in records:
        assert record["wall_s"] >= 0 and record.get("tokens_per_s", 0) >= 0


@pytest.mark.slow
def test_a_run_folder_that_is_a_link(finished, fresh):
    """Row A29: it is resolved once; what it points to is the run, wherever it is moved."""
    (fresh / "runs").mkdir()
    (fresh / "disk").mkdir()
    (fresh / "runs" / "micro").symlink_to(fresh / "disk")
    assert train() == 0
    assert (fresh / "runs" / "micro").is_symlink() and digest(fresh) == digest(finished)
    assert (fresh / "disk" / "checkpoints" / "step_00000020").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["bits", "cut", "empty"])
def test_damaged_compiled_programs_are_compiled_again(finished, fresh, how):
    """Row A32."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(fresh / "cache")}
    with Command(*MICRO, "--run=first", cwd=fresh, **cache) as command:
        assert command.end()[0] == 0
    rng, files = random.Random(0), list((fresh / "cache").glob("*-cache"))
    assert files
    for path in files:
        content = bytearray(path.read_bytes())
        if how == "bits":
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes({"bits": content, "cut": content[: len(content) // 2], "empty": b""}[how])
    with Command(*MICRO, cwd=fresh, **cache) as command:
        code, _, err = command.end()
    assert code == 0, err
    assert digest(fresh) == digest(finished) and steps(fresh) == [5, 10, 15, 20]
