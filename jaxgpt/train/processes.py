# SPDX-License-Identifier: Apache-2.0
"""What the processes of one run say to each other, and which part of the work is whose.

Facts travel through the key-value store that `jax.distributed` keeps in one of the processes, not
through the devices: who waits there sees a signal, and why another process has left. All processes
make the same calls in the same order. A single process talks to nobody, at no cost.

Left out: how processes find each other, and what happens where one dies (`joining.py`).
"""

import functools
import itertools
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # JAX has no public way to its store
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxgpt.errors import JaxgptError
from jaxgpt.train.runfolder import Signals

LEFT = "jaxgpt-left"
"""Folder of the store where a process that stops says why."""
GLANCE_MS = 1000
"""While it waits, a process looks this often for signals and for others that have left."""

_turns = itertools.count()
_cleared = itertools.count()


class PartnerError(JaxgptError):
    """Another process of the run has stopped.

    Args:
      number: Which.
      line: What it said.
      exit_code: Its exit code, which becomes ours.
    """

    def __init__(self, number: int, line: str, exit_code: int):
        super().__init__(f"process {number} has stopped: {line}")
        self.number, self.line = number, line
        self.exit_code = exit_code  # type: ignore[misc]


def count() -> int:
    """Processes of the run; 1 where nothing was joined."""
    return distributed.global_state.num_processes if _client() is not None else 1


def index() -> int:
    """Which of them this is."""
    return distributed.global_state.process_id if _client() is not None else 0


def leads() -> bool:
    """Whether this is the one that writes the run's files and speaks."""
    return index() == 0


def several() -> bool:
    """Whether there are others."""
    return count() > 1


def exchange(name: str, mine: Any, check: Callable[[], None] = lambda: None) -> list[Any]:
    """What each process says, by its number; returns when all have said it.

    Args:
      name: Of the occasion, the same in all processes.
      mine: JSON.
      check: Called about once a second while others are waited for; what it raises is raised.

    Raises:
      PartnerError: Another process has stopped instead.
    """
    if not several():
        return [mine]
    turn, client = next(_turns), _client()
    place = f"jaxgpt/{turn}/{name}"
    client.key_value_set(f"{place}/{index()}", json.dumps(mine))
    if leads():
        said = [_hear(f"{place}/{i}", check) for i in range(count())]
        client.key_value_set(f"{place}/all", json.dumps(said))
        while (past := next(_cleared)) < turn:  # whoever takes this turn has heard the last
            client.key_value_delete(f"jaxgpt/{past}")
        return said
    return _hear(f"{place}/all", check)


def meet(name: str, check: Callable[[], None] = lambda: None) -> None:
    """Return when all processes are here. Arguments and errors are those of `exchange`."""
    exchange(name, None, check)


def lead(name: str, work: Callable[[], Any], check: Callable[[], None] = lambda: None) -> Any:
    """Process 0 works while the others wait; all return its result, which must be JSON.

    What the work raises is raised in process 0; the others see that it has stopped.

    Args:
      name: Of the work, the same in all processes.
      work: Called in process 0.
      check: As for `exchange`; not called in process 0.
    """
    if not several():
        return work()
    place = f"jaxgpt/{next(_turns)}/{name}"
    if not leads():
        return _hear(place, check)
    result = work()
    _client().key_value_set(place, json.dumps(result))
    return result


def say_left(reason: JaxgptError) -> None:
    """Tell the others that this process stops, and why.

    Args:
      reason: Its error; or another process's, for which it stops.
    """
    said = [index(), str(reason), reason.exit_code]
    if isinstance(reason, PartnerError):
        said = [reason.number, reason.line, reason.exit_code]
    _client().key_value_set(f"{LEFT}/{index()}", json.dumps(said), True)


def all_left() -> bool:
    """Whether all processes have said that they stop."""
    return len(_client().key_value_dir_get(LEFT)) == count()


def check_left() -> None:
    """Raise PartnerError if another process has said that it stops."""
    for _, said in sorted(_client().key_value_dir_get(LEFT)):
        number, line, exit_code = json.loads(said)
        if number != index():
            raise PartnerError(number, line, exit_code)


