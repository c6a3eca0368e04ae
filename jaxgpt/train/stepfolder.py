# SPDX-License-Identifier: Apache-2.0
"""What a step folder is, apart from the arrays in it: its name, its commit, its meta file.

The meta file is one JSON object: format version, step, validation loss, the caller's facts and the
digest of every array, closed by a checksum of its own. Orbax, which writes it together with the
arrays, is known to `jaxgpt.train.checkpoint` alone.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

from jaxgpt.errors import CheckpointError, ResourceError
from jaxgpt.train.files import sync

FORMAT_VERSION = 1
FORMAT_SINCE = "0.1.0"
"""The first jaxgpt that reads `FORMAT_VERSION`; a newer format names its own."""

COMMIT_FILE = "commit_success.txt"
"""The file that Orbax writes last; a rename then gives the folder its name."""

_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"step_\d{8,}\.orbax-checkpoint-tmp.*|trash-.*")


class BadStepError(CheckpointError):
    """A step folder that cannot be trusted; an older one may do instead."""


def step_name(step: int) -> str:
    """The name of a step's folder.

    Args:
      step: Number of finished steps.
    """
    return f"step_{step:08d}"


def step_folders(checkpoints: Path) -> dict[int, Path]:
    """Step -> folder, ascending, of everything named like one: also damaged or half-copied ones.

    Args:
      checkpoints: Folder of the step folders; may be absent.
    """
    if not checkpoints.is_dir():
        return {}
    found = {int(m[1]): p for p in checkpoints.iterdir() if (m := _STEP.fullmatch(p.name))}
    return dict(sorted(found.items()))


def is_committed(folder: Path) -> bool:
    """Whether a step folder is a real folder, no link, and was finished.

    Args:
      folder: A value of `step_folders`.
    """
    return not folder.is_symlink() and (folder / COMMIT_FILE).is_file()


def make_meta(
    step: int, digests: dict[str, str], val_loss: float | None, extra: dict[str, Any]
) -> dict[str, Any]:
    """The meta object of a step, with its checksum.

    Args:
      step: Number of finished steps.
      digests: Digest of the arrays, from `jaxgpt.train.digest`.
      val_loss: Validation loss in nats; NaN and inf are stored as null.
      extra: JSON facts of the caller.
    """
    try:
        writer = importlib.metadata.version("jaxgpt")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        writer = FORMAT_SINCE
    meta = {
        "format_version": FORMAT_VERSION,
        "writer": writer,
        "needs": FORMAT_SINCE,
        "step": step,
        "val_loss": val_loss if val_loss is not None and math.isfinite(val_loss) else None,
        "extra": extra,
        "digest": digests,
    }
    return meta | {"sha256": _sha256(meta)}


def read_meta(folder: Path, step: int) -> dict[str, Any]:
    """The meta object of a committed step folder, checked.

    Args:
      folder: The step folder.
      step: The step that its name promises.

    Raises:
      BadStepError: The folder is a link or not committed, or its meta file is absent, damaged or of
        another step.
      CheckpointError: It was written by a newer jaxgpt.
      ResourceError: It may not be read.
    """
    if folder.is_symlink():
        raise BadStepError("it is a link")
    if not is_committed(folder):
        raise BadStepError(f"it has no {COMMIT_FILE}")
    try:
        meta = json.loads((folder / "meta" / "metadata").read_bytes())
    except PermissionError as error:
        raise ResourceError("a checkpoint may not be read", where=str(error.filename)) from error
    except (OSError, ValueError) as error:
        raise BadStepError(f"its meta file is unreadable: {type(error).__name__}") from error
    if not isinstance(meta, dict):
        raise BadStepError("its meta file holds no object")
    if isinstance(meta.get("format_version"), int) and meta["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"step {step} was written by jaxgpt {meta.get('writer')}, needs >= {meta.get('needs')}",
            where=str(folder),
            fix="pip install -U jaxgpt",
        )
    if meta.pop("sha256", None) != _sha256(meta):
        raise BadStepError("its meta file fails its checksum")
    if meta["step"] != step:
        raise BadStepError(f"it holds step {meta['step']}")
    return meta


def sync_step(folder: Path) -> None:
    """Push a committed step to the disk; Orbax has done so for the array data only.

    Args:
      folder: The step folder.
    """
    for path in folder.rglob("*"):
        if path.parent.name != "d":  # the array data
            sync(path)
    sync(folder)
    sync(folder.parent)


def put_aside(folder: Path, prefix: str) -> Path:
    """Rename a step folder so that it is none any more; a link is renamed, never followed.

    Args:
      folder: The step folder.
      prefix: Start of the new name; `-1`, `-2`, ... is added.
    """
    n = 1
    while os.path.lexists(target := folder.with_name(f"{prefix}-{n}")):
        n += 1
    return folder.rename(target)


def delete_step(folder: Path) -> None:
    """Delete a step folder; readers see it whole or not at all.

    Args:
      folder: The step folder, no link.
    """
    shutil.rmtree(put_aside(folder, f"trash-{folder.name}"))


def delete_leftovers(checkpoints: Path) -> None:
    """Delete what unfinished saves and unfinished deletions left. Only for the lock's holder.

    Args:
      checkpoints: Folder of the step folders.
    """
    for path in checkpoints.iterdir():
        if _LEFTOVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def _sha256(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
