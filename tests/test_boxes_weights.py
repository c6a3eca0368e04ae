# SPDX-License-Identifier: Apache-2.0
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.dense import Dense
from jaxgpt.boxes.weights import Cast, Int4, Int8, joined, way
from jaxgpt.testing.tools import tiny

W_OI = np.random.default_rng(0).normal(size=(24, 64)).astype(np.float32) * np.geomspace(
    0.01, 10, 24, dtype=np.float32
).reshape(-1, 1)
W_OI[3] = 0  # as of padding
STORED = {
    "float32": Cast.of(jnp.asarray(W_OI), jnp.float32),
    "bfloat16": Cast.of(jnp.asarray(W_OI), jnp.bfloat16),
    "int8": Int8.of(jnp.asarray(W_OI), jnp.float32),
    "int4": Int4.of(jnp.asarray(W_OI), jnp.float32),
}
EACH = pytest.mark.parametrize("weight", STORED.values(), ids=STORED)


def test_how_a_product_is_written():
    assert [way(rows, "gpu", 16) for rows in (1, 2, 64)] == ["reduce", "dot", "dot"]
    assert [way(rows, "cpu", 16) for rows in (1, 16, 17)] == ["each", "each", "dot"]
    assert [way(rows, "tpu", 16) for rows in (1, 64)] == ["dot", "dot"]
    assert STORED["int4"].each == 1 and STORED["int8"].each == 8


@EACH
@pytest.mark.parametrize("rows", [1, 3])
def test_every_way_of_a_product_is_that_of_the_array(weight, rows):
    x = np.random.default_rng(1).normal(size=(rows, 64)).astype(np.float32)
    want = x.astype(np.float64) @ np.asarray(weight.array(), np.float64)
    atol = 1e-6 * np.abs(x[:, :, None] * np.asarray(weight.array())).sum(1).max()
    for name in ("reduce", "each", "dot"):
        for backend in ("cpu", "gpu", "tpu"):
            got = jax.jit(type(weight).by, static_argnums=(1, 3))(weight, name, x, backend)
            np.testing.assert_allclose(got, want, atol=atol, err_msg=f"{name} {backend}")


@EACH
def test_products_take_any_leading_axes_and_keep_the_dtype(weight):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 64)), jnp.bfloat16)
    y = jax.jit(type(weight).product)(weight, x)
    assert y.shape == (2, 3, 24) and y.dtype == jnp.bfloat16
    want = np.asarray(x, np.float32) @ np.asarray(weight.array())
    np.testing.assert_allclose(np.asarray(y, np.float32), want, rtol=2**-8, atol=1e-4)
    many = jax.jit(type(weight).product)(weight, jnp.tile(x[:, :1], (1, 20, 1)))
    np.testing.assert_allclose(many[:, 7], y[:, 0], rtol=2**-7, atol=1e-4)


@EACH
def test_rows_are_those_of_the_matrix(weight):
    ids = jnp.array([[3, 23, 0], [7, 7, 1]])
    np.testing.assert_array_equal(weight.rows(ids), weight.array().T[ids])
    assert not weight.rows(jnp.array([3])).any()


def test_int8_rounds_by_at_most_half_a_step():
    got = np.asarray(STORED["int8"].array()).T
    bound = np.abs(W_OI).max(-1, keepdims=True) / 127 / 2
    assert (np.abs(got - W_OI) <= bound * (1 + 1e-5)).all()
    assert np.abs(got - W_OI).max() > 0  # it is rounded


def test_int4_has_smaller_squares_than_the_nearest_numbers_of_a_plain_step():
    groups = W_OI.reshape(24, -1, 32)
    step = np.abs(groups).max(-1, keepdims=True) / 7
    plain = np.round(groups / np.where(step == 0, 1, step)) * step
    got = np.asarray(STORED["int4"].array()).T.reshape(groups.shape)
    before, after = ((x - groups) ** 2 for x in (plain, got))
    assert (after.sum(-1) <= before.sum(-1) * (1 + 1e-5)).mean() > 0.8
    assert 0 < after.sum() < 0.85 * before.sum()


