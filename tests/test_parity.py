# SPDX-License-Identifier: Apache-2.0
"""Our logits against those of Transformers, for tiny random models and for a small trained one."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.flops import count_params
from jaxgpt.interop.load import load
from jaxgpt.testing import jit_forward

TOLERANCE = 1e-4
MODELS = """deepseek-v2 deepseek-v2-lite deepseek-v3 deepseek-v3-yarn gemma gemma2 gemma3 gpt-oss
    gpt2 llama llama-bias llama-linear llama-llama3rope llama-yarn mistral mixtral olmo2
    openai-gpt opt opt-350m-style phi pythia qwen2 qwen3 qwen3-moe qwen3-moe-dense0 smollm3
    stablelm stablelm2"""


def logits(cfg, params, ids):
    out = jit_forward(cfg, params, jnp.asarray(ids, jnp.int32)).logits_BTV
    assert np.isneginf(out[..., cfg.vocab_size :]).all()
    return np.asarray(out[..., : cfg.vocab_size])


def greedy(cfg, params, prompt, n):
    """The likeliest continuation: the prompt into a cache, then token by token."""
    caches, ids, pos = cfg.init_caches(1, len(prompt) + n), list(prompt), 0
    for _ in range(n):
        tokens = jnp.asarray([ids[pos:]], jnp.int32)
        pos_BT = jnp.arange(pos, len(ids))[None]
        out = jit_forward(cfg, params, tokens, pos_BT=pos_BT, caches=caches, last_only=True)
        caches, pos = out.caches, len(ids)
        ids.append(int(out.logits_BTV[0, -1].argmax()))
    return ids


@pytest.mark.parametrize("name", MODELS.split())
def test_tiny_random_models(shared, name):
    cfg, params, skipped = load(shared / "parity" / name)
    assert skipped == {}
    ref = np.load(shared / "parity" / name / "ref.npz")
    got = logits(cfg, params, ref["ids"])
    np.testing.assert_allclose(got, ref["logits"], rtol=0, atol=TOLERANCE)
    [want] = ref["greedy"].tolist()
    assert greedy(cfg, params, want[:8], len(want) - 8) == want


@pytest.mark.parametrize("name", MODELS.split())
def test_both_dialects_of_config_json_are_the_same_model(shared, tmp_path, name):
    folder = shared / "parity" / name
    (tmp_path / "config.json").symlink_to(folder / "v4" / "config.json")
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (old, old_params, _), (new, new_params, _) = load(tmp_path), load(folder)
    assert old == new
    jax.tree.map(np.testing.assert_array_equal, old_params, new_params)


def test_a_trained_llama(shared):
    folder = shared / "data" / "stories260k"
    cfg, params, _ = load(folder)
    assert sum(count_params(cfg).values()) == 260_032
    ref = json.loads((folder / "reference.json").read_text())
    [got] = logits(cfg, params, [ref["fixed_ids"]])
    np.testing.assert_allclose(got[-1], ref["fixed_logits_last_row"], atol=TOLERANCE)
    assert got.argmax(-1).tolist() == ref["fixed_logits_argmax"]
    logsumexp = jax.nn.logsumexp(got, axis=-1)
    np.testing.assert_allclose(logsumexp, ref["fixed_logits_logsumexp"], atol=TOLERANCE)


def test_the_story_that_a_trained_llama_tells(shared):
    folder = shared / "data" / "stories260k"
    cfg, params, _ = load(folder)
    ref = json.loads((folder / "reference.json").read_text())
    want = ref["greedy_from_bos_ids"]
    assert greedy(cfg, params, want[:1], len(want) - 1) == want
    logp = jax.nn.log_softmax(logits(cfg, params, [want[:-1]])[0])
    nll = -np.take_along_axis(logp, np.asarray(want[1:])[:, None], -1).mean()
    np.testing.assert_allclose(nll, ref["mean_nll_of_greedy_text"], atol=TOLERANCE)
