# SPDX-License-Identifier: Apache-2.0
"""Export and import again; what transformers makes of it is in test_export.py."""

import dataclasses
import errno
import json
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exports import grown, shrunk
from safetensors.numpy import load_file

from jaxgpt.data.tokenizer import ByteTokenizer, load_tokenizer
from jaxgpt.errors import CheckpointError, ConfigError, DivergedError, ResourceError
from jaxgpt.interop.load import load
from jaxgpt.interop.rows import flat_shapes, nested
from jaxgpt.interop.save import save
from jaxgpt.train.config import LoraConfig
from jaxgpt.train.lora import init_lora

PARITY = """deepseek-v2 deepseek-v2-lite deepseek-v3 deepseek-v3-yarn gemma gemma2 gemma3 gpt-oss
    gpt2 llama llama-bias llama-linear llama-llama3rope llama-yarn mistral mixtral olmo2
    openai-gpt opt opt-350m-style phi pythia qwen2 qwen3 qwen3-moe qwen3-moe-dense0 smollm3
    stablelm stablelm2""".split()
LLAMA = shrunk("smollm2-135m")
module = sys.modules["jaxgpt.interop.save"]


@pytest.fixture(scope="module")
def params():
    return grown(LLAMA)


def changed(params, path, change):
    """A copy with another array at one place."""
    out = jax.tree.map(lambda leaf: leaf, params)
    *names, last = path.split("/")
    node = out
    for name in names:
        node = node[name]
    node[last] = change(np.array(node[last]))
    return out


@pytest.mark.parametrize("name", PARITY)
def test_import_export_import(shared, tmp_path, name):
    folder = shared / "parity" / name
    cfg, params, _ = load(folder)
    family = json.loads((folder / "config.json").read_text())["model_type"]
    saved = save(tmp_path / "out", cfg, params, family=family)
    back = load(tmp_path / "out")
    assert back.config == cfg and back.skipped == {}
    jax.tree.map(np.testing.assert_array_equal, back.params, params)
    ours, theirs = (load_file(d / "model.safetensors") for d in (tmp_path / "out", folder))
    assert ours.keys() == theirs.keys()
    for tensor, array in theirs.items():
        assert ours[tensor].dtype == array.dtype and ours[tensor].tobytes() == array.tobytes()
    assert saved == (
        family,
        *(sum(getattr(a, n) for a in ours.values()) for n in ("size", "nbytes")),
    )


def test_neither_padding_nor_a_tied_head_is_written(tmp_path, params):
    assert params["embed"]["embedding"].shape == (128, 64)
    save(tmp_path / "out", LLAMA, params)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape == (96, 64)
    assert "lm_head.weight" not in tensors
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 96


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_short_floats(tmp_path, params, dtype):
    save(tmp_path / "out", LLAMA, params, dtype=dtype)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {array.dtype for array in tensors.values()} == {np.dtype(dtype)}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == np.dtype(dtype).name
    want = np.asarray(params["block_1"]["ffn"]["gate"]["kernel"].T).astype(dtype)
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.gate_proj.weight"], want)


def test_bfloat16_parameters_stay_as_they_are(tmp_path, params):
    short = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    save(tmp_path / "out", LLAMA, short, dtype=ml_dtypes.bfloat16)
    back = load(tmp_path / "out", dtype=jnp.bfloat16).params
    jax.tree.map(np.testing.assert_array_equal, back, short)


def test_several_files(tmp_path, params):
    save(tmp_path / "one", LLAMA, params)
    save(tmp_path / "many", LLAMA, params, max_file_bytes=100_000)
    names = sorted(file.name for file in (tmp_path / "many").iterdir())
    assert "model-00001-of-00003.safetensors" in names and "model.safetensors" not in names
    one, many = (load(tmp_path / name).params for name in ("one", "many"))
    jax.tree.map(np.testing.assert_array_equal, one, many)