def wide_weight(name):
    """With 40 times the rows: 960 outputs of 64 inputs."""
    stored = STORED[name]
    longer = {
        field.name: jnp.tile(array, (40, *[1] * (array.ndim - 1)))
        for field in dataclasses.fields(stored)
        if isinstance(array := getattr(stored, field.name), jax.Array) and len(array) == 24
    }
    return dataclasses.replace(stored, **longer)


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_a_loop_of_steps_reads_the_matrix_as_it_is_stored(name):
    """Without a barrier XLA converts it before the loop; without the ones it computes x anew."""

    def steps(weight, x, scale_I):
        def step(_, x):
            return jnp.tanh(weight.product(x * scale_I[None]))[:, :64]

        return jax.lax.fori_loop(0, 9, step, x)

    shapes = jax.ShapeDtypeStruct((1, 64), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.float32)
    text = jax.jit(steps).lower(wide_weight(name), *shapes).compile().as_text()
    assert not re.findall(r"= f32\[(?:960,64|64,960)\]\S* get-tuple-element", text)
    bodies = [part.strip().splitlines() for part in text.split("\n\n")]
    met = [lines[0].count(": ") for lines in bodies if any(" dot(" in line for line in lines)]
    assert met == [2]  # the matrix and x, which is ready


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_few_rows_meet_no_converted_copy_of_the_matrix(name):
    """XLA's CPU back end multiplies by what is stored; many rows show that a copy would be seen."""
    weight = wide_weight(name)

    def copies(rows):
        x = jax.ShapeDtypeStruct((rows, 64), jnp.float32)
        text = jax.jit(type(weight).product).lower(weight, x).compile().as_text()
        return len(re.findall(r"= f32\[960,64\]\S* (?:fusion|convert)\(", text.split("ENTRY")[1]))

    assert copies(1) == copies(4) == 0 and copies(17) == 1


def test_bytes():
    def size(weight):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(weight))

    ones = 64 * 4
    assert size(STORED["bfloat16"]) == 24 * 64 * 2 + ones
    assert size(STORED["int8"]) == 24 * 64 + 24 * 4 + ones
    assert size(STORED["int4"]) == 24 * 64 // 2 + 24 * 2 * 4 + ones


def test_groups_divide_the_columns():
    weight = Int4.of(jnp.asarray(W_OI[:, :48]), jnp.float32, 32)
    assert weight.scale_OG.shape == (24, 3)
    np.testing.assert_array_equal(np.asarray(weight.array()).T[3], 0)


@EACH
def test_a_dense_layer_takes_a_weight_in_the_place_of_its_kernel(weight):
    dense = Dense(24, tiny().dims())
    x, bias = jnp.ones((2, 3, 64)), jnp.arange(24.0)
    got = dense.apply({"params": {"kernel": weight, "bias": bias}}, x)
    want = dense.apply({"params": {"kernel": weight.array(), "bias": bias}}, x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_dense_layers_of_one_input_become_one():
    def dense(width, start):
        return {"kernel": jnp.full((4, width), start), "bias": jnp.full(width, start)}

    params = {"a": dense(2, 1.0), "b": dense(3, 2.0), "norm": {"scale": jnp.ones(4)}}
    one = joined(params, "ab", ("a", "b"))
    assert set(one) == {"ab", "norm"} and one["norm"] is params["norm"]
    assert one["ab"]["kernel"][2].tolist() == one["ab"]["bias"].tolist() == [1, 1, 2, 2, 2]
    assert joined(one, "ab", ("a", "b")) is one
    other = {**params, "b": {**params["b"], "more": jnp.ones(1)}}
    assert joined(other, "ab", ("a", "b")) is other
    stored = {**params, "b": {**params["b"], "kernel": STORED["int8"]}}
    assert joined(stored, "ab", ("a", "b")) is stored


def test_weights_are_values():
    with pytest.raises(dataclasses.FrozenInstanceError):
        STORED["int8"].q_OI = 1
    leaves, tree = jax.tree.flatten(STORED["int8"])
    assert len(leaves) == 3 and jax.tree.unflatten(tree, leaves) == STORED["int8"]
