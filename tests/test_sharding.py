# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys

import pytest

from jaxgpt.errors import ConfigError
from jaxgpt.train.sharding import check_rows

SCRIPT = """
import dataclasses, functools, json
import jax, numpy as np
from jaxgpt.boxes.attention import GQA
from jaxgpt.data.batches import Batches
from jaxgpt.model import ModelConfig
from jaxgpt.train import sharding
from jaxgpt.train.config import OptimConfig, TrainConfig
from jaxgpt.train.optim import optimizer
from jaxgpt.train.step import init_state, train_step

jax.config.update("jax_default_matmul_precision", "highest")
cfg = ModelConfig(vocab_size=13, context_length=8, d_model=16, n_layers=2, dropout=0.2,
                  attention=GQA(4, n_kv_heads=2))
tx, train = optimizer(OptimConfig(warmup_steps=0), 100), TrainConfig(batch_size=16, accumulate=2)
mesh = sharding.make_mesh()
init = functools.partial(init_state, cfg, tx, 0)
abstract = sharding.state_shardings(mesh, jax.eval_shape(init))
whole = jax.tree.map(lambda leaf: leaf.sharding, abstract)
rows = sharding.batch_sharding(mesh)
step = jax.jit(functools.partial(train_step, cfg=cfg, tx=tx, train=train),
               in_shardings=(whole, rows), out_shardings=(whole, None), donate_argnums=0)
state = jax.jit(init, out_shardings=whole)()
batches = Batches(np.random.default_rng(0).integers(0, 13, 999).astype(np.uint8), 8, 16, 0)
losses = []
for s in range(20):
    batch = sharding.put_batch(batches.batch(s), rows)
    assert len(batch.tokens_BT.sharding.device_set) == jax.device_count()
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss_nats"]))
assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
sums = [float(abs(leaf).sum()) for leaf in jax.tree.leaves(state.params)]
print(json.dumps({"devices": jax.device_count(), "losses": losses, "params": sums}))
"""


def run(devices):
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300
    )
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])


def test_eight_devices_train_like_one():
    """Twenty steps with dropout and accumulation: masks do not depend on the device count."""
    one, eight = run(1), run(8)
    assert (one["devices"], eight["devices"]) == (1, 8)
    assert eight["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert eight["params"] == pytest.approx(one["params"], rel=1e-5, abs=1e-5)


def test_rows_must_split_evenly():
    check_rows(16, 2, 8)
    with pytest.raises(ConfigError, match=r"batch_size=6 .* 8 devices; fix: --train.batch_size=8"):
        check_rows(6, 1, 8)
    with pytest.raises(ConfigError, match=r"in 2 micro-batches; fix: --train.batch_size=16 or 32"):
        check_rows(24, 2, 8)
