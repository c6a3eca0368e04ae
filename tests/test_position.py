# SPDX-License-Identifier: Apache-2.0
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.position import Learned, NoPosition, Sinusoidal
from jaxgpt.errors import ConfigError
from jaxgpt.testing import tiny


def embed(box, pos, width, **params):
    module = box.build(tiny(d_model=width).dims())
    pos_BT = jnp.atleast_2d(jnp.asarray(pos))
    return module.apply({"params": params}, jnp.zeros((*pos_BT.shape, width)), pos_BT)


@pytest.mark.parametrize("p", [0, 1, 511])
def test_sinusoids_equal_the_formula(p):
    y = embed(Sinusoidal(), [p], 512)[0, 0]
    np.testing.assert_allclose(y, reference.sinusoids(p, 512), atol=1e-4)
    if p == 0:
        assert np.array_equal(y, [0, 1] * 256)
    if p == 1:
        np.testing.assert_allclose(y[:2], [np.sin(1), np.cos(1)], atol=1e-6)


def test_sinusoids_need_an_even_width_and_a_positive_base():
    with pytest.raises(ConfigError, match="d_model=15 is odd"):
        tiny(d_model=15, position=Sinusoidal(), attention=GQA(n_heads=3))
    with pytest.raises(ConfigError, match=r"theta=-1\.0 must be positive"):
        Sinusoidal(theta=-1.0)


def test_learned_positions_are_rows_of_a_table():
    table = jnp.arange(16 * 4.0).reshape(16, 4)
    y = embed(Learned(), [[-1, 0, 3, 15]], 4, embedding=table)
    assert np.array_equal(y[0], table[jnp.array([0, 0, 3, 15])])


def test_rows_in_front_of_the_learned_positions_are_skipped():  # OPT
    table = jnp.arange(18 * 4.0).reshape(18, 4)
    y = embed(Learned(offset=2), [[-1, 0, 3, 15]], 4, embedding=table)
    assert np.array_equal(y[0], table[jnp.array([2, 2, 5, 17])])
    with pytest.raises(ConfigError, match="offset=-1 is negative"):
        Learned(offset=-1)


@pytest.mark.parametrize("offset", [0, 2])
def test_a_position_past_the_table_is_nan_and_not_the_last_row(offset):
    y = embed(Learned(offset), [[15, 16]], 4, embedding=jnp.ones((offset + 16, 4)))
    assert np.isfinite(y[0, 0]).all() and np.isnan(y[0, 1]).all()


def test_more_tokens_than_learned_positions_are_refused():
    with pytest.raises(ValueError, match="17 tokens exceed context_length=16"):
        embed(Learned(), np.arange(17), 4, embedding=jnp.ones((16, 4)))


def test_no_position_changes_nothing():
    x, pos = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 2, 8))), jnp.arange(6)[None]
    assert not embed(NoPosition(), pos, 8).any()
    assert np.array_equal(NoPosition().rotate(x, pos), x)
    assert NoPosition().score_scale() == 1.0 and NoPosition().bias(4) is None
    assert NoPosition().at(99) == NoPosition()
