# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.train.digest import by_path, digest, inspect, spec

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "int8", "uint16", "bool"]


def some_bits(dtype: str, shape=(5, 7)):
    """Random bit patterns of `dtype`: NaN, inf and denormals included."""
    raw = np.random.default_rng(0).integers(0, 2, (*shape, 8 * np.dtype(dtype).itemsize))
    if dtype == "bool":
        return raw[..., 0].astype(bool)
    return np.packbits(raw.astype(np.uint8), axis=-1).view(dtype).reshape(shape)


def one(array) -> str:
    return digest({"x": jnp.asarray(array)})["x"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_flipped_bit_changes_both_sums(dtype):
    x = some_bits(dtype)
    before = one(x).split(":")[1]
    for position in (0, 17, 34):
        for bit in range(1 if dtype == "bool" else 8 * x.itemsize):
            raw = x.copy().view(np.uint8).reshape(x.size, x.itemsize)
            raw[position, bit // 8] ^= 1 << (bit % 8)
            after = one(raw.view(x.dtype).reshape(x.shape)).split(":")[1]
            assert after[:8] != before[:8] and after[8:] != before[8:]


def test_swapped_elements_rows_and_columns_are_seen():
    x = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
    seen = {one(x)}
    for a, b in [(0, 1), (3, 77), (126, 127)]:
        y = x.copy().reshape(-1)
        y[[a, b]] = y[[b, a]]
        seen.add(one(y.reshape(x.shape)))
    seen |= {one(x[::-1]), one(x[:, ::-1]), one(x[[1, 0, *range(2, 16)]])}
    assert len(seen) == 7


def test_dtype_and_shape_belong_to_the_digest():
    zeros = [jnp.zeros((2, 3)), jnp.zeros((3, 2)), jnp.zeros((6,)), jnp.zeros((2, 3), jnp.int32)]
    assert len({one(z) for z in zeros}) == 4
    assert one(jnp.zeros((2, 3))).startswith("float32[2,3]:")
    assert one(jnp.zeros((0, 3))) == "float32[0,3]:" + "0" * 16
    assert one(0.0) != one(-0.0)


def test_keys_scalars_and_containers():
    tree = {"key": jax.random.key(0), "step": jnp.int32(3), "none": None, "empty": {}, "t": ((),)}
    found = digest(tree)
    assert list(found) == ["key", "step"]
    assert found["key"].startswith("key<fry>[]:")
    assert found["key"] != digest({"key": jax.random.key(1)})["key"]
    assert json.loads(json.dumps(found)) == found


def mix(x):
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * factor % 2**32
    return x ^ (x >> 16)


def test_equals_the_definition_in_python_integers():
    # Checkpoints on disk hold these values: another result needs another format version.
    x = np.random.default_rng(2).normal(size=(3, 5)).astype(np.float32)
    words = [int(w) for w in x.view(np.uint32).reshape(-1)]
    a = sum(mix(w ^ mix(i + 0x9E3779B9)) for i, w in enumerate(words)) % 2**32
    b = sum(mix((w + mix(i ^ 0x85EBCA6B)) % 2**32) for i, w in enumerate(words)) % 2**32
    assert one(x) == f"float32[3,5]:{a:08x}{b:08x}"
    assert one(jnp.ones((3,), jnp.bfloat16)) == "bfloat16[3]:6bcc01919dcdbdbd"


def test_not_finite_leaves_are_named():
    tree = {"a": jnp.array([1.0, jnp.nan]), "b": jnp.array(jnp.inf, jnp.bfloat16)}
    assert inspect(tree | {"c": jnp.ones(3), "d": jnp.int32(1)})[1] == ["a", "b"]


def test_host_arrays_and_ambiguous_paths_are_refused():
    with pytest.raises(TypeError, match="x is a ndarray"):
        digest({"x": np.zeros(3)})
    with pytest.raises(ValueError, match="same path"):
        by_path({"a/b": 1, "a": {"b": 2}})
    assert spec(jax.ShapeDtypeStruct((2,), jnp.bfloat16)) == "bfloat16[2]"


SHARDED = r"""
import jax, jax.numpy as jnp, json, math, re
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxgpt.train import digest as d
mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
x = jax.random.normal(jax.random.key(0), (16, 8, 6)).astype("bfloat16")
key = jax.random.split(jax.random.key(1), 8)
def put(x, *spec): return jax.device_put(x, NamedSharding(mesh, P(*spec)))
trees = [{"x": put(x, *s), "key": put(key, k), "one": jnp.ones(3)} for s, k in [
    ((), None), (("a",), "a"), ((None, "b"), "b"), ((("a", "b"),), "a"), (("b", "a"), ("a", "b"))]]
text = d._leaf.lower(trees[3]["x"]).compile().as_text()
gathered = [math.prod(map(int, dims.split(","))) for dims in
            re.findall(r"= \w+\[([\d,]*)\]\S* all-gather", text)]
assert gathered and max(gathered) <= 8, gathered  # one partial sum per device, never the array
print(json.dumps([d.digest(t) for t in trees]))
"""


def test_the_same_under_every_sharding():
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    out = subprocess.run([sys.executable, "-c", SHARDED], env=env, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    first, *others = json.loads(out.stdout)
    assert all(other == first for other in others)
    x = jax.random.normal(jax.random.key(0), (16, 8, 6)).astype("bfloat16")
    assert first["x"] == one(x)
