# SPDX-License-Identifier: Apache-2.0
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.position import NoPosition
from jaxgpt.boxes.rope import RoPE, phases, rates
from jaxgpt.boxes.scaling import YaRN
from jaxgpt.errors import ConfigError
from jaxgpt.model import LayerEdit
from jaxgpt.testing import jit_forward, jit_init, tiny

rotate = jax.jit(lambda box, x, pos: box.rotate(x, pos), static_argnums=0)
NEIGHBOURS = RoPE(layout="neighbours")
BOXES = [
    RoPE(),
    RoPE(theta=100.0, fraction=0.5),
    NEIGHBOURS,
    RoPE(fraction=0.75, layout="neighbours"),
    RoPE(scaling=YaRN(original_length=16)),
]
a_seed, a_position = st.integers(0, 2**16), st.integers(0, 8000)
few = settings(deadline=None, max_examples=20)


def heads(seed=0, T=6, H=8):
    x = np.random.default_rng(seed).normal(size=(1, T, 2, H))
    return jnp.asarray(x, jnp.float32)


def scores(box, q, k, pos):
    return jnp.einsum("btnh,bsnh->bnts", rotate(box, q, pos), rotate(box, k, pos))


@pytest.mark.parametrize(
    ("box", "want"),
    [
        (RoPE(), [-1.984111, 1.959901, 2.462378, 4.019800]),
        (NEIGHBOURS, [-1.142640, 1.922076, 2.959851, 4.029800]),
    ],
    ids=repr,
)
def test_both_layouts_have_their_known_values(box, want):  # N03
    x = jnp.array([1.0, 2, 3, 4]).reshape(1, 1, 1, 4)
    y = rotate(box, x, jnp.ones((1, 1), jnp.int32))
    np.testing.assert_allclose(y[0, 0, 0], want, atol=1e-5)


def test_neighbours_are_complex_numbers():
    x, pos = heads(), jnp.array([[0, 1, 2, 7, 100, 4095]])
    angle_TI = np.asarray(pos)[0, :, None] * 10_000.0 ** (-np.arange(0, 8, 2) / 8)
    z = np.asarray(x).view(np.complex64) * np.exp(1j * angle_TI)[None, :, None]
    want = np.stack([z.real, z.imag], -1).reshape(x.shape)
    np.testing.assert_allclose(rotate(NEIGHBOURS, x, pos), want, atol=1e-3)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@few
@given(seed=a_seed, start=a_position)
def test_a_permutation_of_channels_makes_one_layout_of_the_other(fraction, seed, start):  # N03
    q, k, pos = heads(seed), heads(seed + 1), start + jnp.arange(6)[None]
    R = int(8 * fraction)
    order = [*range(0, R, 2), *range(1, R, 2), *range(R, 8)]  # evens first: a pair is (i, i + R/2)
    halves, neighbours = RoPE(fraction=fraction), RoPE(fraction=fraction, layout="neighbours")
    moved = [x[..., jnp.array(order)] for x in (q, k)]
    want = scores(neighbours, q, k, pos)
    np.testing.assert_allclose(scores(halves, *moved, pos), want, atol=1e-5)
    y = rotate(neighbours, q, pos)[..., jnp.array(order)]
    assert np.array_equal(y, rotate(halves, moved[0], pos))


@pytest.mark.parametrize("box", BOXES, ids=repr)
@few
@given(seed=a_seed, start=a_position)
def test_norms_are_kept_and_position_zero_is_the_identity(box, seed, start):
    x, pos = heads(seed), start + jnp.arange(6)[None]
    scale = 1.0 if box.scaling is None else box.scaling.magnitude()
    R = int(8 * box.fraction)
    x = x.at[..., :R].divide(scale)
    y = rotate(box, x, pos)
    x = x.at[..., :R].multiply(scale)
    np.testing.assert_allclose(*(np.linalg.norm(a, axis=-1) for a in (x, y)), rtol=1e-5)
    assert not np.allclose(y[:, 1:], x[:, 1:], atol=1e-2)
    at_zero = rotate(box, x / scale, jnp.zeros((1, 6), jnp.int32))[..., :R]
    np.testing.assert_allclose(at_zero, x[..., :R], rtol=1e-6)


@pytest.mark.parametrize("box", BOXES, ids=repr)
@few
@given(seed=a_seed, start=a_position)
def test_scores_depend_on_the_distance_alone(box, seed, start):
    q, k, pos = heads(seed), heads(seed + 1), jnp.arange(6)[None]
    want = scores(box, q, k, pos)
    # A float32 phase near 8,000 is right to 5e-4.
    np.testing.assert_allclose(scores(box, q, k, pos + start), want, atol=1e-2)
    np.testing.assert_allclose(scores(box, q, k, pos + 37), want, atol=1e-4)
    assert not np.allclose(want, jnp.einsum("btnh,bsnh->bnts", q, k), atol=1e-2)


@pytest.mark.parametrize("layout", ["halves", "neighbours"])
def test_partial_rope_turns_the_first_channels_alone(layout):
    x, pos = heads(), jnp.arange(6)[None]
    y = rotate(RoPE(fraction=0.5, layout=layout), x, pos)
    assert np.array_equal(y[..., 4:], x[..., 4:])
    assert np.array_equal(y[..., :4], rotate(RoPE(layout=layout), x[..., :4], pos))


def test_rates_are_exact():
    want = 10_000.0 ** (-np.arange(0, 128, 2) / 128)
    assert rates(128, 10_000.0).dtype == jnp.float32
    assert np.array_equal(rates(128, 10_000.0), want.astype(np.float32))
    assert abs(rates(128, 10_000.0)[1] - 0.865964) < 1e-6  # in bfloat16 0.867188: N06


