# SPDX-License-Identifier: Apache-2.0
"""Patterns of published models as layer edits, each layer probed by itself.

How edits are resolved, and what they refuse, is in test_model.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.rope import RoPE
from jaxgpt.model import LayerEdit, param_shapes
from jaxgpt.testing import jit_forward, jit_init, tiny

W = 4  # keys that a query of a local layer sees
LOCAL, GLOBAL = [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5], [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]  # N07
BANDED = {"attention.window": W}
PATTERNS = {
    # Brown et al. 2020, section 2.1: dense and locally banded layers take turns
    "gpt3": (4, (LayerEdit(every=2, start=1, set=BANDED),), [None, W, None, W]),
    # Gemma Team 2025, section 2: some local layers for each global one, the local ones first
    "gemma3": (
        3,
        (LayerEdit(set=BANDED), LayerEdit(every=3, start=2, set={"attention.window": None})),
        [W, W, None],
    ),
}


@pytest.fixture(scope="module", params=PATTERNS)
def pattern(request):
    n_layers, edits, windows = PATTERNS[request.param]
    attention = GQA(n_heads=4, n_kv_heads=2)
    cfg = tiny(n_layers=n_layers, attention=attention, position=RoPE(), edits=edits)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), param_shapes(cfg))
    return cfg, zeros, windows


PREFILL, DECODE = [(0, 8)], [(t, t + 1) for t in range(8)]


@pytest.mark.parametrize("spans", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_each_layer_averages_over_its_own_window(pattern, spans):  # N07
    """Parameters of zero make all scores equal; the position is put in as the value of a key."""
    cfg, zeros, windows = pattern
    assert [layer.attention.window for layer in cfg.layers] == windows
    value_BTKH = np.broadcast_to(np.arange(8.0, dtype="f4")[None, :, None, None], (1, 8, 2, 4))
    tokens_BT = pos_BT = np.arange(8)[None]
    caches, found = cfg.init_caches(1, 8), []
    for start, end in spans:
        fed = slice(start, end)
        sites = [f"block_{i}/attention/values" for i in range(len(windows))]
        patch = dict.fromkeys(sites, value_BTKH[:, fed])
        call = dict(pos_BT=pos_BT[:, fed], caches=caches, patch=patch, capture=("*/heads",))
        out = jit_forward(cfg, zeros, tokens_BT[:, fed], **call)
        caches = out.caches
        found.append(out.captured)
    for i, window in enumerate(windows):
        y_TNH = np.concatenate([f[f"block_{i}/attention/heads"] for f in found], 1)[0]
        want = np.array(LOCAL if window else GLOBAL)[:, None, None]
        np.testing.assert_allclose(y_TNH, np.broadcast_to(want, y_TNH.shape), atol=1e-5)


def test_a_scale_for_each_layer():
    """Scores over (layer + 1), which GPT-2 configs call scale_attn_by_inverse_layer_idx."""
    edits = tuple(
        LayerEdit(start=i, stop=i + 1, set={"attention.scale": 4**-0.5 / (i + 1)}) for i in range(3)
    )
    cfg = tiny(n_layers=3, edits=edits)
    params = jit_init(cfg, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 30, (1, 8), np.int32)
    seen = jit_forward(cfg, params, tokens, capture=("*/attention/*",)).captured
    for i in range(3):
        q, k, scores = (
            seen[f"block_{i}/attention/{site}"] for site in ("queries", "keys", "scores")
        )
        want = np.einsum("btnh,bsnh->bnts", q, k) / 2 / (i + 1)
        np.testing.assert_allclose(scores, want, atol=1e-5 * np.abs(want).max())
