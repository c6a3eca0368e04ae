# SPDX-License-Identifier: Apache-2.0
"""A folder of a public checkpoint -> our config and parameters.

Parameters are made one at a time, or one shard at a time where a sharding asks for it, from views
of memory-mapped files: beyond what is placed, the host holds no more than one of them. Left out:
saving, tokenizers, and the download.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from jaxgpt.errors import CheckpointError, ConfigError
from jaxgpt.interop.families import Family, family_of, read_config
from jaxgpt.interop.reading import read_json
from jaxgpt.interop.rows import (
    Index,
    Piece,
    Shape,
    flat_shapes,
    nested,
    pattern_regex,
    plan,
    true_shapes,
)
from jaxgpt.interop.tensors import Tensors
from jaxgpt.model import ModelConfig
from jaxgpt.shapes import Params

HEAD, TABLE = "head/out/kernel", "embed/embedding"


class Loaded(NamedTuple):
    """What a checkpoint holds.

    Attributes:
      config: The model. Its vocabulary is the file's; the tables are padded to its
        `vocab_multiple` with zeros, as those of any model.
      params: As `jaxgpt.init_params` makes them.
      skipped: Tensors that are no parameters, with what they are.
    """

    config: ModelConfig
    params: Params
    skipped: dict[str, str]


def load(
    folder: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    sharding: Callable[[str, Shape], Sharding] | None = None,
) -> Loaded:
    """Read a folder with config.json and safetensors, of any family that we know.

    Args:
      folder: Holds config.json and model.safetensors, or model.safetensors.index.json with its
        files.
      dtype: Of the parameters, whatever that of the files.
      sharding: From the path and shape of a parameter to where it lives; None: on the default
        device.

    Raises:
      ConfigError: Something in the config is not understood, a tensor is missing, or one is left
        over that nobody knows.
      CheckpointError: The files are damaged, do not fit the config, or hold numbers that are not
        finite.
    """
    opened = open_folder(folder, dtype)
    where, flat = sharding or _on_default_device(), {}
    for path, read in opened.readers.items():
        shape = opened.shapes[path]
        flat[path] = jax.make_array_from_callback(shape, where(path, shape), read)
    return Loaded(opened.config, nested(flat), opened.skipped)


class Opened(NamedTuple):
    """A folder that has been checked, and of which no number has been read.

    Attributes:
      config: As of `Loaded`.
      shapes: Of the parameters, by path.
      readers: By path, a function of slices of the parameter that reads just these; None: all.
      skipped: As of `Loaded`.
    """

    config: ModelConfig
    shapes: Mapping[str, Shape]
    readers: dict[str, Callable[[Index | None], np.ndarray]]
    skipped: dict[str, str]


def open_folder(folder: str | Path, dtype: DTypeLike = jnp.float32) -> Opened:
    """The first half of `load`: everything but the numbers.

    Raises:
      ConfigError, CheckpointError: As `load`; the readers raise CheckpointError too.
    """
    folder = Path(folder)
    file = folder / "config.json"
    data = read_json(file)
    family, cfg = family_of(data, str(file)), read_config(data, str(file))
    tensors = Tensors(folder)
    if cfg.n_layers > len(tensors):  # before as many are made
        what = f"config.json has {cfg.n_layers} layers, and the files {len(tensors)} tensors"
        raise ConfigError(what, where=str(folder))
    family, shapes = _named(family, tensors), true_shapes(cfg)
    pieces = plan(family.rows, cfg, shapes)
    _check_tensors(pieces, shapes, tensors, folder)
    skipped, padded = _skipped(family, data, pieces, tensors, folder), flat_shapes(cfg)
    readers = {
        path: _shard_reader(piece, part, tensors, shapes[path], padded[path], jnp.dtype(dtype))
        for piece in pieces
        for part, path in enumerate(piece.params)
    }
    return Opened(cfg, padded, readers, skipped)


def _on_default_device() -> Callable[[str, Shape], Sharding]:
    device = SingleDeviceSharding(next(iter(jnp.zeros(()).devices())))
    return lambda path, shape: device


def _shard_reader(
    piece: Piece, part: int, tensors: Tensors, true: Shape, padded: Shape, dtype: np.dtype
) -> Callable[[Index | None], np.ndarray]:
    """A function of slices of the padded parameter that reads just these."""

    def read(index: Index | None) -> np.ndarray:
        ranges = [
            range(n)[s] for s, n in zip(index or (slice(None),) * len(padded), padded, strict=True)
        ]
        inside = tuple(
            slice(min(r.start, n), min(r.stop, n)) for r, n in zip(ranges, true, strict=True)
        )
        out = np.zeros([len(r) for r in ranges], dtype)
        filled = out[tuple(slice(s.stop - s.start) for s in inside)]
        piece.fill(filled, part, tensors, inside)
        _check_finite(filled, piece, inside[0].start)
        return out

    return read


def _check_finite(array: np.ndarray, piece: Piece, first: int) -> None:
    """Of a shard whose first axis begins at `first`; by blocks, as the whole would take memory."""
    step = max(1, 2**20 * len(array) // max(1, array.size))
    for start in range(0, len(array), step):
        wrong = np.argwhere(~np.isfinite(array[start : start + step]))
        if len(wrong):
            name = piece.tensors[first + start + wrong[0, 0] if piece.stacked else 0]
            raise CheckpointError(f"{name} holds numbers that are not finite")


def _named(family: Family, tensors: Tensors) -> Family:
    """The family with the names of these files: a model saved without its head lacks the prefix."""
    if any(name.startswith(family.prefix) for name in tensors):
        return family
    return dataclasses.replace(
        family,
        rows=tuple(
            dataclasses.replace(row, tensor=row.tensor.removeprefix(family.prefix))
            for row in family.rows
        ),
        skips={name.removeprefix(family.prefix): why for name, why in family.skips.items()},
    )


def _check_tensors(
    pieces: list[Piece], shapes: Mapping[str, Shape], tensors: Tensors, folder: Path
) -> None:
    """All that the model needs is there, in the right shape."""
    for piece in pieces:
        want = piece.tensor_shape(shapes[piece.params[0]])
        for name in piece.tensors:
            if name not in tensors:
                raise ConfigError(f"{name} is missing, for {piece.params[0]}", where=str(folder))
            if tensors.shape(name) != want:
                raise CheckpointError(
                    f"{name} has shape {list(tensors.shape(name))}, but config.json makes it "
                    f"{list(want)}",
                    where=str(folder),
                )


def _skipped(
    family: Family, data: Mapping[str, Any], pieces: list[Piece], tensors: Tensors, folder: Path
) -> dict[str, str]:
    """Tensors that no row takes, with what they are.

    Raises:
      ConfigError: Nobody knows one of them, or a tied head has a matrix of its own.
    """
    taken = {name for piece in pieces for name in piece.tensors}
    patterns = {pattern_regex(name): why for name, why in family.skips.items()}
    [table] = [p.tensors[0] for p in pieces if TABLE in p.params]
    heads = {row.tensor for row in family.rows if row.param == HEAD}
    skipped = {}
    for name in (name for name in tensors if name not in taken):
        reasons = [why for pattern, why in patterns.items() if pattern.fullmatch(name)]
        if name in heads:
            if not np.array_equal(tensors[name], tensors[table]):
                raise ConfigError(
                    f"{name} is not {table}, to which config.json ties it",
                    where=str(folder),
                    fix="tie_word_embeddings: false",
                )
            reasons = [f"the same as {table}"]
        elif _extra_layer(family, data, name):
            reasons = ["of a layer that predicts a token further ahead"]
        if not reasons:
            raise ConfigError(f"{name} belongs to no parameter of the model", where=str(folder))
        skipped[name] = reasons[0]
    return skipped


def _extra_layer(family: Family, data: Mapping[str, Any], name: str) -> bool:
    """Whether a tensor is of the layers behind the last one that the config counts."""
    if family.extra_layers is None:
        return False
    key, prefix = family.extra_layers
    last = data["num_hidden_layers"]
    layers = range(last, last + (data.get(key) or 0))
    return any(name.startswith(prefix.format(i=i)) for i in layers)
