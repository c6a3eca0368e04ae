# SPDX-License-Identifier: Apache-2.0
"""Our logits against those of Transformers, for tiny random models and for a small trained one."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.boxes.head import Tied, Untied
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.position import RoPE
from jaxgpt.model import ModelConfig
from jaxgpt.testing import jit_forward

TOLERANCE = 1e-4


def gpt2(config, w):
    """GPT-2's files hold [in, out] matrices, with q, k and v side by side."""
    cfg = ModelConfig(
        vocab_size=config["vocab_size"],
        context_length=config["n_positions"],
        d_model=config["n_embd"],
        n_layers=config["n_layer"],
        attention=GQA(n_heads=config["n_head"]),
        vocab_multiple=1,
    )

    def dense(name):
        return {"kernel": w[f"{name}.weight"], "bias": w[f"{name}.bias"]}

    def norm(name):
        return {"scale": w[f"{name}.weight"], "bias": w[f"{name}.bias"]}

    params = {
        "embed": {"embedding": w["transformer.wte.weight"]},
        "position": {"embedding": w["transformer.wpe.weight"]},
        "final_norm": norm("transformer.ln_f"),
    }
    for i in range(cfg.n_layers):
        at = f"transformer.h.{i}"
        qkv = {k: np.split(v, 3, axis=-1) for k, v in dense(f"{at}.attn.c_attn").items()}
        attention = {n: {k: v[j] for k, v in qkv.items()} for j, n in enumerate("qkv")}
        params[f"block_{i}"] = {
            "attention_norm": norm(f"{at}.ln_1"),
            "attention": attention | {"out": dense(f"{at}.attn.c_proj")},
            "ffn_norm": norm(f"{at}.ln_2"),
            "ffn": {"up": dense(f"{at}.mlp.c_fc"), "down": dense(f"{at}.mlp.c_proj")},
        }
    return cfg, params


def llama(config, w):
    """Llama's files hold [out, in] matrices, rotated in halves."""
    tied, norm_box = config["tie_word_embeddings"], RMSNorm(eps=config["rms_norm_eps"])
    cfg = ModelConfig(
        vocab_size=config["vocab_size"],
        context_length=config["max_position_embeddings"],
        d_model=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        position=RoPE(theta=config["rope_parameters"]["rope_theta"]),
        norm=norm_box,
        final_norm=norm_box,
        attention=GQA(
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            use_bias=config["attention_bias"],
        ),
        ffn=GatedMLP(d_ff=config["intermediate_size"], use_bias=config["mlp_bias"]),
        head=Tied() if tied else Untied(),
        vocab_multiple=1,
    )

    def dense(name):
        bias = {"bias": w[f"{name}.bias"]} if f"{name}.bias" in w else {}
        return {"kernel": w[f"{name}.weight"].T} | bias

    params = {
        "embed": {"embedding": w["model.embed_tokens.weight"]},
        "final_norm": {"scale": w["model.norm.weight"]},
    }
    if not tied:
        params["head"] = {"out": dense("lm_head")}
    for i in range(cfg.n_layers):
        at = f"model.layers.{i}"
        params[f"block_{i}"] = {
            "attention_norm": {"scale": w[f"{at}.input_layernorm.weight"]},
            "attention": {n: dense(f"{at}.self_attn.{n}_proj") for n in "qkv"}
            | {"out": dense(f"{at}.self_attn.o_proj")},
            "ffn_norm": {"scale": w[f"{at}.post_attention_layernorm.weight"]},
            "ffn": {n: dense(f"{at}.mlp.{n}_proj") for n in ("gate", "up", "down")},
        }
    return cfg, params


@functools.cache
def load(folder):
    config = json.loads((folder / "config.json").read_text())
    of = {"gpt2": gpt2, "llama": llama}[config["model_type"]]
    cfg, params = of(config, load_file(folder / "model.safetensors"))
    return cfg, jax.tree.map(jnp.asarray, params)


def logits(cfg, params, ids):
    return np.asarray(jit_forward(cfg, params, jnp.asarray(ids, jnp.int32)).logits_BTV)


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


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-bias"])
def test_tiny_random_models(shared, name):
    cfg, params = load(shared / "parity" / name)
    ref = np.load(shared / "parity" / name / "ref.npz")
    np.testing.assert_allclose(logits(cfg, params, ref["ids"]), ref["logits"], atol=TOLERANCE)
    [want] = ref["greedy"].tolist()
    assert greedy(cfg, params, want[:8], len(want) - 8) == want


def test_a_trained_llama(shared):
    folder = shared / "data" / "stories260k"
    cfg, params = load(folder)
    assert sum(p.size for p in jax.tree.leaves(params)) == 260_032
    ref = json.loads((folder / "reference.json").read_text())
    [got] = logits(cfg, params, [ref["fixed_ids"]])
    np.testing.assert_allclose(got[-1], ref["fixed_logits_last_row"], atol=TOLERANCE)
    assert got.argmax(-1).tolist() == ref["fixed_logits_argmax"]
    logsumexp = jax.nn.logsumexp(got, axis=-1)
    np.testing.assert_allclose(logsumexp, ref["fixed_logits_logsumexp"], atol=TOLERANCE)


def test_the_story_that_a_trained_llama_tells(shared):
    folder = shared / "data" / "stories260k"
    cfg, params = load(folder)
    ref = json.loads((folder / "reference.json").read_text())
    want = ref["greedy_from_bos_ids"]
    assert greedy(cfg, params, want[:1], len(want) - 1) == want
    logp = jax.nn.log_softmax(logits(cfg, params, [want[:-1]])[0])
    nll = -np.take_along_axis(logp, np.asarray(want[1:])[:, None], -1).mean()
    np.testing.assert_allclose(nll, ref["mean_nll_of_greedy_text"], atol=TOLERANCE)
