# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys

import hubfolders
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from hubfolders import GPT2, LLAMA, write
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import save_file

from jaxgpt.errors import CheckpointError, ConfigError
from jaxgpt.flops import count_params
from jaxgpt.interop import FAMILIES
from jaxgpt.interop.load import load
from jaxgpt.interop.rows import plan, true_shapes
from jaxgpt.model import forward
from jaxgpt.testing import jit_forward

IDS = jnp.asarray([[1, 2, 3, 4, 5]], jnp.int32)


def logits(loaded, **call):
    out = jit_forward(loaded.config, loaded.params, IDS, **call)
    return np.asarray(out.logits_BTV)[..., : loaded.config.vocab_size]


def numpy_gpt2(w, ids, n_heads=2):
    """GPT-2 from its own names and layouts, which is the point: nothing of ours is in between."""

    def affine(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(x, name):
        return reference.layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"])

    x = w["wte.weight"][ids] + w["wpe.weight"][: ids.shape[1]]
    for i in range(2):
        qkv = np.split(affine(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, axis=-1)
        y = reference.attention(*(reference.split(a, n_heads) for a in qkv))
        x = x + affine(y.reshape(x.shape), f"h.{i}.attn.c_proj")
        y = reference.gelu_tanh(affine(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"))
        x = x + affine(y, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_gpt2_layout_masks_and_tied_head(tmp_path, prefix):  # N01
    tensors = hubfolders.gpt2(prefix)
    loaded = load(write(tmp_path, GPT2, tensors))
    w = {name.removeprefix(prefix): a.astype(np.float64) for name, a in tensors.items()}
    np.testing.assert_allclose(logits(loaded), numpy_gpt2(w, np.asarray(IDS)), atol=1e-5)
    assert sum(count_params(loaded.config).values()) == 1952
    assert set(loaded.skipped) == {n for n in tensors if n.endswith((".attn.bias", "masked_bias"))}
    assert set(loaded.skipped.values()) == {"a causal mask, no parameter"}


def test_gpt2_square_matrix_is_not_transposed(tmp_path):  # N01
    tensors = hubfolders.gpt2()
    tensors["transformer.h.0.attn.c_proj.weight"] = np.arange(64, dtype="f").reshape(8, 8) / 64
    tensors["transformer.h.0.attn.c_proj.bias"] = np.zeros(8, "f")
    cfg, params, _ = load(write(tmp_path, GPT2, tensors))
    unit, site = np.eye(8, dtype="f")[0].reshape(1, 1, 2, 4), "block_0/attention"
    out = forward(cfg, params, IDS, capture=[f"{site}/out"], patch={f"{site}/heads": unit})
    np.testing.assert_allclose(out.captured[f"{site}/out"][0, 0], np.arange(8) / 64, atol=1e-7)


def test_the_tied_table_works_at_both_ends(tmp_path):  # N01
    tensors = hubfolders.gpt2()
    before = logits(load(write(tmp_path, GPT2, tensors)))
    for token, seen in ((5, True), (9, False)):  # 5 is in the input, 9 is not
        changed = {name: array.copy() for name, array in tensors.items()}
        changed["transformer.wte.weight"][token, 3] += 0.5
        moved = np.abs(logits(load(write(tmp_path, GPT2, changed))) - before).max((0, 1)) > 1e-4
        assert moved[token], "the head reads the table"
        assert moved[np.arange(16) != token].all() == seen


def test_what_is_loaded_can_be_written_back(tmp_path):  # N01
    tensors = hubfolders.gpt2()
    cfg, params, skipped = load(write(tmp_path / "a", GPT2, tensors))
    shapes = true_shapes(cfg)
    flat = {
        jax.tree_util.keystr(k, simple=True, separator="/"): np.asarray(leaf)
        for k, leaf in jax.tree.leaves_with_path(params)
    }
    flat = {path: a[tuple(map(slice, shapes[path]))] for path, a in flat.items()}
    written = {}
    for piece in plan(FAMILIES["gpt2"].rows, cfg, shapes):
        written |= piece.write(flat)
    assert written.keys() | skipped.keys() == tensors.keys()
    for name, array in written.items():
        np.testing.assert_array_equal(array, tensors[name])
    again = load(write(tmp_path / "b", GPT2, written))
    jax.tree.map(np.testing.assert_array_equal, again.params, params)


# --- what does not fit ----------------------------------------------------------------------------


def broken(tmp_path, config=None, **tensors):
    """A Llama with some tensors exchanged; None takes one away."""
    names = {name.replace("__", "."): array for name, array in tensors.items()}
    arrays = {n: a for n, a in (hubfolders.llama() | names).items() if a is not None}
    return write(tmp_path, LLAMA | (config or {}), arrays)


def test_a_missing_tensor_is_named(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ConfigError, match=f"{name} is missing, for block_1/ffn/up/kernel"):
        load(broken(tmp_path, **{name: None}))


def test_a_tensor_that_nobody_takes_is_named(tmp_path):
    bias = {"model.layers.0.self_attn.q_proj.bias": np.zeros(8, np.float32)}
    with pytest.raises(ConfigError, match=r"q_proj\.bias belongs to no parameter"):
        load(broken(tmp_path, **bias))
    layer = {"model.layers.2.input_layernorm.weight": np.ones(8, np.float32)}
    with pytest.raises(ConfigError, match=r"layers\.2\.input_layernorm\.weight belongs to no"):
        load(broken(tmp_path, **layer))


@pytest.mark.parametrize("key, size", [("vocab_size", 17), ("intermediate_size", 10**8)])
def test_sizes_of_the_config_are_those_of_the_tensors(tmp_path, key, size):
    with pytest.raises(CheckpointError, match=rf"weight has shape \[\d+, 8\], but .*\b{size}\b"):
        load(broken(tmp_path, {key: size}))


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_numbers_that_are_not_finite_are_refused(tmp_path, value):
    array = np.ones((12, 8), np.float32)
    array[7, 3] = value
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=f"{name} holds numbers that are not finite"):
        load(broken(tmp_path, **{name: array}))


def test_a_tied_head_may_be_stored_if_it_is_the_table(tmp_path):
    tied, table = {"tie_word_embeddings": True}, hubfolders.llama()["model.embed_tokens.weight"]
    loaded = load(broken(tmp_path, tied, **{"lm_head.weight": table}))
    assert loaded.skipped == {"lm_head.weight": "the same as model.embed_tokens.weight"}
    with pytest.raises(ConfigError, match=r"lm_head.weight is not model.embed_tokens.weight"):
        load(broken(tmp_path, tied))


def test_frequencies_of_old_files_are_skipped(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    loaded = load(broken(tmp_path, **{name: np.ones(1, np.float32)}))
    assert loaded.skipped == {name: "rates of the rope, which are computed"}


@pytest.mark.parametrize("count", [0, 1])
def test_layers_that_predict_further_ahead_are_skipped_as_counted(shared, tmp_path, count):
    config, tensors = hubfolders.read(shared / "parity" / "deepseek-v3")
    extra = {
        "model.layers.2.eh_proj.weight": np.ones((64, 128), np.float32),
        "model.layers.2.mlp.gate.weight": np.ones((8, 64), np.float32),
    }
    folder = write(tmp_path, config | {"num_nextn_predict_layers": count}, tensors | extra)
    if count:
        skipped = load(folder).skipped
        assert skipped == dict.fromkeys(extra, "of a layer that predicts a token further ahead")
    else:
        with pytest.raises(ConfigError, match=r"model\.layers\.2\.\S+ belongs to no parameter"):
            load(folder)


# --- files ----------------------------------------------------------------------------------------


def leaves(loaded):
    return jax.tree.leaves(loaded.params)


def test_shards_are_one_model(tmp_path):
    tensors = hubfolders.llama()
    whole = load(write(tmp_path / "whole", LLAMA, tensors))
    folder = write(tmp_path / "shards", LLAMA, {})
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i, part in enumerate(np.array_split(sorted(tensors), 3)):
        file = f"model-0000{i + 1}-of-00003.safetensors"
        save_file({str(name): tensors[name] for name in part}, folder / file)
        weight_map |= {str(name): file for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    jax.tree.map(np.testing.assert_array_equal, load(folder).params, whole.params)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_short_floats_are_widened_exactly(tmp_path, stored):
    tensors = {name: array.astype(stored) for name, array in hubfolders.llama().items()}
    loaded = load(write(tmp_path, LLAMA, tensors))
    assert {leaf.dtype for leaf in leaves(loaded)} == {np.dtype(np.float32)}
    want = tensors["model.layers.1.mlp.gate_proj.weight"].astype(np.float32).T
    np.testing.assert_array_equal(loaded.params["block_1"]["ffn"]["gate"]["kernel"], want)


def test_the_dtype_and_the_place_can_be_chosen(tmp_path):
    device, asked = jax.devices()[0], {}

    def sharding(path, shape):
        asked[path] = shape
        return SingleDeviceSharding(device)

    loaded = load(write(tmp_path, LLAMA, hubfolders.llama()), dtype=jnp.bfloat16, sharding=sharding)
    assert {leaf.dtype for leaf in leaves(loaded)} == {jnp.dtype(jnp.bfloat16)}
    assert asked["embed/embedding"] == (128, 8)
    assert len(asked) == len(leaves(loaded))


SHARDED = """
import sys, jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxgpt.interop.load import load
mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
def sharding(path, shape):
    axes = [None] * len(shape)
    divisible = [axis for axis, n in enumerate(shape) if n % 4 == 0]
    if divisible:
        axes[divisible[-1]] = "fsdp"
    return NamedSharding(mesh, PartitionSpec(*axes))
for folder in sys.argv[1:]:
    whole, split = load(folder).params, load(folder, sharding=sharding).params
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(split), strict=True):
        assert b.sharding == sharding("", b.shape)
        np.testing.assert_array_equal(a, b)
"""


@pytest.mark.slow
def test_a_mesh_gets_its_shards(shared, tmp_path):
    """Padding, stacked experts, interleaved columns and head-by-head rows, cut anywhere."""
    llama = write(tmp_path, LLAMA, hubfolders.llama())
    folders = [llama, *(shared / "parity" / name for name in ("gpt-oss", "deepseek-v3", "pythia"))]
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-c", SHARDED, *map(str, folders)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_padding_of_the_vocabulary_is_zero(tmp_path):
    params = load(write(tmp_path, LLAMA, hubfolders.llama())).params
    assert params["embed"]["embedding"].shape == (128, 8)
    assert params["head"]["out"]["kernel"].shape == (8, 128)
    assert not params["embed"]["embedding"][16:].any()
    assert not params["head"]["out"]["kernel"][:, 16:].any()
