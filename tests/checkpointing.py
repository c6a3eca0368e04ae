# SPDX-License-Identifier: Apache-2.0
"""A train state of a few KB, and how the tests of checkpoints and run folders use it."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from jaxgpt.train.checkpoint import Checkpoints

ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def state(seed: int = 0):
    """Parameters of two dtypes, and a rest with namedtuples, a key, scalars, None and {}."""
    key = jax.random.key(seed)
    params = {
        "embed": {"kernel": jax.random.normal(key, (32, 16))},
        "block_0": {"scale": jax.random.normal(key, (16,), jnp.bfloat16)},
    }
    rest = {
        "opt_state": optax.adamw(1e-3).init(params),
        "key": jax.random.fold_in(key, 1),
        "step": jnp.int32(seed),
        "extra": {},
        "none": None,
    }
    return params, rest


def abstract(tree, sharding=ONE):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


WANTED = tuple(abstract(t) for t in state())


def fill(folder: Path, steps=(10, 20, 30), **options) -> Path:
    """Save `state(step)` for each step."""
    with Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, *state(step), extra={"tokens": step * 2**40})
    return folder


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def start_python(code: str, *prefix: str, **env: str) -> subprocess.Popen[str]:
    """A Python process that can import what the tests import; `prefix` goes before the command."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(code: str, *prefix: str, limit_s: float = 60, **env: str):
    """Run it to its end: exit code, stdout, stderr."""
    with start_python(code, *prefix, **env) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, out, err
