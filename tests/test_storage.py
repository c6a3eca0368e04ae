# SPDX-License-Identifier: Apache-2.0
"""Full disks, closed folders, killed writers, readers beside a writer."""

import os
import random
import shutil
import signal
import subprocess
import threading
import time

import pytest
from checkpointing import WANTED, fill, names, run_python, start_python, state

from jaxgpt.train.checkpoint import Checkpoints
from jaxgpt.train.digest import digest


def test_a_reader_beside_a_writer_that_keeps_one(tmp_path):
    fill(tmp_path, steps=[1], keep=1)
    stop, failures = threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                with Checkpoints(tmp_path, read_only=True, warn=failures.append) as checkpoints:
                    found = checkpoints.restore(*WANTED)
                    assert digest([found.params, found.rest]) == digest([*state(found.step)])
            except Exception as error:
                failures.append(repr(error))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        fill(tmp_path, steps=range(2, 12), keep=1)
    finally:
        stop.set()
        thread.join()
    assert failures == []


BIG = """
from checkpointing import *
import resource, sys
from pathlib import Path
from jaxgpt.errors import JaxgptError
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path({folder!r})
def big(step):
    key = jax.random.key(step)
    return {{"w": jax.random.normal(key, (600, 1000))}}, {{"step": jnp.int32(step)}}
try:
    with Checkpoints(folder, on_saved=lambda step: print("saved", step, flush=True)) as checkpoints:
        {body}
except JaxgptError as error:
    print(f"error: {{error}}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


def full_disk(folder, body, *prefix, **options):
    body = "\n        ".join(body.strip().splitlines())
    return run_python(BIG.format(folder=str(folder), body=body), *prefix, **options)


def check_refused(outcome, folder, words):
    code, out, err = outcome
    assert code == 5, err
    assert len(err.strip().splitlines()) == 1 and words in err and "--train.keep" in err, err
    assert "2.4 MB" in err and str(folder) in err
    assert out.split() == ["saved", "1"]
    assert not [n for n in names(folder) if "tmp" in n or "trash" in n]
    with Checkpoints(folder, read_only=True) as checkpoints:
        assert checkpoints.steps() == [1]
        checkpoints.val_loss(1)


def test_file_size_limit_and_the_next_try(tmp_path):
    outcome = full_disk(
        tmp_path,
        """
checkpoints.save(1, *big(1))
checkpoints.wait()
old = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
checkpoints.save(2, *big(2))
try:
    checkpoints.wait()
    sys.exit("not refused")
except JaxgptError as error:
    first = error
assert names(folder) == ["step_00000001"], names(folder)
resource.setrlimit(resource.RLIMIT_FSIZE, old)
checkpoints.save(3, *big(3))
checkpoints.wait()
assert checkpoints.steps() == [1, 3]
import shutil; shutil.rmtree(folder / "step_00000003")
raise first
""",
    )
    code, out, err = outcome
    assert out.split() == ["saved", "1", "saved", "3"], err
    check_refused((code, "saved 1", err), tmp_path, "step 2 is not saved: ")


@pytest.fixture
def mount(tmp_path):
    """Mounts a tmpfs; needs root."""
    mounted = []

    def tmpfs(options):
        folder = tmp_path / "disk"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.getuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("cannot mount a tmpfs here")
        mounted.append(folder)
        return folder

    yield tmpfs
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("options", ["size=4m", "size=64m,nr_inodes=55"])
def test_disk_full(mount, options):
    folder = mount(options) / "checkpoints"
    body = "for step in (1, 2, 3): checkpoints.save(step, *big(step))"
    check_refused(full_disk(folder, body), folder, "step 2 is not saved: No space left on device")


def test_unwritable_folder_ends_at_once(tmp_path):
    fill(tmp_path, steps=[1])
    tmp_path.chmod(0o555)
    setpriv = (
        ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if not os.getuid() else ()
    )
    if setpriv and not shutil.which("setpriv"):
        pytest.skip("root may write everywhere, and there is no setpriv")
    body = "print('saved 1'); checkpoints.save(2, *big(2))"
    outcome = full_disk(tmp_path, body, *setpriv)
    tmp_path.chmod(0o755)
    check_refused(outcome, tmp_path, "step 2 is not saved: Permission denied")


SAVING = """
from checkpointing import *
from pathlib import Path
with Checkpoints(Path({folder!r})) as checkpoints:
    found = checkpoints.restore(*WANTED)
    step = found.step if found else 0
    if found:
        from jaxgpt.train.digest import digest
        assert digest([found.params, found.rest]) == digest([*state(step)])
    print("ready", flush=True)
    while True:
        step += 1
        checkpoints.save(step, *state(step))
"""


@pytest.mark.slow
def test_kill_at_random_moments(tmp_path):
    rng, last = random.Random(0), 0
    for _ in range(6):
        with start_python(SAVING.format(folder=str(tmp_path))) as process:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            time.sleep(rng.uniform(0.1, 1.0))
            process.send_signal(signal.SIGKILL)
        with Checkpoints(tmp_path, read_only=True) as checkpoints:
            found = checkpoints.restore(*WANTED)
        step = found.step if found else 0
        assert step >= last and (not found or digest(found.params) == digest(state(step)[0]))
        last = step
    assert last > 1
    Checkpoints(tmp_path).close()
    assert all(name.startswith("step_") and "tmp" not in name for name in names(tmp_path))


def test_one_unreadable_file_of_many_arrays_prints_one_line(tmp_path):
    code = """
    import sys
    from checkpointing import *
    from jaxgpt.train.digest import digest
    folder = Path(FOLDER)
    tree = {f"w{i}": jax.random.normal(jax.random.key(i), (100, 100)) for i in range(40)}
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, tree, {"step": jnp.int32(step)})
    for path in (folder / "step_00000002" / "params").rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    with Checkpoints(folder, warn=lambda line: print(line, file=sys.stderr)) as checkpoints:
        found = checkpoints.restore_params(abstract(tree))
    assert found.step == 1 and digest(found.params) == digest(tree)
    """.replace("FOLDER", repr(str(tmp_path)))
    code, out, err = run_python(code)
    assert code == 0 and out == "" and len(err.splitlines()) == 1, err
    assert "step 2 is damaged (moved to bad-2-1): " in err and "using step 1" in err
