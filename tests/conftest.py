# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures, and the environment that every test runs in."""

import os
import shutil
import signal
from pathlib import Path

import jax
import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxgpt" / "xla-tests"

# Set for this process and for the commands that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Under nohup this process, and every command that a test starts, would ignore a closed terminal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
    """Compiled programs of one module do not stay for the others: a suite would hold gigabytes."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session", autouse=True)
def untuned():
    """Commands inside of a test's process leave its allocator and its threads as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxgpt.cli.command.tune_cpu", lambda: True)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference models and texts that stands beside a developer's checkout."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "parity").is_dir():
        pytest.skip("no ../shared beside this checkout: reference models and texts are absent")
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """An uninterrupted run."""
    from commands import make_run  # for Linux alone

    return make_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """The current folder, with the text alone."""
    from commands import TEXT

    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def copy(finished, tmp_path, monkeypatch):
    """The current folder, with a copy of the finished run."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
