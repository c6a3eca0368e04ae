# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from scipy import special, stats  # jax brings it

from jaxgpt.errors import ConfigError
from jaxgpt.study.student import half_width, paired, t_quantile, t_within


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 1001])
def test_students_distribution(freedom):
    for t in (0.0, 0.3, 2.0, 4.5, 30.0):
        expected = 1 - 2 * special.stdtr(freedom, -t)
        assert t_within(t, freedom) == pytest.approx(expected, abs=1e-12)
    for within in (0.5, 0.95, 0.999):
        expected = special.stdtrit(freedom, (1 + within) / 2)
        assert t_quantile(within, freedom) == pytest.approx(expected, rel=1e-9)


def test_the_interval_of_a_mean():
    x = np.array([1.0, 2.0, 4.0])
    expected = stats.t.interval(0.95, 2, x.mean(), x.std(ddof=1) / 3**0.5)
    assert half_width(x.std(ddof=1), 3) == pytest.approx((expected[1] - expected[0]) / 2)
    assert half_width(1.0, 1) == math.inf


def test_pairs_of_equal_weight_are_the_paired_t_test():
    rng = np.random.default_rng(0)
    a = rng.normal(size=20)
    b = a + 0.1 + 0.2 * rng.normal(size=20)
    found, expected = paired(a, b), stats.ttest_rel(b, a)
    interval = expected.confidence_interval(0.95)
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.difference / found.standard_error == pytest.approx(expected.statistic)
    assert found.difference == pytest.approx((b - a).mean()) and found.n == 20


def test_sums_of_unequal_weight():
    """Nats of windows: the difference is that of all tokens together, the error the bootstrap's."""
    rng = np.random.default_rng(1)
    w = rng.integers(5, 40, size=400).astype(float)
    a = w * rng.normal(2, 0.3, size=400)
    b = a + w * rng.normal(0.01, 0.1, size=400)
    found = paired(a, b, w)
    assert found.difference == pytest.approx((b.sum() - a.sum()) / w.sum())
    picks = rng.integers(0, 400, size=(2000, 400))
    means = (b - a)[picks].sum(1) / w[picks].sum(1)
    assert found.standard_error == pytest.approx(means.std(), rel=0.1)


def test_no_difference_and_too_few():
    same = paired([1.0, 2.0], [1.0, 2.0])
    assert (same.difference, same.p_value, same.low, same.high) == (0, 1, 0, 0)
    assert paired([1.0, 2.0], [2.0, 3.0]).p_value == 0
    with pytest.raises(ConfigError, match="1 pairs are too few"):
        paired([1.0], [2.0])
