# SPDX-License-Identifier: Apache-2.0
import json
import pickle

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxgpt.errors import CheckpointError
from jaxgpt.interop.tensors import Tensors


def index(folder, weight_map):
    text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_views_have_the_numbers_of_the_file(tmp_path, dtype):
    arrays = {"a": np.arange(12).reshape(3, 4).astype(dtype), "b": np.asarray(0.5).astype(dtype)}
    save_file(arrays, tmp_path / "model.safetensors")
    tensors = Tensors(tmp_path)
    assert set(tensors) == {"a", "b"} and len(tensors) == 2
    assert (tensors.shape("a"), tensors.shape("b")) == ((3, 4), ())
    for name, array in arrays.items():
        assert tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(tensors[name], array)
    assert not tensors["a"].flags.owndata and not tensors["a"].flags.writeable


def test_several_files(tmp_path):
    for name in "ab":
        save_file({name: np.full(3, ord(name), np.float32)}, tmp_path / f"{name}.safetensors")
    index(tmp_path, {"a": "a.safetensors", "b": "b.safetensors"})
    assert {name: array[0] for name, array in Tensors(tmp_path).items()} == {"a": 97, "b": 98}
    index(tmp_path, {"a": "a.safetensors", "c": "b.safetensors"})
    with pytest.raises(CheckpointError, match="names c, which no file holds"):
        Tensors(tmp_path)
    index(tmp_path, {"a": "gone.safetensors"})
    with pytest.raises(CheckpointError, match=r"cannot read gone\.safetensors"):
        Tensors(tmp_path)


def test_an_index_stays_in_its_folder(tmp_path):
    (tmp_path / "inner").mkdir()
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "a.safetensors")
    index(tmp_path / "inner", {"a": "../a.safetensors"})
    with pytest.raises(CheckpointError, match="outside the folder"):
        Tensors(tmp_path / "inner")


def test_other_numbers_are_refused_when_they_are_read(tmp_path):
    arrays = {"mask": np.ones(3, bool), "blocks": np.ones(3, np.uint8)}
    save_file(arrays, tmp_path / "model.safetensors")
    tensors = Tensors(tmp_path)
    assert tensors.shape("mask") == (3,)
    with pytest.raises(CheckpointError, match="blocks is stored as U8, not as one of"):
        tensors["blocks"]


class Trap:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_pickles_are_not_opened(tmp_path, name):  # H1, H2
    marker = tmp_path / "ran"
    (tmp_path / name).write_bytes(pickle.dumps(Trap(str(marker))))
    with pytest.raises(CheckpointError, match=r"is a pickle|not a whole safetensors file"):
        Tensors(tmp_path)
    assert not marker.exists()


def test_a_cut_file_is_named(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": np.ones(30, np.float32)}, file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safetensors"):
        Tensors(tmp_path)


def test_an_empty_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .* is there"):
        Tensors(tmp_path)
