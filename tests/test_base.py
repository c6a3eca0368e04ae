# SPDX-License-Identifier: Apache-2.0
import dataclasses

import jax.numpy as jnp
import pytest

from jaxgpt.boxes import base
from jaxgpt.boxes.base import check_positive
from jaxgpt.errors import ConfigError
from jaxgpt.testing import tiny

CFG = tiny()


def test_an_attention_without_a_cache_says_so():
    with pytest.raises(NotImplementedError, match="Sum has no cache and cannot be sampled from"):

        @dataclasses.dataclass(frozen=True)
        class Sum(base.AttentionBox):
            pass

        Sum().init_cache(CFG.dims(), 1, 1, jnp.float32)


def test_positive_values_pass_and_others_are_named():
    check_positive(a=1, b=0.5, c=None)
    for value in (0, -1, 0.0, float("nan")):
        with pytest.raises(ConfigError, match=f"rate={value} must be positive"):
            check_positive(a=1, rate=value)
