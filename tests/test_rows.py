# SPDX-License-Identifier: Apache-2.0
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from jaxgpt.boxes.attention import GQA
from jaxgpt.errors import ConfigError
from jaxgpt.interop.families import FAMILIES, read_config
from jaxgpt.interop.rows import Piece, Row, nested, pattern_regex, plan, true_shapes
from jaxgpt.testing import tiny

CFG = tiny(attention=GQA(n_heads=4))


def whole(shape):
    return (slice(None),) * len(shape)


def take(piece, tensors, shape, part=0, index=None):
    """One parameter, or a part of it."""
    index = index or whole(shape)
    out = np.empty(np.empty(shape)[index].shape, np.float32)
    piece.fill(out, part, tensors, index)
    return out


def piece_of(row, **shapes):
    [piece] = plan([row], CFG, {k.replace("__", "/"): v for k, v in shapes.items()})
    return piece


def test_a_transposed_matrix():
    piece = piece_of(Row("w", "k", transposed=True), k=(2, 3))
    assert piece.tensor_shape((2, 3)) == (3, 2)
    w = np.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(take(piece, {"w": w}, (2, 3)), w.T)
    written = piece.write({"k": w.T})["w"]
    np.testing.assert_array_equal(written, w)
    assert written.flags.c_contiguous


@pytest.mark.parametrize(
    "run, q, k, v",
    [
        (None, [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]),  # side by side
        (2, [0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]),  # head by head
        (1, [0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]),  # in turn
        (lambda cfg: cfg.d_model // 8, [0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]),
    ],
)
def test_one_tensor_for_three_parameters(run, q, k, v):
    shapes = {f"a/{m}": (4,) for m in "qkv"}
    [piece] = plan([Row("w", "a/{q,k,v}", run=run)], CFG, shapes)
    assert piece.params == ("a/q", "a/k", "a/v") and piece.tensor_shape((4,)) == (12,)
    w = np.arange(12.0)
    got = [take(piece, {"w": w}, (4,), part) for part in range(3)]
    np.testing.assert_array_equal(got, [q, k, v])
    back = piece.write(dict(zip(piece.params, got, strict=True)))
    np.testing.assert_array_equal(back["w"], w)


def test_several_tensors_in_one_parameter():
    piece = piece_of(Row("e.{e}.w", "k", transposed=True), k=(3, 2, 4))
    assert piece.tensors == ("e.0.w", "e.1.w", "e.2.w")
    assert piece.tensor_shape((3, 2, 4)) == (4, 2)
    w = {f"e.{e}.w": np.random.default_rng(e).normal(size=(4, 2)) for e in range(3)}
    k = take(piece, w, (3, 2, 4))
    for e in range(3):
        np.testing.assert_array_equal(k[e], w[f"e.{e}.w"].T.astype(np.float32))
    assert piece.write({"k": k}).keys() == w.keys()


@given(st.data())
def test_any_part_of_any_piece_is_that_part_of_the_whole(data):
    transposed, stacked = data.draw(st.booleans()), data.draw(st.booleans())
    run, parts = data.draw(st.sampled_from([None, 1, 2])), data.draw(st.integers(1, 3))
    shape = (3, 2, 4) if stacked else (2, 4)
    names = tuple(f"t{i}" for i in range(3 if stacked else 1))
    piece = Piece(tuple(f"p{i}" for i in range(parts)), names, stacked, transposed, run)
    rng = np.random.default_rng(0)
    params = {path: rng.normal(size=shape).astype(np.float32) for path in piece.params}
    tensors = piece.write(params)
    assert {t.shape for t in tensors.values()} == {piece.tensor_shape(shape)}
    starts = [data.draw(st.integers(0, n)) for n in shape]
    stops = [data.draw(st.integers(start, n)) for start, n in zip(starts, shape, strict=True)]
    index = tuple(map(slice, starts, stops))
    for part, path in enumerate(piece.params):
        got = take(piece, tensors, shape, part, index)
        np.testing.assert_array_equal(got, params[path][index])


def test_numbers_stand_for_the_same_on_both_sides():
    shapes = {f"block_{i}/a": (2,) for i in (0, 1, 10)} | {"block_x/b": (2,), "other/a": (2,)}
    rows = [Row("h.{i}.w", "block_{i}/a"), Row("x", "block_x/b"), Row("y", "other/a")]
    assert {p.tensors[0] for p in plan(rows, CFG, shapes)} == {"h.0.w", "h.1.w", "h.10.w", "x", "y"}
    assert pattern_regex("h.{i}.w").fullmatch("h.12.w")
    assert not pattern_regex("h.{i}.w").fullmatch("hx1.w")


def test_each_parameter_has_one_row():
    with pytest.raises(ConfigError, match="no row of the table makes the parameter b"):
        plan([Row("w", "a")], CFG, {"a": (2,), "b": (2,)})
    with pytest.raises(ValueError, match="two rows"):
        plan([Row("w", "a"), Row("x", "a")], CFG, {"a": (2,)})
    assert plan([Row("w", "a"), Row("x", "not_there")], CFG, {"a": (2,)})[0].tensors == ("w",)


def test_nested():
    assert nested({"a/b": 1, "a/c/d": 2, "e": 3}) == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_table_reads_and_writes_the_same(shared, model_type):
    """The names are those of a real file, and nothing is lost on the way."""
    configs = {path.parent: json.loads(path.read_text()) for path in models(shared)}
    folders = [folder for folder, config in configs.items() if config["model_type"] == model_type]
    assert folders
    for folder in folders:
        cfg = read_config(configs[folder])
        shapes, rng = true_shapes(cfg), np.random.default_rng(0)
        params = {path: rng.random(shape, np.float32) for path, shape in shapes.items()}
        pieces, tensors = plan(FAMILIES[model_type].rows, cfg, shapes), {}
        for piece in pieces:
            tensors |= piece.write(params)
        with safe_open(folder / "model.safetensors", framework="numpy") as file:
            stored = {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}
        assert {name: array.shape for name, array in tensors.items()} == stored
        for piece in pieces:
            for part, path in enumerate(piece.params):
                array = take(piece, tensors, shapes[path], part)
                np.testing.assert_array_equal(array, params.pop(path))
        assert not params


def models(shared):
    return sorted((shared / "parity").glob("*/config.json"))
