# SPDX-License-Identifier: Apache-2.0
"""Rows of a table between the tensors of a checkpoint and our parameters, read both ways.

A row is a pair of name patterns with what lies between them: a transposition, a split of one tensor
into several parameters, a stack of several tensors into one parameter. `plan` puts the rows to a
model: a `Piece` is one row at one place. Left out: files (`tensors.py`), and which rows a family
has (`families/`).
"""

import dataclasses
import functools
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxgpt.errors import ConfigError
from jaxgpt.flops import unpadded
from jaxgpt.model import ModelConfig, param_shapes

Index = tuple[slice, ...]
Shape = tuple[int, ...]

_INDEX = re.compile(r"\{(\w)\}")  # {i}: a number
_PARTS = re.compile(r"\{(\w+(?:,\w+)+)\}")  # {q,k,v}: one name for each part


@dataclasses.dataclass(frozen=True)
class Row:
    """Tensors that match a pattern, and the parameters that they are.

    `{i}` stands for a number, the same on both sides. A number that only the tensor's name has
    counts tensors to be stacked along the first axis of the parameter. `{q,k,v}` in the
    parameter's name deals the last axis of the tensor out to three parameters.

    Attributes:
      tensor: "model.layers.{i}.self_attn.q_proj.weight".
      param: "block_{i}/attention/q/kernel".
      transposed: The tensor's last two axes are the other way round: [out, in] against [in, out].
      run: Consecutive entries that go to one part before the next one has its turn, or a function
        of the model that says so; None: all that it gets. Counted after the transposition.
    """

    tensor: str
    param: str
    transposed: bool = False
    run: int | Callable[[ModelConfig], int] | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """A row at one place of a model.

    Attributes:
      params: Paths of the parameters, one for each part.
      tensors: Names of the tensors, one unless they are stacked.
      stacked: Whether the first axis of the parameter counts the tensors.
      transposed: As in the row.
      run: As in the row, a number or None.
    """

    params: tuple[str, ...]
    tensors: tuple[str, ...]
    stacked: bool
    transposed: bool
    run: int | None

    def tensor_shape(self, shape: Shape) -> Shape:
        """That of each tensor, from that of each parameter."""
        shape = shape[1:] if self.stacked else shape
        shape = (*shape[:-1], shape[-1] * len(self.params))
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    def fill(
        self, out: np.ndarray, part: int, tensors: Mapping[str, np.ndarray], index: Index
    ) -> None:
        """Write a shard of one parameter into `out`, cast to its dtype.

        Args:
          out: Of the shape of the shard.
          part: Which of the parameters.
          tensors: Arrays by name, better views of a file: only what is needed is read.
          index: A slice for each axis of the parameter.
        """
        if not self.stacked:
            out[...] = self._view(tensors[self.tensors[0]], part)[index]
            return
        first, *rest = index
        for row, name in zip(out, self.tensors[first], strict=True):
            row[...] = self._view(tensors[name], part)[tuple(rest)]

    def write(self, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tensors from whole parameters, contiguous: the inverse of `fill`."""
        parts = [params[path] for path in self.params]
        array = parts[0]
        if len(parts) > 1:
            run = self.run or array.shape[-1]
            turns = [part.reshape(*part.shape[:-1], -1, run) for part in parts]
            array = np.stack(turns, axis=-2).reshape(*array.shape[:-1], -1)
        if self.transposed:
            array = array.swapaxes(-1, -2)
        arrays = array if self.stacked else [array]
        return {name: np.ascontiguousarray(a) for name, a in zip(self.tensors, arrays, strict=True)}

    def _view(self, tensor: np.ndarray, part: int) -> np.ndarray:
        """What of the tensor goes to one part; a view, but where runs are several and longer."""
        if self.transposed:
            tensor = tensor.swapaxes(-1, -2)
        parts = len(self.params)
        if parts == 1:
            return tensor
        run = self.run or tensor.shape[-1] // parts
        turns = tensor.reshape(*tensor.shape[:-1], -1, parts, run)
        return turns[..., part, :].reshape(*tensor.shape[:-1], -1)


def plan(rows: Iterable[Row], cfg: ModelConfig, shapes: Mapping[str, Shape]) -> list[Piece]:
    """Each row at each place where the model has its parameters.

    Args:
      rows: A family's table, which may hold rows that this model does not need.
      cfg: The model.
      shapes: Of its parameters without padding, by path.

    Raises:
      ConfigError: A parameter that no row makes.
    """
    pieces, made = [], set()
    for row in rows:
        names = _parts(row.param)
        for path in _matches(names[0], shapes):
            params = tuple(name.format(**path) for name in names)
            if not made.isdisjoint(params):
                raise ValueError(f"two rows make {params}")
            made |= set(params)
            pieces.append(_piece(row, params, path, cfg, shapes))
    for path in shapes.keys() - made:
        raise ConfigError(f"no row of the table makes the parameter {path}")
    return pieces


def _piece(
    row: Row,
    params: tuple[str, ...],
    numbers: dict[str, str],
    cfg: ModelConfig,
    shapes: Mapping[str, Shape],
) -> Piece:
    stacking = set(_INDEX.findall(row.tensor)) - numbers.keys()
    tensors = [row.tensor.format(**numbers, **dict.fromkeys(stacking, "{0}"))]
    if stacking:
        tensors = [tensors[0].format(n) for n in range(shapes[params[0]][0])]
    run = row.run(cfg) if callable(row.run) else row.run
    return Piece(params, tuple(tensors), bool(stacking), row.transposed, run)


def _parts(param: str) -> list[str]:
    """`a/{q,k}/b` -> `a/q/b`, `a/k/b`."""
    found = _PARTS.search(param)
    if found is None:
        return [param]
    return [param.replace(found[0], name) for name in found[1].split(",")]


def _matches(pattern: str, paths: Iterable[str]) -> Iterable[dict[str, str]]:
    """The numbers of each path that matches."""
    regex = pattern_regex(pattern)
    return [found.groupdict() for found in map(regex.fullmatch, paths) if found]


def pattern_regex(pattern: str) -> re.Pattern[str]:
    """`h.{i}.attn` as a regular expression: a group `i` of digits, the rest as it stands."""
    literal = [re.escape(text) for text in _INDEX.split(pattern)[::2]]
    groups = [rf"(?P<{name}>\d+)" for name in _INDEX.findall(pattern)]
    return re.compile("".join(a + b for a, b in zip(literal, [*groups, ""], strict=True)))


def true_shapes(cfg: ModelConfig) -> Mapping[str, Shape]:
    """Of all parameters without padding of the vocabulary, by path."""
    return flat_shapes(unpadded(cfg))


@functools.lru_cache(maxsize=8)  # a deep model takes seconds
def flat_shapes(cfg: ModelConfig) -> Mapping[str, Shape]:
    """Of all parameters, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(param_shapes(cfg))
    shapes = {"/".join(key.key for key in path): leaf.shape for path, leaf in leaves}
    return types.MappingProxyType(shapes)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b": x} -> {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        node = tree
        *names, last = path.split("/")
        for name in names:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree
