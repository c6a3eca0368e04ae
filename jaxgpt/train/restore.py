# SPDX-License-Identifier: Apache-2.0
"""Which step to trust: newest first, digest checked, damaged ones moved aside and named.

How arrays are read from a folder is a function that the caller passes.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxgpt.errors import CheckpointError, ConfigError
from jaxgpt.train import processes
from jaxgpt.train.digest import by_path, digest, spec
from jaxgpt.train.files import refused
from jaxgpt.train.stepfolder import BadStepError, put_aside, read_meta, step_folders

_TRIES = 3


@dataclass(frozen=True)
class Restored:
    """What was read back.

    Attributes:
      step: The step it was saved at.
      params: Parameters, in the shardings that were asked for.
      rest: The rest of the state; None from `Checkpoints.restore_params`.
      ema: The moving average of parameters; None where it was not asked for.
      val_loss: Validation loss in nats; None if it was absent or not finite.
      extra: The facts given to `Checkpoints.save`.
    """

    step: int
    params: Any
    rest: Any
    ema: Any
    val_loss: float | None
    extra: dict[str, Any]


Read = Callable[[Path, dict[str, Any]], dict[str, Any]]
"""Folder and abstract items -> items; raises BadStepError for a damaged folder."""


class _GoneError(Exception):
    """The step was deleted while it was read."""


def restore(
    checkpoints: Path,
    wanted: dict[str, Any],
    read: Read,
    *,
    step: int | None,
    move: bool,
    warn: Callable[[str], None],
) -> Restored | None:
    """Read the newest usable step, or `step` alone; None if there is no step folder at all.

    Args:
      checkpoints: Folder of the step folders.
      wanted: `params` and possibly `rest` and `ema`: trees of
        `jax.ShapeDtypeStruct` with shardings.
      read: Reads these items of one folder.
      step: Only this step.
      move: Whether damaged steps that are newer than the usable one are moved aside.
      warn: Called with one line per damaged step.

    Raises:
      CheckpointError: Steps exist, none is usable; or one is of a newer format.
      ConfigError: The step is of another model.
      ResourceError: Reading was refused, or memory is short.
    """
    leaves = by_path(wanted)
    for path, leaf in leaves.items():
        if getattr(leaf, "sharding", None) is None:
            raise ValueError(f"{path} has no sharding")
    for _ in range(_TRIES):
        try:
            return _newest(checkpoints, wanted, leaves, read, step=step, move=move, warn=warn)
        except _GoneError:  # retention was faster than this reader: look again
            continue
    raise CheckpointError(
        f"steps were deleted while they were read, {_TRIES} times", where=str(checkpoints)
    )


def _newest(
    checkpoints: Path,
    wanted: dict[str, Any],
    leaves: dict[str, Any],
    read: Read,
    *,
    step: int | None,
    move: bool,
    warn: Callable[[str], None],
) -> Restored | None:
    found_steps = processes.lead(
        "steps", lambda: [[n, folder.name] for n, folder in step_folders(checkpoints).items()]
    )
    folders = {n: checkpoints / name for n, name in found_steps}
    if step is not None:
        if step not in folders:
            raise CheckpointError(
                f"there is no step {step}, only {list(folders)}", where=str(checkpoints)
            )
        folders = {step: folders[step]}
    bad: dict[int, BadStepError] = {}
    for n, folder in reversed(folders.items()):
        try:
            found = _read_step(folder, n, wanted, leaves, read)
        except BadStepError as reason:
            if not processes.several() and not os.path.lexists(folder):
                raise _GoneError from reason
            bad[n] = reason
            continue
        for damaged, reason in bad.items():
            set_aside(folders[damaged], damaged, f"{reason}; using step {n}", move, warn)
        return found
    if not bad:
        return None
    raise CheckpointError(
        "no usable checkpoint: " + ", ".join(f"step {n}: {why}" for n, why in bad.items()),
        where=str(checkpoints),
        fix="restore a copy of the folder, or train again under another --run",
    )


def set_aside(
    folder: Path, step: int, reason: str, move: bool, warn: Callable[[str], None]
) -> None:
    """Name a damaged step and, if `move`, rename it to `bad-STEP-N`.

    Args:
      folder: The step folder.
      step: Its step.
      reason: What is wrong, and what happens instead.
      move: Whether to rename.
      warn: Called with the one line.

    Raises:
      ResourceError: It cannot be renamed.
    """
    place = ""
    if move:
        try:
            place = f" (moved to {put_aside(folder, f'bad-{step}').name})"
        except OSError as error:
            raise refused(error, folder, f"damaged step {step} cannot be moved aside") from error
    warn(f"checkpoint step {step} is damaged{place}: {reason}")


def _read_step(
    folder: Path, step: int, wanted: dict[str, Any], leaves: dict[str, Any], read: Read
) -> Restored:
    meta, held, state, bad = {}, {}, {}, None
    try:
        meta = read_meta(folder, step)
        held = {p: d for p, d in meta["digest"].items() if p.partition("/")[0] in wanted}
        _check_same_model(held, leaves, folder)
        state = read(folder, wanted)
    except BadStepError as reason:
        bad = reason
    _agree(bad)
    found = digest(state)  # the same in all processes
    wrong = [path for path in held if found.get(path) != held[path]]
    if wrong:
        raise BadStepError(f"{wrong[0]} fails its digest ({len(wrong)} of {len(held)} arrays do)")
    items = {name: state.get(name) for name in ("params", "rest", "ema")}
    return Restored(step=step, **items, val_loss=meta["val_loss"], extra=meta["extra"])


def _agree(bad: BadStepError | None) -> None:
    """Raise what is wrong with a step, also where another process found it."""
    said = processes.exchange("outcome", bad and str(bad))
    if bad is not None:
        raise bad
    for number, reason in enumerate(said):
        if reason is not None:
            raise BadStepError(f"{reason}, says process {number}")


def _check_same_model(held: dict[str, str], leaves: dict[str, Any], folder: Path) -> None:
    """Refuse other paths, shapes and dtypes before any array is read; nothing is ever cast."""
    ours = {path: spec(leaf) for path, leaf in leaves.items()}
    theirs = {path: text.rpartition(":")[0] for path, text in held.items()}
    differing = [
        f"{path} is {theirs.get(path, 'absent')} there, {ours.get(path, 'absent')} here"
        for path in sorted(ours.keys() | theirs.keys())
        if ours.get(path) != theirs.get(path)
    ]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ConfigError(
            "the checkpoint is of another model or optimizer: " + ", ".join(differing[:3]) + more,
            where=str(folder),
            fix="use the run's own config.yaml, or another --run",
        )
