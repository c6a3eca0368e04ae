# SPDX-License-Identifier: Apache-2.0
"""What every command does around its work: errors in one line, exit codes, output, caches.

Nothing here runs on import, and nothing of it is for library use.
"""

import argparse
import contextlib
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NoReturn

import jax

from jaxgpt.configlib import unknown
from jaxgpt.errors import ConfigError, JaxgptError, ResourceError
from jaxgpt.train.cpu import tune_cpu
from jaxgpt.train.devices import check_xla_flags, choose_device, only_cpu, unused_gpu_warning

LESS_MEMORY = "lower --train.batch_size or --model.context_length, or raise --train.accumulate"


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, without its own help, and with errors as `ConfigError`."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with what argparse found."""
        if stray := re.match(r"unrecognized arguments: ([^\s=]+)", message):
            if not stray[1].startswith("-"):
                raise ConfigError(f"unexpected argument {stray[1]!r}", fix="--name=value")
            raise unknown(stray[1], list(self._option_string_actions))
        raise ConfigError(message, fix="see --help")


def run_command(function: Callable[[], None], *, less_memory: str = LESS_MEMORY) -> int:
    """Do a command's work and turn what goes wrong into one line on stderr and an exit code.

    Args:
      function: The work.
      less_memory: What to do where memory does not suffice.

    Returns:
      0, the `exit_code` of a JaxgptError, 130 after Ctrl-C, 5 where memory or output was refused.
      With JAXGPT_DEBUG=1 the traceback is printed too. Errors that nobody foresaw are raised.
    """
    _reserve_descriptors()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        function()
        return 0
    except JaxgptError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError as error:
        return _fail(str(_lost(error)), ResourceError.exit_code)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = (str(error).splitlines() or ["no more of it"])[0]
        return _fail(f"out of memory: {first}; fix: {less_memory}", ResourceError.exit_code)
    finally:
        _settle_stdout()


@contextlib.contextmanager
def interrupt_ends() -> Iterator[None]:
    """Ctrl-C ends the process in here, at once: raised while XLA compiles, it crashes it."""

    def leave(number: int, frame: object) -> NoReturn:
        with contextlib.suppress(OSError):
            os.write(2, b"error: interrupted\n")
        os._exit(128 + number)

    usual = signal.default_int_handler
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def emit(text: str) -> None:
    """Write to stdout, at once.

    Raises:
      ResourceError: The text is lost: stdout is closed, full, or nobody reads it.
    """
    try:
        if sys.stdout is None:
            raise OSError("stdout is closed")
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        raise _lost(error) from error


def note(text: str) -> None:
    """One line on stderr; a closed stderr is no reason to stop."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(" ".join(text.splitlines()), file=sys.stderr, flush=True)


def start_jax(device: Literal["cpu", "gpu", "tpu"] | None, *, heavy: bool = False) -> None:
    """Choose the devices, warn of an idle GPU, and keep compiled programs between runs.

    Args:
      device: cpu, gpu, tpu, or None for JAX's own choice.
      heavy: The command is there to compute, so that a CPU is worth tuning.

    Raises:
      ConfigError: There is no such device, or XLA_FLAGS is wrong.
    """
    if heavy and only_cpu(device):
        tune_cpu()
    use_compilation_cache()
    logging.getLogger("jax._src.xla_bridge").addFilter(_not_ours)
    check_xla_flags()
    choose_device(device)
    if warning := unused_gpu_warning():
        note(f"warning: {warning}")


def use_compilation_cache() -> None:
    """Keep compiled programs in ~/.cache/jaxgpt/xla, or below XDG_CACHE_HOME, where that can be.

    JAX_COMPILATION_CACHE_DIR names another folder, and then nothing is set here.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    home = os.environ.get("HOME")
    base = os.environ.get("XDG_CACHE_HOME") or (home and f"{home}/.cache")
    if not base:
        return
    folder = Path(base) / "jaxgpt" / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK | os.X_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _not_ours(record: logging.LogRecord) -> bool:
    """Drops what JAX says of an idle GPU; `unused_gpu_warning` says it with the fix."""
    return not record.getMessage().startswith("An NVIDIA GPU may be present")


def _lost(error: Exception) -> ResourceError:
    reason = getattr(error, "strerror", None) or error
    return ResourceError(f"the output is lost: {reason}", where="stdout", fix="write to a file")


def _fail(line: str, code: int) -> int:
    if os.environ.get("JAXGPT_DEBUG") == "1":
        traceback.print_exc()
    note(f"error: {line}")
    return code


def _reserve_descriptors() -> None:
    """Point closed standard streams to nowhere, so that no file of a run gets their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _settle_stdout() -> None:
    """Flush stdout, or point it to nowhere, so that Python does not complain about it at exit."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
