# SPDX-License-Identifier: Apache-2.0
"""Every two settings of boxes and knobs meet in a model here, and all models keep the contracts.

About 170 models, ten minutes on two cores. `test_pairs.py` proves that all pairs are covered.
"""

import functools
import math

import jax
import pytest
from counting import n_params

from jaxgpt.configlib import our_boxes
from jaxgpt.model import param_shapes
from jaxgpt.testing import check_model
from jaxgpt.testing.levels import EXCLUDED, LEVELS
from jaxgpt.testing.pairs import Pairs, build, settings

PARTS = 40


@functools.cache
def models():
    known = settings(tuple(our_boxes().values()), LEVELS)
    return [build(row) for row in Pairs(known, EXCLUDED).rows()]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_models_in_which_all_pairs_meet(part):
    faults = []
    for index, cfg in list(enumerate(models()))[part::PARTS]:
        try:
            leaves = jax.tree.leaves(param_shapes(cfg))
            assert n_params(cfg) == sum(math.prod(leaf.shape) for leaf in leaves)
            check_model(cfg)
        except Exception as error:
            error.add_note(f"model {index}: {cfg}")
            faults.append(error)
    if faults:
        raise ExceptionGroup(f"{len(faults)} models", faults)
