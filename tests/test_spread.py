# SPDX-License-Identifier: Apache-2.0
"""Kernels on eight devices against the same kernels on one."""

import os
import subprocess
import sys

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jaxgpt.boxes.alibi import ALiBi
from jaxgpt.kernels import attend
from jaxgpt.masks import Visibility
from jaxgpt.placing import placing
from jaxgpt.train.config import MeshConfig
from jaxgpt.train.sharding import make_layout, make_mesh

B, T, N, H = 4, 8, 8, 4
rng = np.random.default_rng(0)
array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
pos = jnp.asarray([[-1, 0, 1, 2, 3, 4, 5, 6]] * B)
for sizes in ({"tensor": 8}, {"context": 2, "tensor": 4}):
    layout = make_layout(make_mesh(MeshConfig(**sizes)), {})
    for kernel, K, options in (
        ("reference", 8, {"sinks_N": array(N), "bias": ALiBi().bias(N), "softcap": 5.0}),
        ("reference", 2, {"bias": lambda q, k: (q[:, :, None] - k[:, None])[:, None] * 0.1}),
        ("chunked", 1, {"bias": ALiBi().bias(N)}),
        ("xla" if "context" not in sizes else "auto", 2, {}),
    ):
        q, k, v = array(B, T, N, H), array(B, T, K, H), array(B, T, K, H)
        seen = Visibility.full(B, T) if kernel in ("xla", "auto") else Visibility.of(pos)
        seen = seen.replace(kernel=kernel)

        def loss(mesh, *arrays):
            with placing(mesh):
                y = attend(*arrays, seen, scale=0.5, **options)
            return (y**2).sum(), y

        grad = jax.value_and_grad(loss, argnums=(1, 2, 3), has_aux=True)
        one = grad(None, q, k, v)
        run = jax.jit(lambda *arrays: grad(layout, *arrays))
        text = run.lower(q, k, v).as_text()
        assert "shard_map" in text or "manual_computation" in text, "it was not spread"
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)
        jax.tree.map(close, one, run(q, k, v))
"""


def test_each_device_runs_the_kernel_on_its_heads():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300
    )
    assert out.returncode == 0, out.stderr
