# SPDX-License-Identifier: Apache-2.0
"""Several optimizer steps in one dispatch: for small models the host costs more than a step.

A loop with a count that is known only when it runs: one compiled program takes any number of steps
up to the largest, so that evaluation, checkpoints and changes of the batch size fall between two
dispatches wherever they are due, and the bits do not depend on where. They may differ from those of
steps without the loop, which XLA compiles otherwise.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxgpt.data.batches import Batch
from jaxgpt.train import processes
from jaxgpt.train.step import TrainState

Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]


def many_steps(
    state: TrainState, batches: Batch, count: Int[Array, ""], *, step: Step
) -> tuple[TrainState, dict[str, Array]]:
    """The first `count` of n steps.

    Args:
      state: Before the first.
      batches: Of n steps, along a leading axis.
      count: At most n.
      step: One step.

    Returns:
      The state after the last, and the metrics along a leading axis of n, those past `count` zero.
    """
    step = jax.jit(step, inline=True)  # traced once for its shapes and for the loop

    def batch(i: Array | int) -> Batch:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batches)

    n = len(batches.tokens_BT)
    shapes = jax.eval_shape(lambda: step(state, batch(0))[1])
    zeros = jax.tree.map(lambda x: jnp.zeros((n, *x.shape), x.dtype), shapes)

    def body(i: Array, so_far: tuple[TrainState, Any]) -> tuple[TrainState, Any]:
        state, metrics = so_far
        state, now = step(state, batch(i))
        return state, jax.tree.map(lambda all_, x: all_.at[i].set(x), metrics, now)

    return jax.lax.fori_loop(0, count, body, (state, zeros))


def until(step: int, most: int, every: Iterable[int], at: Iterable[int]) -> int:
    """How many steps to take at once, none of which goes past a place where the host has to act.

    Args:
      step: Finished steps.
      most: In a dispatch.
      every: Intervals; each multiple of them is such a place.
      at: Other places, as numbers of finished steps.
    """
    return min(most, *(n - step % n for n in every), *(s - step for s in at if s > step))


class Steps:
    """The compiled steps of a run, by the rows that they take.

    Args:
      step: For each number of rows, one step, not yet jitted.
      pieces: The sharding of the state's arrays.
      rows: That of a batch.
      dispatch: Most steps in a dispatch; at 1 there is no loop.
    """

    def __init__(
        self, step: Mapping[int, Callable], pieces: Any, rows: NamedSharding, dispatch: int
    ):
        self.rows, self.dispatch = rows, dispatch
        self._each = NamedSharding(rows.mesh, PartitionSpec(None, *rows.spec))
        given = (rows,) if dispatch == 1 else (self._each, None)
        self._compiled = {
            n_rows: jax.jit(
                function if dispatch == 1 else functools.partial(many_steps, step=function),
                in_shardings=(pieces, *given),
                out_shardings=(pieces, None),
                donate_argnums=0,
            )
            for n_rows, function in step.items()
        }

    def __call__(
        self, state: TrainState, batches: Sequence[Batch], n_rows: int
    ) -> tuple[TrainState, dict[str, Array]]:
        """One dispatch; once it is compiled it returns before devices other than a CPU are done.

        Args:
          state: Given away.
          batches: This process's rows of the batch of each step, at most `dispatch`.
          n_rows: Rows of a global batch.

        Returns:
          The new state, and the metrics, each along a leading axis, the first ones of these steps.
        """
        function = self._compiled[n_rows]
        if self.dispatch == 1:
            state, metrics = function(state, processes.put_rows(batches[0], self.rows, n_rows))
            return state, metrics
        stacked = jax.tree.map(lambda *own: self._put(own, n_rows), *batches)
        return function(state, stacked, np.int32(len(batches)))

    def lower(self, state: Any, batch: Batch) -> jax.stages.Lowered:
        """One step, traced for XLA from shapes alone; with `dispatch` 1.

        Args:
          state: Shapes with shardings.
          batch: Shapes.
        """
        return self._compiled[batch.tokens_BT.shape[0]].lower(state, batch)

    def _put(self, own: Sequence[np.ndarray], n_rows: int) -> Array:
        """One array of all steps of the dispatch, of which those that are not given are zero."""
        first = processes.own_rows(self.rows, n_rows).start
        stacked = np.zeros((self.dispatch, *own[0].shape), own[0].dtype)
        stacked[: len(own)] = own

        def piece(place: Any) -> np.ndarray:
            start, stop, _ = place[1].indices(n_rows)
            return stacked[:, start - first : stop - first, *place[2:]]

        shape = (self.dispatch, n_rows, *own[0].shape[1:])
        return jax.make_array_from_callback(shape, self._each, piece)
