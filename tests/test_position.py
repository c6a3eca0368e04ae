# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.position import Learned, NoPosition, RoPE, Sinusoidal, phases
from jaxgpt.errors import ConfigError
from jaxgpt.testing import tiny

rotate = jax.jit(lambda box, x, pos: box.rotate(x, pos), static_argnums=0)


def embed(box, pos, width, **params):
    module = box.build(tiny(d_model=width).dims())
    pos_BT = jnp.atleast_2d(jnp.asarray(pos))
    return module.apply({"params": params}, jnp.zeros((*pos_BT.shape, width)), pos_BT)


def heads(seed=0, T=6, H=8):
    x = np.random.default_rng(seed).normal(size=(1, T, 2, H))
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("p", [0, 1, 511])
def test_sinusoids_equal_the_formula(p):
    y = embed(Sinusoidal(), [p], 512)[0, 0]
    np.testing.assert_allclose(y, reference.sinusoids(p, 512), atol=1e-4)
    if p == 0:
        assert np.array_equal(y, [0, 1] * 256)
    if p == 1:
        np.testing.assert_allclose(y[:2], [np.sin(1), np.cos(1)], atol=1e-6)


def test_sinusoids_need_an_even_width():
    with pytest.raises(ConfigError, match="d_model=15 is odd"):
        tiny(d_model=15, position=Sinusoidal(), attention=GQA(n_heads=3))


def test_learned_positions_are_rows_of_a_table():
    table = jnp.arange(16 * 4.0).reshape(16, 4)
    y = embed(Learned(), [[-1, 0, 3, 15]], 4, embedding=table)
    assert np.array_equal(y[0], table[jnp.array([0, 0, 3, 15])])


def test_a_position_past_the_table_is_nan_and_not_the_last_row():
    y = embed(Learned(), [[15, 16]], 4, embedding=jnp.ones((16, 4)))
    assert np.isfinite(y[0, 0]).all() and np.isnan(y[0, 1]).all()


def test_more_tokens_than_learned_positions_are_refused():
    with pytest.raises(ValueError, match="17 tokens exceed context_length=16"):
        embed(Learned(), np.arange(17), 4, embedding=jnp.ones((16, 4)))


def test_no_position_changes_nothing():
    x, pos = heads(), jnp.arange(6)[None]
    assert not embed(NoPosition(), pos, 8).any() and rotate(NoPosition(), x, pos) is not None
    assert np.array_equal(rotate(NoPosition(), x, pos), x)
    assert NoPosition().score_scale() == 1.0 and NoPosition().bias(4) is None


def test_rope_pairs_halves():  # N03
    x = jnp.array([1.0, 2, 3, 4]).reshape(1, 1, 1, 4)
    y = rotate(RoPE(), x, jnp.ones((1, 1), jnp.int32))
    want = [-1.984111, 1.959901, 2.462378, 4.019800]
    np.testing.assert_allclose(y[0, 0, 0], want, atol=1e-5)


def test_rope_of_neighbours_is_a_permutation_of_rope_of_halves():  # N03
    x, pos = heads(H=4), jnp.full((1, 6), 1)
    order = [0, 2, 1, 3]  # evens, then odds; its own inverse for four channels
    angle = np.array([1.0, 0.01])
    z = (np.asarray(x[..., ::2]) + 1j * np.asarray(x[..., 1::2])) * np.exp(1j * angle)
    want = np.stack([z.real, z.imag], -1).reshape(x.shape)
    got = rotate(RoPE(), x[..., jnp.array(order)], pos)[..., jnp.array(order)]
    np.testing.assert_allclose(got, want, atol=1e-6)
    one = x.at[0, 0, 0].set(jnp.array([1.0, 2, 3, 4]))[..., jnp.array(order)]
    neighbours = rotate(RoPE(), one, pos)[0, 0, 0, jnp.array(order)]
    np.testing.assert_allclose(neighbours, [-1.142640, 1.922076, 2.959851, 4.029800], atol=1e-5)


@pytest.mark.parametrize("box", [RoPE(), RoPE(theta=100.0), RoPE(fraction=0.5)], ids=repr)
def test_rope_keeps_norms_and_is_the_identity_at_zero(box):
    x, pos = heads(), jnp.array([[0, 1, 2, 7, 100, 4095]])
    y = rotate(box, x, pos)
    np.testing.assert_allclose(*(np.linalg.norm(a, axis=-1) for a in (x, y)), rtol=1e-5)
    assert np.array_equal(y[:, 0], x[:, 0])
    assert not np.allclose(y[:, 1:], x[:, 1:], atol=1e-2)


@pytest.mark.parametrize("box", [RoPE(), RoPE(fraction=0.5)], ids=repr)
def test_rope_scores_depend_on_the_distance_alone(box):
    q, k, pos = heads(0), heads(1), jnp.arange(6)[None]

    def scores(shift):
        return jnp.einsum(
            "btnh,bsnh->bnts", rotate(box, q, pos + shift), rotate(box, k, pos + shift)
        )

    np.testing.assert_allclose(scores(37), scores(0), atol=1e-4)
    assert not np.allclose(scores(0), jnp.einsum("btnh,bsnh->bnts", q, k), atol=1e-2)


def test_partial_rope_turns_the_first_channels_alone():
    x, pos = heads(), jnp.arange(6)[None]
    y = rotate(RoPE(fraction=0.5), x, pos)
    assert np.array_equal(y[..., 4:], x[..., 4:])
    assert np.array_equal(y[..., :4], rotate(RoPE(), x[..., :4], pos))


def test_phases_tell_far_neighbours_apart():  # N06
    pos = jnp.arange(8192)[None]
    angle = np.arange(8192)[:, None] * 10_000.0 ** (-np.arange(0, 128, 2) / 128)
    got = phases(pos, 128, 10_000.0)[0]
    np.testing.assert_allclose(np.cos(got), np.cos(angle), atol=1e-2)
    x = jnp.ones((1, 2, 1, 128), jnp.bfloat16)
    y = rotate(RoPE(), x, jnp.array([[256, 257]]))
    assert y.dtype == jnp.bfloat16 and not np.array_equal(y[:, 0], y[:, 1])


@pytest.mark.parametrize(
    ("head_dim", "fraction", "channels"), [(3, 1.0, 3), (4, 0.25, 1), (2, 0.1, 0)]
)
def test_rope_needs_an_even_width(head_dim, fraction, channels):  # E3
    with pytest.raises(ConfigError, match=f"head_dim={head_dim} is {channels} channels"):
        RoPE(fraction=fraction).check_head(head_dim)
    with pytest.raises(ConfigError, match="layer 0"):
        attention = GQA(n_heads=4, head_dim=head_dim)
        tiny(attention=attention, position=RoPE(fraction=fraction))


def test_wrong_knobs_are_refused():
    with pytest.raises(ConfigError, match=r"fraction=1\.5"):
        RoPE(fraction=1.5)
    for box in (RoPE, Sinusoidal):
        with pytest.raises(ConfigError, match=r"theta=-1\.0 must be positive"):
            box(theta=-1.0)
