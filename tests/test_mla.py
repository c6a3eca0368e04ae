# SPDX-License-Identifier: Apache-2.0
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jaxgpt
from jaxgpt.boxes import mla
from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.norm import LayerNorm, NoNorm
from jaxgpt.boxes.position import NoPosition
from jaxgpt.cache import LatentCache
from jaxgpt.errors import ConfigError
from jaxgpt.flops import count_params
from jaxgpt.kernels import attend
from jaxgpt.masks import Visibility
from jaxgpt.model import ModelConfig
from jaxgpt.testing import check_box, jit_forward, jit_init, quick_jit, tiny

SMALL = MLA(n_heads=4, kv_rank=6, nope_dim=5, rope_dim=4, v_dim=3)
WITH_Q = dataclasses.replace(SMALL, q_rank=7)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 16)), jnp.float32)
POS = jnp.broadcast_to(jnp.arange(6), (2, 6))


def fresh(box, position=NoPosition()):
    """Its module and parameters, none of which is at its neutral value."""
    module = box.build(tiny(position=position, attention=box).dims())
    params = module.init(jax.random.key(0), X, Visibility.full(2, 6))["params"]
    return module, jax.tree.map(
        lambda p: p + 0.1 * jnp.cos(jnp.arange(p.size)).reshape(p.shape), params
    )


def run(module, params, cache=None, fed=slice(None)):
    visibility = Visibility.full(2, 6) if cache is None else Visibility.of(POS[:, fed])
    return quick_jit(module.apply)({"params": params}, X[:, fed], visibility, cache)


def exact(tree):
    return jax.tree.map(lambda p: np.asarray(p, float), tree)


def close(got, want, tolerance=1e-5):
    want = np.asarray(want)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1.0, np.abs(want).max()))


def formula(box, p, x_BTD, rotate):
    """Head by head, from the full formulas in appendix C of DeepSeek-V2, in float64."""
    nope, rope, v = box.nope_dim, box.rope_dim, box.v_dim

    def norm(name, latent):
        return reference.rms_norm(latent, p[name]["scale"], eps=1e-6)

    if box.q_rank is None:
        q_BTD = reference.dense(p["q"], x_BTD)
    else:
        q_BTD = reference.dense(p["q_up"], norm("q_norm", reference.dense(p["q_down"], x_BTD)))
    down = reference.dense(p["kv_down"], x_BTD)
    latent, key = norm("kv_norm", down[..., : box.kv_rank]), rotate(down[..., box.kv_rank :])
    up = latent @ p["kv_up"]["kernel"]
    heads = []
    for n in range(box.n_heads):
        q = q_BTD[..., n * (nope + rope) :][..., : nope + rope]
        q = np.concatenate([q[..., :nope], rotate(q[..., nope:])], -1)
        k_v = up[..., n * (nope + v) :][..., : nope + v]
        k = np.concatenate([k_v[..., :nope], key], -1)
        heads.append(reference.attention(q[:, :, None], k[:, :, None], k_v[:, :, None, nope:]))
    return reference.dense(p["out"], np.concatenate(heads, -1)[:, :, 0])


@pytest.mark.parametrize("box", [SMALL, WITH_Q, dataclasses.replace(WITH_Q, use_bias=True)])
def test_it_equals_the_formula_of_the_paper(box):
    module, params = fresh(box, jaxgpt.RoPE(theta=50.0, layout="neighbours"))

    def rotate(x_BTP):
        pairs_BTI = x_BTP[..., 0::2] + 1j * x_BTP[..., 1::2]
        turned_BTI = pairs_BTI * np.exp(1j * np.arange(6)[:, None] * 50.0 ** -(np.arange(2) / 2))
        return np.stack([turned_BTI.real, turned_BTI.imag], -1).reshape(x_BTP.shape)

    close(run(module, params)[0], formula(box, exact(params), exact(X), rotate))


def test_parameters_have_their_paths_and_only_down_and_out_have_biases():
    _, params = fresh(dataclasses.replace(WITH_Q, use_bias=True))
    paths = {jax.tree_util.keystr(p, simple=True, separator="/"): a.shape
             for p, a in jax.tree.leaves_with_path(params)}  # fmt: skip
    assert paths == {
        "q_down/kernel": (16, 7),
        "q_down/bias": (7,),
        "q_norm/scale": (7,),
        "q_up/kernel": (7, 4 * 9),
        "kv_down/kernel": (16, 6 + 4),
        "kv_down/bias": (10,),
        "kv_norm/scale": (6,),
        "kv_up/kernel": (6, 4 * 8),
        "out/kernel": (12, 16),
        "out/bias": (16,),
    }
    assert set(fresh(SMALL)[1]) == {"q", "kv_down", "kv_norm", "kv_up", "out"}


def test_parameters_of_deepseek_v2_lite_are_counted():
    cfg = ModelConfig(d_model=2048, n_layers=27, vocab_size=64, attention=MLA())
    per_layer = 2048 * 16 * 192 + 2048 * 576 + 512 + 512 * 16 * 256 + 16 * 128 * 2048
    assert count_params(cfg)["attention"] == 27 * per_layer == 27 * 13_763_072


