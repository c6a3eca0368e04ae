# SPDX-License-Identifier: Apache-2.0
import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import AttentionBox, NormBox
from jaxgpt.boxes.block import OutputNorm, Parallel, PostNorm, Sandwich
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.head import Tied, Untied
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.norm import NoNorm, RMSNorm
from jaxgpt.boxes.position import NoPosition
from jaxgpt.errors import ConfigError
from jaxgpt.model import LayerEdit
from jaxgpt.study.attribution import direct_attribution, induction_scores, logit_lens
from jaxgpt.taps import tap
from jaxgpt.testing import jit_forward, tiny, worn

TOKENS = np.random.default_rng(0).integers(0, 31, (2, 6), np.int32)
ANSWER, OTHER = np.array([3, 4]), np.array([5, 6])

# --- the lens -------------------------------------------------------------------------------------


def test_the_lens_ends_in_the_logits_and_begins_with_the_embedding():
    cfg = tiny(norm=RMSNorm(), final_norm=RMSNorm(), embed=Embed(), mup_base=8)
    params = worn(cfg)
    lens = np.asarray(logit_lens(cfg, params, TOKENS))
    out = jit_forward(cfg, params, TOKENS, capture=("position/out", "block_1/in"))
    assert lens.shape == (3, 2, 6, 31)
    np.testing.assert_allclose(lens[-1], out.logits_BTV[..., :31], atol=1e-4)
    for depth, site in enumerate(("position/out", "block_1/in")):
        x = np.asarray(out.captured[site], np.float64)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * params["final_norm"]["scale"]
        want = x / 2 @ params["embed"]["embedding"][:31].T  # muP: twice as wide as the base
        np.testing.assert_allclose(lens[depth], want, atol=1e-4)


# --- direct attribution ---------------------------------------------------------------------------

MODELS = {
    "gpt2": {},
    "sandwich, capped": dict(block=Sandwich(), norm=RMSNorm(), head=Tied(softcap=5.0)),
    "post-norm": dict(block=PostNorm(), final_norm=NoNorm(), head=Untied(use_bias=True)),
    "output norm": dict(block=OutputNorm(), final_norm=RMSNorm(), attention=GQA(4, sinks=True)),
    "parallel": dict(block=Parallel(), mup_base=8),
    "latent experts": dict(attention=MLA(4, 6, 7, 5, 4, 3), ffn=MoE(4)),
    "mixed": dict(edits=(LayerEdit(start=1, attention=GQA(n_heads=2)),)),
}
CASES = ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "gpt2")]


@pytest.mark.parametrize("name", CASES)
def test_the_parts_add_up_to_the_difference(name):
    cfg = tiny(**MODELS[name])
    params = worn(cfg)
    found = direct_attribution(cfg, params, TOKENS, ANSWER, OTHER)
    parts = found.attention.sum(0) + found.ffn.sum(0) + found.embedding + found.bias
    size = np.abs(found.attention).sum() + np.abs(found.ffn).sum()
    np.testing.assert_allclose(parts, found.total, atol=1e-6 * size)
    for heads_BN, attention_B in zip(found.heads, found.attention, strict=True):
        np.testing.assert_allclose(heads_BN.sum(1), attention_B, atol=1e-6 * size)
    assert [heads_BN.shape[1] for heads_BN in found.heads] == [
        layer.attention.n_heads for layer in cfg.layers
    ]
    capped = dataclasses.replace(cfg, head=Tied()) if "capped" in name else cfg
    last_BV = np.asarray(jit_forward(capped, params, TOKENS).logits_BTV)[:, -1]
    rows = np.arange(2)
    np.testing.assert_allclose(found.total, last_BV[rows, ANSWER] - last_BV[rows, OTHER], atol=1e-4)


def test_a_heads_share_is_the_formula():
    """(W_U[a] - W_U[b]) . (scale * W_O z) / rms, of the last token."""
    cfg = tiny(norm=RMSNorm(), final_norm=RMSNorm())
    params = worn(cfg)
    found = direct_attribution(cfg, params, TOKENS, ANSWER, OTHER)
    out = jit_forward(cfg, params, TOKENS, capture=("block_0/attention/heads", "block_1/out"))
    z_BNH = np.asarray(out.captured["block_0/attention/heads"], np.float64)[:, -1]
    x_BD = np.asarray(out.captured["block_1/out"], np.float64)[:, -1]
    rate_B = 1 / np.sqrt((x_BD**2).mean(-1) + 1e-5)
    kernel_NHD = params["block_0"]["attention"]["out"]["kernel"].reshape(4, 4, 16)
    direction_BD = params["embed"]["embedding"][ANSWER] - params["embed"]["embedding"][OTHER]
    direction_BD = direction_BD * params["final_norm"]["scale"] * rate_B[:, None]
    want = np.einsum("bnh,nhd,bd->bn", z_BNH, kernel_NHD, direction_BD)
    np.testing.assert_allclose(found.heads[0], want, atol=1e-5)


def test_a_norm_that_cannot_be_held_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Squash(NormBox):
        def build(self, name=None):
            return _Squash(name=name)

    class _Squash(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.tanh(x)

    cfg = tiny(n_layers=1, final_norm=Squash())
    with pytest.raises(ConfigError, match=r"Squash is not linear; fix: .*rate"):
        direct_attribution(cfg, worn(cfg), TOKENS, ANSWER, OTHER)


# --- induction ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Back(AttentionBox):
    """Every token reads the one `steps` before it; the second head reads itself."""

    steps: int

    def build(self, dims, name=None):
        return _Back(self.steps, name=name)


class _Back(nn.Module):
    steps: int

    @nn.compact
    def __call__(self, x_BTD, visibility, cache=None, dropout_key=None):
        T = x_BTD.shape[1]
        probs_NTS = jnp.stack([jnp.eye(T, k=-self.steps), jnp.eye(T)])
        probs = tap(self, "probs", jnp.broadcast_to(probs_NTS, (len(x_BTD), 2, T, T)))
        return probs.mean(1) @ x_BTD, cache


@pytest.mark.parametrize("begin_ids", [(), (1, 2)])
def test_the_head_that_reads_behind_the_earlier_token_scores_one(begin_ids):
    edits = (LayerEdit(start=1, attention=Back(4)),)
    cfg = tiny(attention=Back(5), edits=edits)
    run = dict(length=5, batch=3, begin_ids=begin_ids)
    scores = induction_scores(cfg, worn(cfg), jax.random.key(0), **run)
    assert scores.tolist() == [[0, 0], [1, 0]]


def test_a_head_that_reads_all_alike_scores_as_said():
    cfg = tiny(n_layers=1, position=NoPosition())
    params = worn(cfg)
    query = params["block_0"]["attention"]["q"]
    query.update(jax.tree.map(np.zeros_like, query))
    scores = induction_scores(cfg, params, jax.random.key(0), length=8, lowest=7)
    want = np.mean([1 / (t + 1) for t in range(8, 16)])
    np.testing.assert_allclose(scores, np.full((1, 4), want), atol=1e-6)
    assert abs(want * 8 - math.log(2)) < 0.05  # the 0.7 / length of the docstring


def test_rows_that_do_not_fit_are_refused():
    cfg = tiny(n_layers=1)
    for wrong in (dict(length=9), dict(length=2, lowest=31), dict(length=8, begin_ids=(1,))):
        with pytest.raises(ConfigError, match="at most 16 tokens, ids below 31"):
            induction_scores(cfg, worn(cfg), jax.random.key(0), **wrong)
