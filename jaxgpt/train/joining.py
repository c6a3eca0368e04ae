# SPDX-License-Identifier: Apache-2.0
"""How the processes of one run find each other, and how they end: together, and within a time.

A launcher (Slurm, Kubernetes, a TPU pod's, a person in two terminals) starts the same command N
times; the environment says that it did. Nothing here starts a process. For `jaxgpt.cli` alone: it
changes what the interpreter does where C++ code gives up.
"""

import contextlib
import ctypes
import functools
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax._src import distributed
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from jaxgpt.errors import ConfigError, JaxgptError, ResourceError
from jaxgpt.train import processes
from jaxgpt.train.launched import VARIABLES, find_place
from jaxgpt.train.runfolder import RunFolder

JOIN_S = 300
"""How long the processes wait for each other in the beginning."""
HEARTBEAT_S = 60
"""A process that has been silent for so long is dead; a closed connection tells it at once."""
SHUTDOWN_S = 60
LINGER_S = 5
"""How long the process with the store stays for the others to read there why the run ends."""
SEEN_S = 30
"""How long a network file system may take to show a new file."""

GONE = (
    "a process of this run has died or cannot be reached; start all again, "
    "the run goes on from its last checkpoint"
)
_LOST = re.compile(
    r"gloo|nccl|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED|heartbeat|coordination|"
    r"connection (closed|reset|refused)|broken pipe",
    re.IGNORECASE,
)


@dataclass
class _Ending:
    """How this process ends, once it is known.

    Attributes:
      code: Its exit code.
      told: Whether the others can read why.
    """

    code: int | None = None
    told: bool = False


_ending = _Ending()


class _GoneError(ResourceError):
    """Another process has died, nobody knows of what."""


def join(asked: Literal["auto", "on", "off"]) -> None:
    """Become one of the run's processes, if there are others; before anything touches a device.

    Args:
      asked: As for `find_place`.

    Raises:
      ConfigError: The environment contradicts itself, or there is no launcher that JAX knows.
      ResourceError: Not all came within the time.
    """
    place = find_place(os.environ, asked)
    if place is None:
        return
    jax.config.update("jax_enable_preemption_service", False)  # takes SIGTERM for itself
    try:
        with _told_of_deaths():
            jax.distributed.initialize(
                place.address,
                place.count,
                place.index,
                cluster_detection_method=place.launcher,
                initialization_timeout=JOIN_S,
                heartbeat_timeout_seconds=HEARTBEAT_S,
                shutdown_timeout_seconds=SHUTDOWN_S,
            )
    except (ValueError, RuntimeError) as error:
        _ending.code = ResourceError.exit_code
        state = distributed.global_state
        if state.coordinator_address is None:  # nothing was tried
            raise ConfigError(
                f"no launcher that JAX knows: {(str(error).splitlines() or ['?'])[0]}",
                fix=f"set {', '.join(VARIABLES)}, or --distributed=off",
            ) from error
        who = f"process {state.process_id} of {place.count or state.num_processes}"
        raise ResourceError(
            f"{who} did not meet the others at {state.coordinator_address} in {JOIN_S} s",
            fix="start all of them; the address must be that of process 0, its port open and free",
        ) from error


@contextlib.contextmanager
def one_run() -> Iterator[None]:
    """Around all that a process does: the others are told why it stops; lost ones get one line.

    Raises:
      JaxgptError: As raised inside.
      PartnerError: Another process has said why it stops.
      ResourceError: Another process has died.
    """
    try:
        with _reasons():
            yield
    except Exception as error:
        if processes.several():
            reason = error if isinstance(error, JaxgptError) else _unforeseen(error)
            _ending.code, _ending.told = reason.exit_code, not isinstance(error, _GoneError)
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                if _ending.told:
                    processes.say_left(reason)
        raise


def end(exit_code: int) -> int:
    """The last thing of a command: leave the others in a way that leaves nobody waiting.

    Args:
      exit_code: Of the command.

    Returns:
      It; but where several processes fail, or one does not find the others, it ends the process:
      JAX would wait for those that are gone.
    """
    if distributed.global_state.client is None and _ending.code is None:
        return exit_code
    _ending.code = exit_code
    if exit_code == 0:
        return 0
    if _ending.told and distributed.global_state.service is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _wait_for(processes.all_left, LINGER_S)  # the store ends with this process
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(exit_code)