def test_a_tokenizer_goes_along(shared, tmp_path):
    folder = shared / "data" / "stories260k"
    cfg, weights, _ = load(folder)
    tokenizer = load_tokenizer(folder)
    save(tmp_path / "out", cfg, weights, tokenizer)
    back = load_tokenizer(tmp_path / "out")
    text = "Once upon a time"
    assert back.encode(text).tolist() == tokenizer.encode(text).tolist()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    with pytest.raises(ConfigError, match="the tokenizer has 256 tokens, the model 96"):
        save(tmp_path / "other", LLAMA, grown(LLAMA), ByteTokenizer())


# --- what is refused, and leaves nothing behind ---------------------------------------------------


@pytest.mark.parametrize(
    "path, change, error, what",
    [
        ("final_norm/scale", lambda a: a * np.inf, DivergedError, "model.norm.weight holds"),
        ("embed/embedding", lambda a: a[:96], ConfigError, r"embed/embedding of .* is \(96, 64\)"),
        ("block_1/attention/k/kernel", lambda a: a.T, ConfigError, r"\(32, 64\), but \(64, 32\)"),
    ],
)
def test_wrong_parameters(tmp_path, params, path, change, error, what):
    with pytest.raises(error, match=what):
        save(tmp_path / "out", LLAMA, changed(params, path, change))
    assert not list(tmp_path.iterdir())


def test_adapters_are_merged_before(tmp_path, params):
    with_lora = init_lora(params, LoraConfig(rank=2), jax.random.key(0))
    with pytest.raises(ConfigError, match=r"lora/.*is \(64, 2\), but absent .* merged first"):
        save(tmp_path / "out", LLAMA, with_lora)


def test_other_dtypes(tmp_path, params):
    for dtype in (jnp.int32, np.float64):
        with pytest.raises(ConfigError, match="is no dtype of weights"):
            save(tmp_path / "out", LLAMA, params, dtype=dtype)


def test_a_model_that_nobody_has(tmp_path, params):
    cfg = dataclasses.replace(LLAMA, embed=dataclasses.replace(LLAMA.embed, scale=True))
    with pytest.raises(
        ConfigError, match=r"the nearest is llama, but embed.scale is True, there F"
    ):
        save(tmp_path / "out", cfg, params)
    assert not list(tmp_path.iterdir())


def test_an_earlier_export_is_safe(tmp_path, params):
    save(tmp_path / "out", LLAMA, params)
    other = changed(params, "final_norm/scale", lambda a: a + 1)
    with pytest.raises(ConfigError, match="is there already"):
        save(tmp_path / "out", LLAMA, other)
    bad = changed(params, "final_norm/scale", lambda a: a * np.nan)
    with pytest.raises(DivergedError):
        save(tmp_path / "out", LLAMA, bad, force=True)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "out").params, params)
    save(tmp_path / "out", LLAMA, other, force=True)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "out").params, other)


def test_what_was_written_is_read_back_and_compared(tmp_path, params, monkeypatch):
    def wrong(*given):
        for name, array in real(*given):
            yield name, array + np.float32(name.endswith("1.mlp.up_proj.weight"))

    real = module.written
    monkeypatch.setattr(module, "written", wrong)
    with pytest.raises(CheckpointError, match="reads back otherwise: block_1/ffn/up/kernel"):
        save(tmp_path / "out", LLAMA, params)
    assert not list(tmp_path.iterdir())


def test_a_full_disk(tmp_path, params, monkeypatch):
    def full(*given, **how):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_tensors", full)
    with pytest.raises(ResourceError, match=r"cannot be written: No space left .* 272 kB, free"):
        save(tmp_path / "out", LLAMA, params)
    assert not list(tmp_path.iterdir())


def test_it_can_be_stopped(tmp_path, params):
    calls = []

    def check():
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "out", LLAMA, params, check=check)
    assert not list(tmp_path.iterdir())


def test_no_second_copy_is_in_memory(tmp_path):
    """Beyond the parameters, at most a few times the largest of them."""
    import tracemalloc

    cfg = dataclasses.replace(shrunk("llama-7b"), d_model=256, n_layers=8, vocab_size=512)
    params = nested({path: np.ones(shape, np.float32) for path, shape in flat_shapes(cfg).items()})
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    save(tmp_path / "warm", cfg, params)
    tracemalloc.start()
    save(tmp_path / "out", cfg, params)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * largest + 1_000_000 < total / 2