@pytest.mark.parametrize("n_new", [1, 3, 6], ids=["decode", "chunk", "prefill"])
@pytest.mark.parametrize("position", [NoPosition(), jaxgpt.RoPE(), jaxgpt.ALiBi()], ids=repr)
def test_absorbed_equals_naive(n_new, position):
    new_BT, draw = POS[:, 6 - n_new :], np.random.default_rng(1).normal
    q_BTNH = jnp.asarray(draw(size=(2, n_new, 4, 9)), jnp.float32)
    key_BSNP = jnp.asarray(draw(size=(2, 6, 1, 4)), jnp.float32)
    rotated = position.rotate(q_BTNH[..., 5:], new_BT)
    latent_BSR = jnp.asarray(draw(size=(2, 6, 7)), jnp.float32)
    args = (
        jnp.concatenate([q_BTNH[..., :5], rotated], -1),
        jnp.concatenate([latent_BSR, position.rotate(key_BSNP, POS)[:, :, 0]], -1),
        jnp.asarray(draw(size=(7, 4, 8)), jnp.float32),  # to keys of 5 and values of 3
    )
    seen = Visibility.of(new_BT).onto(POS)
    mix = functools.partial(attend, visibility=seen, scale=0.3, bias=position.bias(4))
    absorbed, naive = (quick_jit(functools.partial(f, mix)) for f in (mla._absorbed, mla._naive))
    close(absorbed(*args), naive(*args))


@dataclasses.dataclass(frozen=True)
class Forced(MLA):
    """MLA that takes one form with every cache."""

    absorbed: bool = True

    def absorbs(self, n_queries, n_slots):
        return self.absorbed


def forced(box, absorbed):
    return Forced(**vars(box), absorbed=absorbed)


@pytest.mark.parametrize("chunks", [(6,), (3, 3), (1,) * 6], ids=["prefill", "chunks", "decode"])
@pytest.mark.parametrize("absorbed", [True, False])
def test_each_form_decodes_to_the_full_forward(chunks, absorbed):
    module, params = fresh(forced(WITH_Q, absorbed), jaxgpt.RoPE())
    cache, got = LatentCache.empty(2, 8, 6, 4, jnp.float32), []
    for end, n in zip(np.cumsum(chunks), chunks, strict=True):
        y, cache = run(module, params, cache, slice(end - n, end))
        got.append(y)
    close(np.concatenate(got, 1), run(module, params)[0])
    assert cache.index == 6 and cache.pos_BS[0].tolist() == [0, 1, 2, 3, 4, 5, -1, -1]


@pytest.mark.parametrize("absorbed", [True, False])
def test_rubbish_in_empty_slots_has_no_influence(absorbed):
    module, params = fresh(forced(SMALL, absorbed))
    empty = LatentCache.empty(2, 8, 6, 4, jnp.float32)
    want, _ = run(module, params, empty)
    for latent, key in ((np.nan, 0.0), (0.0, np.nan), (np.inf, -np.inf), (1e4, 1e4)):
        rubbish = empty.replace(
            slot_BSZ=empty.slot_BSZ.at[..., :6].add(latent).at[..., 6:].add(key)
        )
        assert (run(module, params, rubbish)[0] == want).all()


def test_a_narrow_cache_does_not_narrow_the_output():
    module, params = fresh(SMALL)
    y, cache = run(module, params, LatentCache.empty(2, 6, 6, 4, jnp.bfloat16))
    assert y.dtype == jnp.float32 and cache.latent_BSR.dtype == cache.key_BSP.dtype == jnp.bfloat16
    close(y, run(module, params)[0], 2e-2)


def test_the_form_with_fewer_flops_is_taken():
    box = MLA(n_heads=128, q_rank=1536)  # DeepSeek-V3's
    assert box.absorbs(1, 1) is False  # equal work to expand, wider pairs
    assert box.absorbs(1, 2) and box.absorbs(1, 100_000) and box.absorbs(157, 10**9)
    assert not box.absorbs(158, 10**9) and not box.absorbs(4096, 4096)

    def flops(n_queries, n_slots, form):
        shapes = ((1, n_queries, 128, 192), (1, n_slots, 576), (512, 128, 256))
        visibility = Visibility.of(jnp.zeros((1, n_queries), int)).onto(
            jnp.zeros((1, n_slots), int)
        )
        call = functools.partial(form, functools.partial(attend, visibility=visibility, scale=1.0))
        lowered = jax.jit(call).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
        return lowered.cost_analysis()["flops"]

    for n_queries in (1, 64, 256):
        naive, absorbed = (flops(n_queries, 512, f) for f in (mla._naive, mla._absorbed))
        assert box.absorbs(n_queries, 512) == (absorbed < naive)


