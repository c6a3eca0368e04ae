# SPDX-License-Identifier: Apache-2.0
"""Several arrays of ids read like one."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.data.shardedids import ShardedIds, mapped_ids
from jaxgpt.errors import ConfigError

PARTS = [np.arange(n, dtype=np.uint16) + 100 * i for i, n in enumerate((3, 1, 5))]
WHOLE = np.concatenate(PARTS)
places = st.integers(-len(WHOLE), len(WHOLE) - 1)
ends = st.none() | st.integers(-12, 12)


@given(st.lists(places, max_size=12), ends, ends, st.sampled_from((None, 1, 2, -1, -3)))
def test_reads_are_those_of_one_array(some, start, stop, step):
    ids = ShardedIds(PARTS, vocab_size=300)
    index = np.array(some, np.int64)
    assert np.array_equal(ids[index], WHOLE[index]) and ids[index].dtype == WHOLE.dtype
    assert np.array_equal(ids[index[:, None]], WHOLE[index[:, None]])
    assert np.array_equal(ids[start:stop:step], WHOLE[start:stop:step])


def test_what_it_is_and_is_not():
    ids = ShardedIds(PARTS)
    assert (len(ids), ids.shape, ids.ndim, ids.dtype) == (9, (9,), 1, np.uint16)
    assert ids[3] == 100 and ids[-1] == 204 and list(ids) == WHOLE.tolist()
    assert ids[np.array([2, 3], np.uint32)].tolist() == [2, 100]
    for outside in (9, -10, [0, 9]):
        with pytest.raises(IndexError):
            ids[outside]
    for odd in ([True] * 9, [0.5], "a"):
        with pytest.raises(IndexError, match="integers"):
            ids[odd]
    with pytest.raises(ValueError, match="one dtype"):
        ShardedIds([PARTS[0], PARTS[0].astype(np.uint8)])
    with pytest.raises(ValueError, match="at least one"):
        ShardedIds([])


def test_an_id_outside_the_vocabulary_is_not_read():
    ids = ShardedIds(PARTS, vocab_size=204)
    assert ids[:8].max() == 203
    for read in (slice(None), 8, [0, 8]):
        with pytest.raises(ConfigError, match=r"id 204 is outside the vocabulary of 204"):
            ids[read]


def sparse(path, n_bytes, at=()):
    with open(path, "wb") as file:
        file.truncate(n_bytes)
        for place, byte in at:
            file.seek(place)
            file.write(bytes([byte]))
    return path, n_bytes


def test_places_above_two_to_the_31(tmp_path):
    gib = 1 << 30
    files = [
        sparse(tmp_path / "a", 3 * gib, [(3 * gib - 1, 7)]),
        sparse(tmp_path / "b", 2 * gib, [(0, 8), (2 * gib - 1, 9)]),
    ]
    ids = mapped_ids(files, np.dtype("<u1"), 256, at_once=True)
    assert len(ids) == 5 * gib
    place = np.array([[3 * gib - 1, 3 * gib], [5 * gib - 1, 2**31]], np.int64)
    assert ids[place].tolist() == [[7, 8], [9, 0]]
    assert ids[3 * gib - 2 : 3 * gib + 2].tolist() == [0, 7, 8, 0]
    assert ids[-1] == 9


@pytest.mark.parametrize("at_once", (True, False))
def test_bad_ids_in_files_are_found_when_opened_or_when_read(tmp_path, at_once):
    np.array([1, 2], "<u2").tofile(tmp_path / "a")
    np.array([3, 300], "<u2").tofile(tmp_path / "b")
    one, two = [(tmp_path / name, 2) for name in "ab"]
    dtype = np.dtype("<u2")
    assert isinstance(mapped_ids([one], dtype, 300, at_once=True), np.memmap)
    assert isinstance(mapped_ids([one], dtype, 1 << 16, at_once=False), np.memmap)
    assert mapped_ids([one, two], dtype, 301, at_once=at_once)[:].tolist() == [1, 2, 3, 300]
    with pytest.raises(ConfigError, match=f"id 300 is outside .*{tmp_path}"):
        for files in ([two], [one, two]):
            ids = mapped_ids(files, dtype, 300, at_once=at_once)
            assert not at_once and ids[:1].tolist() in ([1], [3])
        ids[3]
    none = mapped_ids([], dtype, 300, at_once=at_once)
    assert len(none) == 0 and none.dtype == dtype


def test_a_file_that_shrinks_while_it_is_open_is_an_error_and_no_bus_error(tmp_path):
    for name in "ab":
        np.zeros(100_000, "<u2").tofile(tmp_path / name)
    files = [(tmp_path / name, 100_000) for name in "ab"]
    ids = mapped_ids(files, np.dtype("<u2"), 300, at_once=False)
    os.truncate(tmp_path / "b", 10)
    assert ids[99_999] == 0
    for read in (199_999, slice(99_999, None), slice(None, None, 2)):
        with pytest.raises(ConfigError, match="shrank from 200000 to 10 bytes"):
            ids[read]
    with pytest.raises(ConfigError, match="has 10 bytes, but 100000 ids"):
        mapped_ids(files, np.dtype("<u2"), 300, at_once=False)