def may_be_lost(error: object) -> bool:
    """Whether an error may come of another process's death: it is none that jaxgpt raised."""
    return several() and isinstance(error, Exception) and not isinstance(error, JaxgptError)


class Stop:
    """The signal that ends a run of several processes after the same step in all of them.

    Each step a number per device says which signal its process has seen; their largest comes back
    to all, one step late, so that no step waits for it. In a single process it is that process's
    own signal, at once.

    Args:
      mesh: All devices of the run.
      signals: Of this process.
    """

    def __init__(self, mesh: Mesh, signals: Signals):
        self._signals, self._asked = signals, None
        self.check = signals.check
        if several():
            self._each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
            self._largest = jax.jit(
                lambda seen: seen.max(), out_shardings=NamedSharding(mesh, PartitionSpec())
            )

    def soon(self) -> int | None:
        """The signal that any process had seen at the call before this one."""
        if not several():
            return self._signals.pending
        asked, self._asked = self._asked, self._ask()
        return None if asked is None else self._answer(asked)

    def now(self) -> int | None:
        """The signal that any process has seen; all wait for each other."""
        return self._answer(self._ask()) if several() else self._signals.pending

    def _ask(self) -> jax.Array:
        seen = np.array([self._signals.pending or 0], np.int32)
        shape = (self._each.mesh.size,)
        return self._largest(jax.make_array_from_callback(shape, self._each, lambda _: seen))

    @staticmethod
    def _answer(asked: jax.Array) -> int | None:
        return int(np.asarray(asked)) or None


def connect(mesh: Mesh) -> None:
    """Make the connections that collectives over the axes of a mesh use, while all are here.

    XLA's collectives between CPUs make them at their first use and wait 30 s for each other, which
    is less than the compilation of a step may differ between processes.

    Args:
      mesh: All devices of the run.
    """
    if not several():
        return
    names = mesh.axis_names
    each = NamedSharding(mesh, PartitionSpec(names))
    ones = jax.make_array_from_callback((mesh.size,), each, lambda _: np.ones(1, np.float32))
    sums = []
    wide = [name for name in names if mesh.shape[name] > 1]
    groups = (itertools.combinations(wide, n + 1) for n in range(len(wide)))
    for axes in itertools.chain.from_iterable(groups):
        total = jax.shard_map(
            functools.partial(jax.lax.psum, axis_name=axes),
            mesh=mesh,
            in_specs=PartitionSpec(names),
            out_specs=PartitionSpec(tuple(name for name in names if name not in axes)),
        )
        sums.append(jax.jit(total).lower(ones).compile())
    meet("connected")
    for total in sums:
        total(ones).block_until_ready()


def own_rows(rows: NamedSharding, n: int) -> slice:
    """The rows of a batch of n that the devices of this process work on.

    Processes that share the work on a row (tensor parallelism) have it in common.

    Args:
      rows: How rows are split.
      n: Rows of the global batch.
    """
    first = NamedSharding(rows.mesh, PartitionSpec(rows.spec[0]))  # without that of the tokens
    spans = [i[0].indices(n) for i in first.addressable_devices_indices_map((n,)).values() if i]
    return slice(min(start for start, _, _ in spans), max(stop for _, stop, _ in spans))


def put_rows(batch: PyTree, rows: NamedSharding, n: int) -> PyTree:
    """A global batch from the rows of this process.

    Args:
      batch: Its `own_rows`.
      rows: How rows are split.
      n: Rows of the global batch.
    """
    first = own_rows(rows, n).start

    def put(own: np.ndarray) -> jax.Array:
        def piece(place: Any) -> np.ndarray:
            start, stop, _ = place[0].indices(n)
            return own[(slice(start - first, stop - first), *place[1:])]

        return jax.make_array_from_callback((n, *own.shape[1:]), rows, piece)

    return jax.tree.map(put, batch)


def own_copy(tree: PyTree) -> PyTree:
    """Arrays that are whole on every device, as arrays of this process alone."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree) if several() else tree


def _client() -> Any:
    return distributed.global_state.client


def _hear(key: str, check: Callable[[], None]) -> Any:
    """The value of a key, as soon as it is set."""
    while True:
        try:
            return json.loads(_client().blocking_key_value_get(key, GLANCE_MS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        check()
        check_left()