def test_without_a_cache_it_is_naive_and_with_one_as_counted(monkeypatch):
    taken = []
    for name in ("_naive", "_absorbed"):

        def spy(*args, name=name, form=getattr(mla, name)):
            taken.append(name)
            return form(*args)

        monkeypatch.setattr(mla, name, spy)
    module, params = fresh(dataclasses.replace(SMALL, kv_rank=64))
    cache, taken[:] = LatentCache.empty(2, 6, 64, 4, jnp.float32), []
    run(module, params)
    _, cache = run(module, params, cache, slice(0, 5))
    run(module, params, cache, slice(5, 6))
    assert taken == ["_naive", "_naive", "_absorbed"]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_cache_takes_rank_plus_rope_numbers_a_token(itemsize):
    cfg = ModelConfig(
        d_model=64, n_layers=5, vocab_size=64, attention=MLA(), position=jaxgpt.RoPE()
    )
    caches = cfg.init_caches(3, 7, {2: jnp.bfloat16, 4: jnp.float32}[itemsize])
    cache_bytes = sum(
        a.nbytes for a in jax.tree.leaves(caches) if jnp.issubdtype(a.dtype, jnp.floating)
    )
    assert cache_bytes == 3 * 7 * 5 * (512 + 64) * itemsize
    rest = sum(a.nbytes for a in jax.tree.leaves(caches)) - cache_bytes
    assert rest == 5 * (3 * 7 + 1) * 4  # positions and the index


def test_without_norm_and_rotation_it_is_gqa_with_multiplied_matrices():
    box = dataclasses.replace(SMALL, v_dim=9, norm=NoNorm())
    module, params = fresh(box)
    down, up = params["kv_down"]["kernel"], params["kv_up"]["kernel"].reshape(6, 4, 5 + 9)
    heads_DNQ = jnp.einsum("dr,rnq->dnq", down[:, :6], up)
    shared_DNP = jnp.broadcast_to(down[:, None, 6:], (16, 4, 4))
    k_DNH = jnp.concatenate([heads_DNQ[..., :5], shared_DNP], -1)
    gqa_params = {
        "q": params["q"],
        "k": {"kernel": k_DNH.reshape(16, 36)},
        "v": {"kernel": heads_DNQ[..., 5:].reshape(16, 36)},
        "out": params["out"],
    }
    gqa, _ = fresh(GQA(n_heads=4, head_dim=9, use_bias=False))
    close(run(module, params)[0], run(gqa, gqa_params)[0])


def test_scale_and_the_scale_of_positions_multiply():
    @dataclasses.dataclass(frozen=True)
    class Louder(NoPosition):
        def score_scale(self):
            return 3.0

    _, params = fresh(SMALL)
    third = dataclasses.replace(SMALL, scale=1 / 3 / math.sqrt(9))
    want = run(fresh(SMALL)[0], params)[0]
    close(run(fresh(third, Louder())[0], params)[0], want)
    assert not np.allclose(run(fresh(third)[0], params)[0], want, atol=1e-3)


@pytest.mark.parametrize("decode", [False, True])
def test_sites_are_the_same_in_both_forms(decode):
    cfg = tiny(attention=WITH_Q, position=jaxgpt.RoPE(), n_layers=1)
    tokens_BT, pos_BT = jnp.array([[3, 1, 4, 1]]), jnp.arange(4)[None]
    call = dict(pos_BT=pos_BT, caches=cfg.init_caches(1, 9)) if decode else {}
    params = jit_init(cfg, jax.random.key(0))
    look = ("block_0/attention/*",)
    out = jit_forward(cfg, params, tokens_BT, capture=look, **call)
    got = {
        site.removeprefix("block_0/attention/"): value.shape for site, value in out.captured.items()
    }
    S = 9 if decode else 4
    assert got == {
        "queries": (1, 4, 4, 9),
        "keys": (1, 4, 1, 4),
        "latent": (1, 4, 6),
        "kv_norm/rate": (1, 4, 1),
        "q_norm/out": (1, 4, 7),
        "q_norm/rate": (1, 4, 1),
        "scores": (1, 4, 4, S),
        "probs": (1, 4, 4, S),
        "heads": (1, 4, 4, 3),
        "out": (1, 4, 16),
    }
    patch = {"block_0/attention/latent": 0.0}
    silent = jit_forward(cfg, params, tokens_BT, patch=patch, capture=look, **call)
    assert not silent.captured["block_0/attention/heads"].any()


def test_knobs_that_cannot_be_are_refused():
    for knob in ("n_heads", "kv_rank", "q_rank", "nope_dim", "rope_dim", "v_dim", "scale"):
        with pytest.raises(ConfigError, match=f"{knob}=0.* must be positive"):
            MLA(**{knob: 0.0 if knob == "scale" else 0})
    with pytest.raises(ConfigError, match="even"):
        tiny(attention=dataclasses.replace(SMALL, rope_dim=3), position=jaxgpt.RoPE())


@pytest.mark.parametrize(
    ("box", "position"),
    [
        (WITH_Q, jaxgpt.RoPE(layout="neighbours")),
        (dataclasses.replace(SMALL, norm=LayerNorm(), use_bias=True), jaxgpt.RoPE(fraction=0.5)),
        (dataclasses.replace(SMALL, scale=0.5), NoPosition()),
    ],
    ids=["neighbours", "half a rope", "none"],
)
def test_it_keeps_the_contracts_with_other_positions(box, position):
    check_box(box, position=position)
