# SPDX-License-Identifier: Apache-2.0
"""Where arrays live: batches are split over all devices, the state is whole on each."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgpt.errors import ConfigError


def make_mesh() -> Mesh:
    """All devices along one axis, `data`.

    Axes are Auto: flax's modules do not run under the Explicit axes that are jax's default.
    """
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def state_shardings(mesh: Mesh, abstract: Any) -> Any:
    """`abstract` (shapes) with a sharding on each leaf.

    jit would otherwise put optimizer moments, which depend on no input, on one device.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), abstract
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over the axis `data`."""
    return NamedSharding(mesh, PartitionSpec("data"))


def put_batch(batch: Any, sharding: NamedSharding) -> Any:
    """Host rows to the devices that work on them."""
    return jax.tree.map(
        lambda rows: jax.make_array_from_process_local_data(sharding, np.asarray(rows)), batch
    )


def check_rows(batch_size: int, accumulate: int, devices: int) -> None:
    """Each micro-batch must split evenly over the devices.

    Raises:
      ConfigError: It does not; the message gives the nearest sizes that do.
    """
    unit = accumulate * devices
    if batch_size % unit:
        below, above = batch_size // unit * unit, -(-batch_size // unit) * unit
        choices = " or ".join(str(n) for n in (below, above) if n)
        raise ConfigError(
            f"batch_size={batch_size} does not split over {devices} devices"
            + (f" in {accumulate} micro-batches" if accumulate > 1 else ""),
            fix=f"--train.batch_size={choices}",
        )
