# SPDX-License-Identifier: Apache-2.0
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.losses import token_nats
from jaxgpt.model import forward
from jaxgpt.study.ablation import ablate_heads, ablate_layers, activation_patching
from jaxgpt.testing import jit_forward, quick_jit, tiny, worn

CFG = tiny()
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, 6)), jnp.int32)
HEADS = "block_{}/attention/heads"


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, worn(CFG))


@pytest.fixture(scope="module")
def loss(params):
    run = quick_jit(functools.partial(forward, CFG, params, TOKENS))

    def of(**patch):
        patched = {site: jax.tree_util.Partial(f) for site, f in patch.items()}
        return float(token_nats(run(patch=patched).logits_BTV[:, :-1], TOKENS[:, 1:]).mean())

    return of


def test_all_heads_away_is_an_attention_of_its_bias_alone(params):
    """Zero in front of the out projection: what is left behind it is the projection's bias."""
    for layer in range(2):
        bias_D = params[f"block_{layer}"]["attention"]["out"]["bias"]
        assert np.abs(bias_D).min() > 0
        by_head = {HEADS.format(layer): 0.0}
        site = f"block_{layer}/attention/out"
        got = jit_forward(CFG, params, TOKENS, patch=by_head, capture=(site,))
        want = jit_forward(CFG, params, TOKENS, patch={site: bias_D}, capture=(site,))
        assert np.array_equal(got.captured[site], want.captured[site])
        assert np.array_equal(got.logits_BTV, want.logits_BTV)


def test_heads(params, loss):
    effects_LN = ablate_heads(CFG, params, TOKENS)
    assert effects_LN.shape == (2, 4)
    for layer, head in ((0, 3), (1, 0)):
        want = loss(**{HEADS.format(layer): lambda x, n=head: x.at[:, :, n].set(0)}) - loss()
        assert abs(effects_LN[layer, head] - want) < 1e-5 and abs(want) > 1e-4


@pytest.mark.slow
def test_layers_and_means(params, loss):
    effects_L2 = ablate_layers(CFG, params, TOKENS, instead="mean", at_once=2)
    for column, part in enumerate(("attention", "ffn")):
        for layer in range(2):
            site = f"block_{layer}/{part}/out"
            want = loss(**{site: lambda x: x.mean((0, 1))}) - loss()
            assert abs(effects_L2[layer, column] - want) < 1e-5 and abs(want) > 1e-4


def test_what_activation_patching_gives_back(params):
    other = jnp.where(jnp.arange(6)[None] == 2, TOKENS ^ 1, TOKENS)
    run = functools.partial(activation_patching, CFG, params, TOKENS, other)
    words = np.array([3, 4]), np.array([5, 6])
    returned_LT = run(*words)
    assert returned_LT.shape == (2, 6)
    np.testing.assert_allclose(returned_LT[0, [0, 1, 3, 4, 5]], 0, atol=1e-4)  # nothing differs
    np.testing.assert_allclose(returned_LT[0, 2], 1, atol=1e-4)  # nothing else differs
    np.testing.assert_allclose(returned_LT[1, :2], 0, atol=1e-4)
    np.testing.assert_allclose(run(*words, site="out", axis=None)[1], 1, atol=1e-4)


@pytest.mark.slow
def test_a_patched_head_is_that_of_the_clean_run(params):
    other = jnp.where(jnp.arange(6)[None] == 2, TOKENS ^ 1, TOKENS)
    answer_B, other_B = np.array([3, 4]), np.array([5, 6])
    where = dict(site="attention/heads", axis=2)
    got = activation_patching(CFG, params, TOKENS, other, answer_B, other_B, **where)[0, 1]
    site = HEADS.format(0)
    clean = jit_forward(CFG, params, TOKENS, capture=(site,))
    head = jax.tree_util.Partial(
        lambda new, x: x.at[:, :, 1].set(new[:, :, 1]), clean.captured[site]
    )
    outs = [clean, *(jit_forward(CFG, params, other, patch=p) for p in (None, {site: head}))]
    last = [np.asarray(out.logits_BTV)[:, -1] for out in outs]
    rows = np.arange(2)
    ends = [(x[rows, answer_B] - x[rows, other_B]).mean() for x in last]
    np.testing.assert_allclose(got, (ends[2] - ends[1]) / (ends[0] - ends[1]), atol=1e-4)
