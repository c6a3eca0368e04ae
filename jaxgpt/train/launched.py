# SPDX-License-Identifier: Apache-2.0
"""What the environment says of the processes that a launcher has started: how many, and which.

Left out: to meet them (`joining.py`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxgpt.errors import ConfigError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


@dataclass(frozen=True)
class Place:
    """Where a process stands among those of its run; None: JAX finds it out from the launcher.

    Attributes:
      address: Host and port of process 0.
      count: Processes of the run.
      index: Which of them this is.
      launcher: What JAX asks for the rest, by its name; "deactivate" for none.
    """

    address: str | None = None
    count: int | None = None
    index: int | None = None
    launcher: str | None = None


def find_place(env: Mapping[str, str], asked: Literal["auto", "on", "off"]) -> Place | None:
    """What the environment says of other processes; None: there are none.

    In order: `asked` off: none. The three variables of `VARIABLES`. A step of Slurm (srun) with
    more than one task; the batch script itself is no such step. `asked` on: whatever JAX finds (a
    TPU pod, Open MPI, Kubernetes with its package).

    Args:
      env: The environment.
      asked: By the user.

    Raises:
      ConfigError: Variables are missing, no numbers, or contradict each other.
    """
    if asked == "off":
        return None
    said = {name: env[name] for name in VARIABLES if env.get(name)}
    tasks, task = (_number(env, f"SLURM_{x}") for x in ("STEP_NUM_TASKS", "PROCID"))
    slurm = (tasks or 0) > 1 and task is not None and "SLURM_STEP_NODELIST" in env
    n, i = _number(env, VARIABLES[1]), _number(env, VARIABLES[2])
    if slurm:
        if (n or tasks, task if i is None else i) != (tasks, task):
            raise ConfigError(
                f"JAX_NUM_PROCESSES={n}, JAX_PROCESS_ID={i}, but Slurm's step has {tasks} tasks "
                f"and this is task {task}",
                fix="unset the variables of JAX",
            )
        n, i = tasks, task
    elif said and len(said) < len(VARIABLES) and asked != "on":
        absent = [name for name in VARIABLES if name not in said]
        raise ConfigError(
            f"{', '.join(said)} without {', '.join(absent)}", fix="set all three, or none"
        )
    if n is not None and i is not None and not 0 <= i < n:
        raise ConfigError(f"process {i} of {n}", where=", ".join(VARIABLES[1:]), fix="0 to N - 1")
    address = said.get(VARIABLES[0])
    if address is not None and not re.fullmatch(r".+:\d+", address):
        raise ConfigError(f"{VARIABLES[0]}={address} has no port", fix=f"{address}:12345")
    if not (said or slurm or asked == "on") or (n == 1 and not slurm):
        return None
    complete = None not in (address, n, i)
    return Place(address, n, i, "slurm" if slurm else "deactivate" if complete else None)


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text} is no number") from None
