# SPDX-License-Identifier: Apache-2.0
import errno
import os
from pathlib import Path

import pytest

from jaxgpt.errors import ConfigError, ResourceError
from jaxgpt.interop import newfolder
from jaxgpt.interop.newfolder import new_folder


def make(path, text="new", **how):
    with new_folder(path, 10, **how) as filling:
        (filling / "config.json").write_text(text)


def tree(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_it_appears_at_the_end(tmp_path):
    with new_folder(tmp_path / "a" / "b", 10) as filling:
        (filling / "config.json").write_text("new")
        assert not (tmp_path / "a" / "b").exists()
    assert tree(tmp_path) == {"a/b/config.json": "new"}
    (tmp_path / "empty").mkdir()
    make(tmp_path / "empty")
    assert tree(tmp_path / "empty") == {"config.json": "new"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_stays_of_one_that_failed(tmp_path, error):
    make(tmp_path / "out", "old")
    with pytest.raises(error), new_folder(tmp_path / "out", 10, force=True) as filling:
        (filling / "config.json").write_text("half")
        raise error
    assert tree(tmp_path) == {"out/config.json": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_export_is_replaced_by_force_alone(tmp_path):
    make(tmp_path / "out", "old")
    with pytest.raises(ConfigError, match="out is there already; fix: another folder, or --force"):
        make(tmp_path / "out")
    assert tree(tmp_path) == {"out/config.json": "old"}
    make(tmp_path / "out", force=True)
    assert tree(tmp_path) == {"out/config.json": "new"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_other_files_are_never_replaced(tmp_path, force):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "config.json").write_text("mine")
    for place, what in (
        (tmp_path, "holds notes.txt, which no export wrote"),
        (tmp_path / "notes.txt", "notes.txt is a file"),
    ):
        with pytest.raises(ConfigError, match=what):
            make(place, force=force)
    assert set(tree(tmp_path).values()) == {"mine"}


def test_a_link_is_replaced_and_not_followed(tmp_path):  # H10
    make(tmp_path / "target", "old")
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(ConfigError, match="link is there already"):
        make(tmp_path / "link")
    make(tmp_path / "link", force=True)
    assert not (tmp_path / "link").is_symlink()
    assert tree(tmp_path) == {"target/config.json": "old", "link/config.json": "new"}


def test_the_old_one_comes_back_where_the_new_one_cannot_be_put(tmp_path, monkeypatch):
    make(tmp_path / "out", "old")
    rename = os.rename

    def failing(old, new):
        if str(old).endswith(".tmp"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(old, new)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(ResourceError, match="cannot be written: Input/output error"):
        make(tmp_path / "out", force=True)
    assert tree(tmp_path) == {"out/config.json": "old"}


def test_a_disk_without_room_is_known_before(tmp_path, monkeypatch):
    monkeypatch.setattr(newfolder, "free_space", lambda path: (5, 100.0))
    with pytest.raises(ResourceError, match="this needs 10 B, free are 5 B"):
        make(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_is_named(tmp_path):
    with (
        pytest.raises(ResourceError, match="No space left on device; it needs about 10 B, free"),
        new_folder(tmp_path / "out", 10),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not list(tmp_path.iterdir())


def test_a_place_where_nothing_can_be_is_named():
    with pytest.raises(ResourceError, match="/proc"):
        make(Path("/proc/nothing"))
