# SPDX-License-Identifier: Apache-2.0
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxgpt.errors import CheckpointError, DivergedError
from jaxgpt.interop.tensors import Tensors
from jaxgpt.interop.written import write_tensors

ARRAYS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.arange(6, dtype=np.float32).reshape(3, 2).T,  # strided
    "scalar": np.float32(2.5).reshape(()),
    "none": np.zeros((0, 4), np.float32),
}


def write(folder, arrays=ARRAYS, dtype=np.float32, size=10**9):
    shapes = {name: array.shape for name, array in arrays.items()}
    write_tensors(folder, shapes, np.dtype(dtype), iter(arrays.items()), max_file_bytes=size)
    return folder


def same(got, dtype=np.float32):
    assert got.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert got[name].dtype == dtype and got[name].shape == array.shape
        np.testing.assert_array_equal(got[name], array.astype(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_library_reads_what_is_written(tmp_path, dtype):
    same(load_file(write(tmp_path, dtype=dtype) / "model.safetensors"), dtype)
    same(dict(Tensors(tmp_path)), dtype)


def test_the_bytes_of_tensors_are_those_of_the_library(tmp_path):
    write(tmp_path, {"a": ARRAYS["b"], "b": ARRAYS["b"] + 1})
    save_file({"a": ARRAYS["b"], "b": ARRAYS["b"] + 1}, tmp_path / "theirs")
    ours, theirs = ((tmp_path / name).read_bytes() for name in ("model.safetensors", "theirs"))
    assert ours[-48:] == theirs[-48:]
    assert int.from_bytes(ours[:8], "little") % 8 == 0


def test_large_ones_become_several_files(tmp_path):
    write(tmp_path, size=40)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 13, "total_size": 52}
    names = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    assert index["weight_map"] == {n: names[n != "b"] for n in ("a", "b", "none", "scalar")}
    assert sorted(p.name for p in tmp_path.iterdir()) == [*names, "model.safetensors.index.json"]
    same(dict(Tensors(tmp_path)))
    assert load_file(tmp_path / names[0]).keys() == {"b"}


@pytest.mark.parametrize("value, dtype", [(np.nan, np.float32), (1e30, np.float16)])
def test_what_is_not_finite_is_refused(tmp_path, value, dtype):
    arrays = {"w": np.array([0, value], np.float32)}
    with pytest.raises(DivergedError, match=f"w holds .* not finite in {np.dtype(dtype)}"):
        write(tmp_path, arrays, dtype)


def test_other_tensors_than_announced_are_a_mistake(tmp_path):
    with pytest.raises(ValueError, match="came where"):
        write_tensors(
            tmp_path,
            {"a": (2,)},
            np.dtype(np.float32),
            [("a", np.zeros(3))],
            max_file_bytes=99,
        )


def test_a_flipped_bit_is_found(tmp_path):  # H7
    file = write(tmp_path) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    load_file(file)  # the library does not see it
    with pytest.raises(CheckpointError, match="not as it was exported: its checksum differs"):
        Tensors(tmp_path)
