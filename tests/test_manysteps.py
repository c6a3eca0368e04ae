# SPDX-License-Identifier: Apache-2.0
"""Several steps in one dispatch, of a model of one matrix; those of a run are in test_loop.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.data.batches import Batches
from jaxgpt.train import sharding
from jaxgpt.train.config import MeshConfig
from jaxgpt.train.manysteps import Steps, until
from jaxgpt.train.step import TrainState

TOKENS = np.random.default_rng(0).integers(0, 31, 999).astype(np.uint16)


def test_no_dispatch_goes_past_what_the_host_has_to_do():
    assert until(0, 8, (250, 100), (1000,)) == 8
    assert until(96, 8, (250, 100), (1000,)) == 4, "a checkpoint"
    assert until(100, 8, (250, 100), (1000, 103)) == 3, "a change of the batch size"
    assert until(103, 8, (250, 100), (1000, 103, 9)) == 8, "what is past does not count"
    assert until(997, 8, (250, 100), (1000,)) == 3, "the end"
    assert until(3, 1, (250, 100), (1000,)) == 1


def step(state, batch):
    """A matrix that turns with the tokens and some noise."""
    noise = jax.random.normal(jax.random.fold_in(state.key, state.step), (31, 31))
    turned = jnp.tanh(state.params["w"] @ (noise + 1)).at[batch.tokens_BT].add(0.1)
    metrics = {"loss_nats": turned.sum(), "n_tokens": batch.weights_BT.sum(), "last": state.step}
    return dataclasses.replace(state, step=state.step + 1, params={"w": turned}), metrics


def taken(steps, counts):
    """The state and the metrics of each step, for so many steps in each dispatch."""
    params = {"w": jnp.eye(31)}
    state = TrainState(jnp.zeros((), jnp.int32), params, {}, jax.random.key(0))
    batches, history, done = Batches(TOKENS, 8, 4, 0), [], 0
    for count in counts:
        state, metrics = steps(state, [batches.batch(done + i) for i in range(count)], 4)
        stacked = {name: np.atleast_1d(np.asarray(x)) for name, x in metrics.items()}
        assert all(len(x) == steps.dispatch for x in stacked.values())
        history += [{name: float(x[i]) for name, x in stacked.items()} for i in range(count)]
        done += count
    return np.asarray(state.params["w"]), history


def test_the_bits_do_not_depend_on_where_dispatches_end():
    rows = sharding.batch_sharding(sharding.make_mesh(MeshConfig()))
    five, single = (
        Steps({4: step}, NamedSharding(rows.mesh, PartitionSpec()), rows, n) for n in (5, 1)
    )
    (once, history), (again, history2) = taken(five, [5]), taken(five, [1, 3, 1])
    np.testing.assert_array_equal(once, again)
    assert history == history2 and [m["last"] for m in history] == [0, 1, 2, 3, 4]
    assert len({m["loss_nats"] for m in history}) == 5 and history[4]["n_tokens"] == 32
    alone, history3 = taken(single, [1] * 5)
    np.testing.assert_allclose(once, alone, rtol=1e-5)
    assert [m["last"] for m in history3] == [0, 1, 2, 3, 4]
