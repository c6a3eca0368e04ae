# SPDX-License-Identifier: Apache-2.0
"""Experts on eight devices against the same experts on one: values and gradients."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.ffn import MLP
from jaxgpt.boxes.moe import MoE
from jaxgpt.model import ModelConfig
from jaxgpt.placing import placing
from jaxgpt.train.config import MeshConfig
from jaxgpt.train.sharding import make_layout, make_mesh

moe = MoE(8, 2, MLP(d_ff=8))
cfg = ModelConfig(vocab_size=64, d_model=16, n_layers=1, attention=GQA(4), ffn=moe)
ffn = cfg.ffn.build(cfg.dims())
x = jax.random.normal(jax.random.key(0), (8, 4, 16))
valid = jnp.arange(4)[None] < jnp.arange(1, 9)[:, None]  # rows of padding differ
x = jnp.where(valid[..., None], x, jnp.nan)
params = ffn.init(jax.random.key(1), x, valid)["params"]
params = jax.tree.map(lambda p: p + 0.1, params)  # biases too

def loss(mesh, params, x):
    with placing(mesh):
        y, aux = ffn.apply({"params": params}, x, valid)
    return jnp.where(valid[..., None], y**2, 0).sum(), aux

grad = jax.value_and_grad(loss, argnums=1, has_aux=True)
one = grad(None, params, x)
meshes = {"expert": 8}, dict.fromkeys(("fsdp", "tensor", "expert"), 2)
for sizes in (*meshes, dict.fromkeys(("data", "tensor", "context"), 2)):
    layout = make_layout(make_mesh(MeshConfig(**sizes)), {})
    many = jax.jit(lambda params, x: grad(layout, params, x))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one, many)
"""


@pytest.mark.slow
def test_experts_are_shared_by_devices():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300
    )
    assert out.returncode == 0, out.stderr
