# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.alibi import ALiBi, slopes
from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.position import NoPosition
from jaxgpt.config import RunConfig, from_yaml, resolve, to_yaml
from jaxgpt.model import LayerEdit
from jaxgpt.testing import jit_forward, jit_init, tiny


@pytest.mark.parametrize(
    ("n_heads", "want"),
    [  # the reference code's get_slopes(n_heads)
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (8, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8]),
        (12, [*(2**-n for n in range(1, 9)), *(2 ** -(n / 2) for n in (1, 3, 5, 7))]),
        (16, [2 ** (-n / 2) for n in range(1, 17)]),
    ],
)
def test_slopes_are_those_of_the_paper_and_its_code(n_heads, want):
    assert slopes(n_heads) == want


@pytest.mark.parametrize("n_heads", range(1, 70))
def test_slopes_are_distinct_and_between_zero_and_one(n_heads):
    found = slopes(n_heads)
    assert len(set(found)) == n_heads and 0 < min(found) and max(found) < 1


def test_the_bias_is_the_distance_times_the_slope():
    q_pos, k_pos = jnp.array([[3, 5], [-1, 0]]), jnp.array([[0, 3, 4], [-1, 0, 1]])
    y = ALiBi().bias(3)(q_pos, k_pos)
    assert y.shape == (2, 3, 2, 3) and y.dtype == jnp.float32 and np.isfinite(y).all()
    distance = np.array([[[3, 0, 1], [5, 2, 1]], [[0, 1, 2], [1, 0, 1]]])
    want = -np.array([2**-4, 2**-8, 2**-2])[None, :, None, None] * distance[:, None]
    assert np.array_equal(y, want)


def test_far_distances_are_exact():  # bfloat16 cannot tell 256 from 257
    y = ALiBi().bias(8)(jnp.array([[100_000]]), jnp.array([[0, 1, 99_743, 99_744]]))
    assert np.array_equal(y[0, 0, 0], -np.array([100_000, 99_999, 257, 256]) / 2)


def test_queries_keys_and_embeddings_stay_as_they_are():
    x, pos = jnp.ones((1, 2, 3, 4)), jnp.array([[1, 9]])
    box = ALiBi()
    assert np.array_equal(box.rotate(x, pos), x)
    assert (box.score_scale(), box.at(9)) == (1.0, box)
    assert "position" not in jit_init(tiny(position=box), jax.random.key(0))


def test_probabilities_of_equal_scores_follow_the_slopes():
    cfg = tiny(position=ALiBi(), attention=GQA(n_heads=4, n_kv_heads=2))
    params = jit_init(cfg, jax.random.key(0))
    params["block_0"]["attention"]["q"] = {"kernel": jnp.zeros((16, 16)), "bias": jnp.zeros(16)}
    site = "block_0/attention/probs"
    call = dict(capture=(site,), dtype=jnp.bfloat16)
    probs_BNTS = jit_forward(cfg, params, jnp.zeros((1, 6), jnp.int32), **call).captured[site]
    weights_NTS = np.tril(np.exp(ALiBi().bias(4)(jnp.arange(6)[None], jnp.arange(6)[None]))[0])
    want = weights_NTS / weights_NTS.sum(-1, keepdims=True)
    np.testing.assert_allclose(probs_BNTS[0], want, atol=1e-6)


def test_padding_has_no_influence():
    cfg = tiny(position=ALiBi())
    params = jit_init(cfg, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 31, (1, 8))
    want = jit_forward(cfg, params, tokens).logits_BTV[..., :31]
    padded, pos = np.pad(tokens, ((0, 0), (5, 0))), np.arange(-5, 8)[None].clip(-1)
    got = [
        np.asarray(jit_forward(cfg, params, padded + junk * (pos < 0), pos_BT=pos).logits_BTV)
        for junk in (0, 7)
    ]
    np.testing.assert_allclose(got[0][:, 5:, :31], want, atol=2e-5 * max(1, np.abs(want).max()))
    assert np.array_equal(got[0][:, 5:], got[1][:, 5:])


def test_some_layers_can_do_without():
    cfg = tiny(position=ALiBi(), edits=(LayerEdit(start=1, position=NoPosition()),))
    params = jit_init(cfg, jax.random.key(0))
    tokens = jnp.arange(8)[None]
    configs = (cfg, tiny(position=ALiBi()), tiny(position=NoPosition()))
    found = [jit_forward(c, params, tokens).logits_BTV[..., :31] for c in configs]
    assert not any(np.allclose(found[i], found[j], atol=1e-3) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_alibi_is_chosen_by_name():
    run = resolve(RunConfig(), options=["--model.position=ALiBi"])
    assert run.model.position == ALiBi() and from_yaml(to_yaml(run)) == run