def check_same(configuration: Any, differences: Callable[[Any], list[str]]) -> None:
    """See that all processes were started alike.

    Args:
      configuration: JSON of this process; that of process 0 counts.
      differences: Of this process from that JSON, in words.

    Raises:
      ConfigError: They were not.
    """
    mine = [configuration, jax.__version__]
    theirs = processes.lead("configuration", lambda: mine)
    found = differences(theirs[0])
    if theirs[1] != mine[1]:
        found.append(f"jax: {theirs[1]} -> {mine[1]}")
    if found:
        raise ConfigError(
            f"process {processes.index()} was started otherwise than process 0: {', '.join(found)}",
            fix="start all processes with the same command",
        )
    processes.meet("configurations")


def check_shared(folder: RunFolder) -> None:
    """See that all processes see the same run folder.

    Args:
      folder: Made and locked by process 0.

    Raises:
      ConfigError: This process sees another one, or none.
    """
    file = folder.path / ".shared"

    def show() -> str:
        token = secrets.token_hex(8)
        file.write_text(token)
        return token

    def seen() -> bool:
        with contextlib.suppress(OSError):
            return file.read_text() == token
        return False

    token = processes.lead("folder", show)
    if not _wait_for(seen, SEEN_S):
        raise ConfigError(
            f"the run folder is not shared: process {processes.index()} on {socket.gethostname()} "
            "does not see what process 0 writes",
            where=str(folder.path),
            fix="--run=PATH on a file system that all hosts have",
        )
    processes.meet("folder seen")
    if processes.leads():
        file.unlink()


@contextlib.contextmanager
def _reasons() -> Iterator[None]:
    """Turn what JAX raises of a lost process into what that process said, or did not say."""
    try:
        yield
    except (ValueError, RuntimeError) as error:  # JAX raises both
        if isinstance(error, JaxgptError) or not processes.several():
            raise
        if not _LOST.search(str(error)):
            raise
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the store may be gone as well
            _wait_for(_nobody_left, 2)
        raise _GoneError(GONE) from error


def _unforeseen(error: Exception) -> JaxgptError:
    """A fault, or a lack of memory, in the words that the others get."""
    line = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    short = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in line
    return ResourceError(line) if short else JaxgptError(line)


def _wait_for(condition: Callable[[], bool], limit_s: float) -> bool:
    """Whether a condition has come true within a time."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _nobody_left() -> bool:
    processes.check_left()  # raises the reason
    return False


@contextlib.contextmanager
def _told_of_deaths() -> Iterator[None]:
    """JAX's client made in here ends the process with one line when it hears of a death.

    By default it aborts with a stack trace; the function that it can be given instead is not among
    the arguments of `jax.distributed.initialize`. jaxlib 0.10 to 0.12 cannot hand its argument over
    and terminates for that reason, which is caught as well.
    """
    usual = _jax.get_distributed_runtime_client
    _jax.get_distributed_runtime_client = functools.partial(usual, missed_heartbeat_callback=_died)
    with contextlib.suppress(OSError, AttributeError):  # another C++ library: the trace appears
        library = ctypes.CDLL("libstdc++.so.6")
        library._ZSt13set_terminatePFvvE.argtypes = [type(_on_terminate)]
        library._ZSt13set_terminatePFvvE.restype = ctypes.c_void_p
        library._ZSt13set_terminatePFvvE(_on_terminate)
    try:
        yield
    finally:
        _jax.get_distributed_runtime_client = usual


def _died(*_: object) -> None:
    """Called on a thread of C++, which cannot raise."""
    if _ending.code is not None:
        time.sleep(LINGER_S)  # the main thread is about to end the process
        os._exit(_ending.code)
    with contextlib.suppress(OSError):
        os.write(2, f"error: {GONE}\n".encode())
    os._exit(ResourceError.exit_code)


_on_terminate = ctypes.CFUNCTYPE(None)(_died)
