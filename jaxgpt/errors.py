# SPDX-License-Identifier: Apache-2.0
"""Errors that a person can act on: one line, the fix in it, and an exit code.

The command line prints `str(error)` and exits with `error.exit_code`; with `JAXGPT_DEBUG=1` the
traceback is shown as well. Library code raises these and never exits by itself. Where a mistake has
a usual Python class (a bad value, a failed write), the error is that class too, so that research
code can catch what it expects.
"""

from typing import ClassVar


class JaxgptError(Exception):
    """Base of all errors that jaxgpt raises on purpose.

    Args:
      what: What is wrong, with the numbers or names that show it.
      where: File, flag or step it concerns.
      fix: The flag, value or command that puts it right.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None):
        self.what, self.where, self.fix = what, where, fix
        super().__init__(what + (f" ({where})" if where else "") + (f"; fix: {fix}" if fix else ""))


class ConfigError(JaxgptError, ValueError):
    """A wrong flag, config, text, token file or tokenizer."""

    exit_code = 2


class DivergedError(JaxgptError, ArithmeticError):
    """Loss, gradients, parameters or logits are not finite."""

    exit_code = 3


class CheckpointError(JaxgptError):
    """No usable checkpoint, or one that fails its integrity check."""

    exit_code = 4


class ResourceError(JaxgptError, OSError):
    """Storage, network or memory refused: a full disk, an unwritable folder, a held lock."""

    exit_code = 5


class Interrupted(JaxgptError):  # noqa: N818 - it is no fault
    """A signal asked the run to stop; what was done so far is saved.

    Args:
      signum: The signal's number; the exit code is 128 + signum, as a shell reports it.
    """

    def __init__(self, what: str, *, signum: int, fix: str | None = None):
        super().__init__(what, fix=fix)
        self.exit_code = 128 + signum  # type: ignore[misc]
