# SPDX-License-Identifier: Apache-2.0
"""Folders like those of the hub: a config.json and safetensors, made or changed for a test."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

LLAMA = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8,
    "rope_theta": 10000.0,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 16,
    "n_positions": 8,
    "n_ctx": 8,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
}


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(arrays, folder / "model.safetensors")
    return folder


def read(folder):
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def draw(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {name: 0.5 * rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}


def llama(layers=2):
    """Random tensors for LLAMA."""
    shapes = {"model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,)}
    shapes["lm_head.weight"] = (16, 8)
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= {
            f"{at}.input_layernorm.weight": (8,),
            f"{at}.post_attention_layernorm.weight": (8,),
            f"{at}.self_attn.q_proj.weight": (8, 8),
            f"{at}.self_attn.k_proj.weight": (4, 8),
            f"{at}.self_attn.v_proj.weight": (4, 8),
            f"{at}.self_attn.o_proj.weight": (8, 8),
            f"{at}.mlp.gate_proj.weight": (12, 8),
            f"{at}.mlp.up_proj.weight": (12, 8),
            f"{at}.mlp.down_proj.weight": (8, 12),
        }
    return draw(shapes)


def gpt2(prefix="transformer."):
    """Random tensors for GPT2, with the masks that old files hold."""
    shapes = {"wte.weight": (16, 8), "wpe.weight": (8, 8), "ln_f.weight": (8,), "ln_f.bias": (8,)}
    masks = {}
    for i in range(2):
        at = f"h.{i}"
        for name in ("ln_1", "ln_2"):
            shapes |= {f"{at}.{name}.weight": (8,), f"{at}.{name}.bias": (8,)}
        for name, n_in, n_out in (
            ("attn.c_attn", 8, 24),
            ("attn.c_proj", 8, 8),
            ("mlp.c_fc", 8, 32),
            ("mlp.c_proj", 32, 8),
        ):
            shapes |= {f"{at}.{name}.weight": (n_in, n_out), f"{at}.{name}.bias": (n_out,)}
        masks[f"{at}.attn.bias"] = np.tri(8, dtype=np.float32)[None, None]
        masks[f"{at}.attn.masked_bias"] = np.array(-1e4, np.float32)
    return {prefix + name: array for name, array in (draw(shapes) | masks).items()}
