# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest

from jaxgpt.study.evaluation.statistics import Estimate, mean, ratio


def test_the_error_of_a_mean():
    assert mean(np.array([True, False, True, True])) == (0.75, 0.25)  # sqrt(0.75 / 3 / 4)
    assert mean(np.array([2.0])) == Estimate(2.0, None)


def test_a_ratio_is_of_sums_and_its_error_of_parts():
    value, stderr = ratio(np.array([64.0, 32.0]), np.array([32, 8]))  # case D14
    assert value == 2.4
    rest = (64 - 2.4 * 32) ** 2 + (32 - 2.4 * 8) ** 2
    assert stderr == pytest.approx(math.sqrt(2 * rest) / 40)
    values = np.array([1.0, 5.0, 2.0, 2.0])
    assert ratio(4 * values, np.full(4, 4)) == pytest.approx(mean(values))
    assert ratio(np.array([3.0]), np.array([2])) == Estimate(1.5, None)


def test_units_and_perplexities():
    assert Estimate(2.0, 0.5).scaled(3.0) == (6.0, 1.5)
    value, stderr = Estimate(2.4, 0.1).exponential()
    assert value == pytest.approx(11.023, abs=1e-3) and stderr == pytest.approx(value * 0.1)
    assert Estimate(800.0, 0.1).exponential() == (math.inf, None)
    assert Estimate(1.0).exponential() == (math.e, None)