@pytest.mark.parametrize("layout", ["halves", "neighbours"])
def test_phases_tell_far_neighbours_apart_in_bfloat16(layout):  # N06
    pos_T = np.arange(8192)
    angle_TI = pos_T[:, None] * 10_000.0 ** (-np.arange(0, 128, 2) / 128)
    got_TI = phases(jnp.asarray(pos_T)[None], rates(128, 10_000.0))[0]
    assert got_TI.dtype == jnp.float32
    np.testing.assert_allclose(np.cos(got_TI), np.cos(angle_TI), atol=1e-2)
    np.testing.assert_allclose(np.sin(got_TI), np.sin(angle_TI), atol=1e-2)
    np.testing.assert_allclose(np.cos(got_TI[4095, 1]), -0.742366, atol=1e-3)

    one_TH = np.zeros((8192, 128), np.float32)  # rotated, (1, 0) is (cos, sin)
    one_TH[:, slice(0, 64) if layout == "halves" else slice(0, 128, 2)] = 1
    x = jnp.asarray(one_TH, jnp.bfloat16)[None, :, None]
    y = rotate(RoPE(layout=layout), x, jnp.asarray(pos_T)[None])
    assert y.dtype == jnp.bfloat16
    y_TH = np.asarray(y[0, :, 0], np.float32)
    a, b = (y_TH[:, :64], y_TH[:, 64:]) if layout == "halves" else (y_TH[:, ::2], y_TH[:, 1::2])
    np.testing.assert_allclose(a, np.cos(angle_TI), atol=1e-2)
    np.testing.assert_allclose(b, np.sin(angle_TI), atol=1e-2)
    assert (a[256] != a[257]).any() and (b[256] != b[257]).any()
    assert (y_TH[1:] != y_TH[:-1]).any(-1).all()  # no two neighbouring positions are the same


@pytest.mark.parametrize(
    ("head_dim", "fraction", "channels"), [(3, 1.0, 3), (4, 0.25, 1), (2, 0.1, 0)]
)
def test_the_rotated_width_is_even(head_dim, fraction, channels):  # E3
    with pytest.raises(ConfigError, match=f"head_dim={head_dim} is {channels} channels"):
        RoPE(fraction=fraction).check_head(head_dim)
    with pytest.raises(ConfigError, match="layer 0"):
        attention = GQA(n_heads=4, head_dim=head_dim)
        tiny(attention=attention, position=RoPE(fraction=fraction))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"fraction": 1.5}, r"fraction=1\.5 of a head"),
        ({"fraction": 0.0}, r"fraction=0\.0 must be positive"),
        ({"theta": 1.0}, r"theta=1\.0 must exceed 1"),
    ],
)
def test_wrong_knobs_are_refused(knobs, message):
    with pytest.raises(ConfigError, match=message):
        RoPE(**knobs)


def test_a_layout_that_is_not_there_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Loose(RoPE):
        layout: str = "thirds"

    with pytest.raises(ConfigError, match=r"layout='thirds'.*halves or neighbours"):
        Loose()


# --- in a model -----------------------------------------------------------------------------------

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 31, (1, 12)))


def logits(cfg, params, pos_BT=None):
    return np.asarray(jit_forward(cfg, params, TOKENS, pos_BT=pos_BT).logits_BTV)[..., :31]


def test_layers_of_one_model_have_ropes_of_their_own_or_none():
    near, far = RoPE(theta=10.0), RoPE(theta=1e6, layout="neighbours")
    mixed = tiny(position=near, n_layers=3, edits=(LayerEdit(start=2, position=far),))
    assert [layer.position for layer in mixed.layers] == [near, near, far]
    edited = tiny(
        position=near, n_layers=3, edits=(LayerEdit(every=2, set={"position.theta": 9.0}),)
    )
    assert [layer.position.theta for layer in edited.layers] == [9.0, 10.0, 9.0]
    off = tiny(position=near, n_layers=3, edits=(LayerEdit(start=2, position=NoPosition()),))
    params = jit_init(mixed, jax.random.key(0))
    variants = [dataclasses.replace(mixed, edits=()), mixed, edited, off]
    found = [logits(cfg, params) for cfg in variants]
    for i, one in enumerate(found):
        for other in found[:i]:
            assert not np.allclose(one, other, atol=1e-2)
    base = logits(tiny(position=far, n_layers=3), params)
    everywhere = tiny(position=near, n_layers=3, edits=(LayerEdit(position=far),))
    assert np.array_equal(logits(everywhere, params), base)


def test_rotated_channels_of_q_and_k_move_together_with_the_layout():  # N03
    cfg = tiny(position=RoPE(fraction=0.5), attention=GQA(n_heads=2, qk_norm=None))
    params = jit_init(cfg, jax.random.key(0))
    order = np.arange(16).reshape(2, 8)[:, [0, 2, 1, 3, *range(4, 8)]].ravel()  # halves of 4
    moved = jax.tree.map(lambda x: x, params)
    for i in range(cfg.n_layers):
        for name in ("q", "k"):
            dense = params[f"block_{i}"]["attention"][name]
            moved[f"block_{i}"]["attention"][name] = {k: v[..., order] for k, v in dense.items()}
    neighbours = dataclasses.replace(cfg, position=RoPE(fraction=0.5, layout="neighbours"))
    want = logits(cfg, params)
    np.testing.assert_allclose(logits(neighbours, moved), want, atol=1e-5)
    assert not np.allclose(logits(neighbours, params), want, atol=1e-2)
