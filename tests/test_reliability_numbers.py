# SPDX-License-Identifier: Apache-2.0
"""Numbers that nothing else holds: losses of a run from release to release, and without a compiler.

The other gates stand where they belong: caches and batches in test_generate.py, accumulation,
precision, remat and finite differences in test_step.py, devices in test_sharding.py, exports in
test_export.py, and equal models in test_identities.py.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.rope import RoPE
from jaxgpt.model import forward
from jaxgpt.testing import jit_forward, jit_init, tiny
from jaxgpt.train.files import read_metrics

PINNED = {
    "loss_nats": {1: 2.2265737, 5: 2.2033949, 9: 2.1640997, 13: 2.1613696, 17: 2.1758182},
    "val_nats_per_token": {5: 2.2225944, 10: 2.2184295, 15: 2.2337174, 20: 2.2392080},
}
"""Of commands.py's run with jax 0.10.2 on a CPU: another start, batch or mask would move them."""


@pytest.mark.skipif(sys.platform != "linux", reason="the run's helpers need Linux")
def test_pinned_losses(finished):
    records = read_metrics(finished / "runs/micro/metrics.jsonl")
    limit = 1e-4 if jax.__version__ == "0.10.2" else 1e-2
    for name, pinned in PINNED.items():
        found = {r["step"]: r[name] for r in records if name in r}
        assert {step: found[step] for step in pinned} == pytest.approx(pinned, abs=limit), name


def test_compiled_or_not():
    cfg = tiny(n_layers=1, attention=GQA(4, 2), position=RoPE())
    params = jit_init(cfg, jax.random.key(0))
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 8), 0, cfg.vocab_size)
    compiled = jit_forward(cfg, params, tokens_BT).logits_BTV
    with jax.disable_jit():
        plain = forward(cfg, params, tokens_BT).logits_BTV
    real = jnp.isfinite(compiled)
    np.testing.assert_allclose(plain[real], compiled[real], atol=1e-5)
    np.testing.assert_array_equal(jnp.isfinite(plain), real)
