# SPDX-License-Identifier: Apache-2.0
"""A folder that is there whole or not at all, and replaces no other one unasked.

It is filled under another name beside its place, pushed to the disk, and renamed. Only a folder of
exported files is ever replaced. Left out: what is in it.
"""

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from jaxgpt.errors import ConfigError, JaxgptError, ResourceError
from jaxgpt.train.files import free_space, refused, size, sync

OURS = re.compile(
    r"((adapter_)?model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|(config|(adapter|generation|tokenizer)_config|special_tokens_map|tokenizer)\.json"
    r"|chat_template\.jinja)"
)
"""Names of the files of an export."""

FIX = "free space or permissions there, or another folder"


@contextlib.contextmanager
def new_folder(path: str | Path, n_bytes: int, *, force: bool = False) -> Iterator[Path]:
    """Yield a folder to fill; it takes its place when the block ends without an error.

    Args:
      path: The place; a link there is replaced, never followed.
      n_bytes: About how much will be written.
      force: Replace files of an earlier export.

    Raises:
      ConfigError: There is a file, other files, or without `force` an earlier export.
      ResourceError: It may not be written there, or the disk has no room.
    """
    place = Path(os.path.abspath(Path(path).expanduser()))
    check_place(place, force=force)
    filling = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        filling.parent.mkdir(parents=True, exist_ok=True)
        _require_space(filling.parent, n_bytes)
        filling.mkdir()
        yield filling
        for file in filling.iterdir():
            sync(file)
        sync(filling)
        _put(filling, place)
    except JaxgptError:
        raise
    except OSError as error:
        what = "the folder cannot be written"
        raise refused(error, place, what, n_bytes=n_bytes, fix=FIX) from error
    finally:
        shutil.rmtree(filling, ignore_errors=True)


def check_place(place: Path, *, force: bool) -> None:
    """See that a folder can be put there.

    Raises:
      ConfigError: As `new_folder`.
    """
    if not os.path.lexists(place):
        return
    if not place.is_symlink():
        if not place.is_dir():
            raise ConfigError(f"{place} is a file", fix="another folder")
        names = sorted(file.name for file in place.iterdir())
        if not names:
            return
        strange = [name for name in names if not OURS.fullmatch(name)]
        if strange:
            more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
            raise ConfigError(
                f"{place} holds {strange[0]}{more}, which no export wrote", fix="another folder"
            )
    if not force:
        raise ConfigError(f"{place} is there already", fix="another folder, or --force")


def _require_space(parent: Path, n_bytes: int) -> None:
    free_bytes, _ = free_space(parent)
    if free_bytes < n_bytes:
        what = f"this needs {size(n_bytes)}, free are {size(free_bytes)}"
        raise ResourceError(what, where=str(parent), fix="free space, or another folder")


def _put(filled: Path, place: Path) -> None:
    """Rename, and what was there only then goes."""
    old = None
    if place.is_symlink() or (place.is_dir() and any(place.iterdir())):
        old = filled.with_name(filled.name.removesuffix(".tmp") + ".old")
        os.rename(place, old)
    try:
        os.rename(filled, place)
    except OSError:
        if old is not None:
            os.rename(old, place)
        raise
    sync(place.parent)
    if old is not None and old.is_symlink():
        old.unlink()
    elif old is not None:
        shutil.rmtree(old, ignore_errors=True)
