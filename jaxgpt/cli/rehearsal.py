# SPDX-License-Identifier: Apache-2.0
"""Compiling a run's training step in a process of its own, on as many devices as its mesh has.

XLA makes fake CPU devices only before it starts; so a process that has started it asks another one.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jaxgpt
from jaxgpt.config import RunConfig, from_yaml, to_yaml
from jaxgpt.errors import ConfigError, JaxgptError, ResourceError
from jaxgpt.study.planning.ahead import Compiled, compile_step

ERROR = "error"
FLAG = "--xla_force_host_platform_device_count"


def rehearse(run: RunConfig, devices: int) -> Compiled:
    """Compile a step of the run for so many CPU devices, in another process.

    Args:
      run: Its `model.vocab_size` and `mesh.data` are numbers.
      devices: Of the mesh.

    Raises:
      ConfigError: The run does not go together.
      ResourceError: The process failed, for memory perhaps.
    """
    package = str(Path(jaxgpt.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}={devices}".strip()
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "jaxgpt.cli.rehearsal"],
        input=to_yaml(run),
        env=env,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode or not done.stdout.strip():
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ResourceError(f"the step was not compiled: {said}", fix="a smaller model or mesh")
    found = json.loads(done.stdout.splitlines()[-1])
    if ERROR in found:
        raise ConfigError(found[ERROR])
    return Compiled(**found)


def main() -> None:
    """Read a configuration from stdin, compile its step, and print what it takes as JSON."""
    run = from_yaml(sys.stdin.read())
    try:
        found = dataclasses.asdict(
            compile_step(run.model, run.optim, run.train, run.mesh, run.lora)
        )
    except JaxgptError as error:
        found = {ERROR: str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
