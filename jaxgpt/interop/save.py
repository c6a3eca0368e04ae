# SPDX-License-Identifier: Apache-2.0
"""A model as a folder that transformers loads: weights, config.json, tokenizer.

Tensors are made and written one parameter at a time; what was written is read back by the reader of
public checkpoints and compared, bit by bit, before the folder takes its place. Left out: adapters
(`peft.py`), and parameters that are on several hosts.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxgpt.data.base import Tokenizer
from jaxgpt.data.pretrained import load_folder_tokenizer
from jaxgpt.errors import CheckpointError, ConfigError
from jaxgpt.interop.families import FAMILIES, write_config
from jaxgpt.interop.folded import folded
from jaxgpt.interop.load import open_folder
from jaxgpt.interop.newfolder import check_place, new_folder
from jaxgpt.interop.rows import Piece, Shape, flat_shapes, plan, true_shapes
from jaxgpt.interop.same import differences, resolved
from jaxgpt.interop.tokenfiles import as_text, same_tokens, token_files
from jaxgpt.interop.written import NAMES, Named, write_tensors
from jaxgpt.model import ModelConfig
from jaxgpt.shapes import Params
from jaxgpt.train.digest import by_path

MAX_FILE_BYTES = 5_000_000_000
"""As transformers cuts large models."""


class Saved(NamedTuple):
    """What was written.

    Attributes:
      family: The `model_type`.
      n_params: Numbers that were written, padding not counted.
      n_bytes: Of the weights.
    """

    family: str
    n_params: int
    n_bytes: int


def save(
    folder: str | Path,
    config: ModelConfig,
    params: Params,
    tokenizer: Tokenizer | None = None,
    *,
    family: str | None = None,
    dtype: DTypeLike = jnp.float32,
    force: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
    check: Callable[[], None] = lambda: None,
) -> Saved:
    """Write a model as a Hugging Face folder.

    Beyond the parameters the host holds copies of those that make one tensor, such as q, k and v.

    Args:
      folder: The place. It gets all files at once, or none.
      config: The model, its vocabulary known.
      params: As `jaxgpt.init_params` makes them; padding of the vocabulary is not written.
      tokenizer: Written beside the model.
      family: A `model_type` such as "llama"; None: the first one that has such a model.
      dtype: Of the files: float32, bfloat16 or float16.
      force: Replace an earlier export.
      max_file_bytes: Larger weights are written as several files.
      check: Called with each tensor; what it raises ends the export, of which nothing stays.

    Raises:
      ConfigError: No family has such a model, the parameters are not the config's, the tokenizer
        does not fit or cannot be written, or something is in the folder already.
      DivergedError: A parameter is not finite in this dtype.
      ResourceError: It cannot be written.
      CheckpointError: What was written reads back otherwise.
    """
    kind, cfg = np.dtype(dtype), config
    if kind not in NAMES or kind.itemsize > 4:
        raise ConfigError(f"dtype {kind} is no dtype of weights", fix="float32 or bfloat16")
    check_place(Path(folder).expanduser(), force=force)
    data = write_config(cfg, family)
    shapes = true_shapes(cfg)
    cfg, flat = folded(cfg, check_params(cfg, params))
    pieces = plan(FAMILIES[data["model_type"]].rows, cfg, shapes)
    tensors = {
        name: piece.tensor_shape(shapes[piece.params[0]])
        for piece in pieces
        for name in piece.tensors
    }
    check_vocabulary(cfg, tokenizer)
    files, keys = token_files(tokenizer, cfg.context_length)
    word = kind.name
    files = {"config.json": as_text(data | keys | {"dtype": word, "torch_dtype": word}), **files}
    n_params = sum(int(np.prod(shape)) for shape in tensors.values())
    n_bytes = n_params * kind.itemsize
    with new_folder(folder, n_bytes + sum(map(len, files.values())), force=force) as filling:
        arrays = written(pieces, flat, shapes, check)
        write_tensors(filling, tensors, kind, arrays, max_file_bytes=max_file_bytes)
        for name, text in files.items():
            (filling / name).write_text(text, encoding="utf-8", newline="")
        verify(filling, cfg, flat, kind, check)
        if tokenizer is not None and not same_tokens(load_folder_tokenizer(filling), tokenizer):
            raise CheckpointError("the tokenizer reads back otherwise", fix="export without it")
    return Saved(data["model_type"], n_params, n_bytes)


def check_params(cfg: ModelConfig, params: Params) -> dict[str, Any]:
    """Parameters by path.

    Raises:
      ConfigError: They are not those of the model.
    """
    flat, wanted = by_path(params), flat_shapes(cfg)
    for path in sorted(wanted.keys() | flat.keys()):
        there = flat[path].shape if path in flat else "absent"
        want = wanted.get(path, "absent")
        if there != want:
            raise ConfigError(
                f"{path} of the parameters is {there}, but {want} of the config's model",
                fix="adapters of jaxgpt.train.lora are merged first",
            )
    return flat


def check_vocabulary(cfg: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError where a tokenizer has ids that the model does not."""
    if tokenizer is not None and tokenizer.vocab_size > (cfg.vocab_size or 0):
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {cfg.vocab_size}"
        )


def written(
    pieces: list[Piece],
    flat: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    check: Callable[[], None],
) -> Iterator[Named]:
    """Each tensor, made when it is asked for, in the order of the pieces."""
    for piece in pieces:
        check()
        arrays = piece.write({path: on_host(flat[path], shapes[path]) for path in piece.params})
        for name in piece.tensors:
            yield name, arrays.pop(name)


def on_host(leaf: Any, shape: Shape) -> np.ndarray:
    """A parameter without padding: a view where it is on the host, else a copy."""
    if isinstance(leaf, jax.Array):
        here = [device.platform for device in leaf.devices()] == ["cpu"]
        # JAX would keep a host copy of the leaf itself as long as the leaf lives.
        leaf = np.asarray(leaf if here else jnp.copy(leaf))
    return leaf[tuple(map(slice, shape))]


def verify(
    folder: Path,
    cfg: ModelConfig,
    flat: Mapping[str, Any],
    dtype: np.dtype,
    check: Callable[[], None],
) -> None:
    """Read a folder back and compare it with what it was written from.

    Raises:
      CheckpointError: Another model, or another number anywhere.
    """
    opened, shapes = open_folder(folder, dtype), true_shapes(cfg)
    changed = differences(resolved(cfg), resolved(opened.config))
    changed += [] if opened.readers.keys() == shapes.keys() else ["other parameters"]
    bits = {4: np.uint32, 2: np.uint16}[dtype.itemsize]
    for path, shape in shapes.items():
        if changed:
            break
        check()
        got = opened.readers[path](None)[tuple(map(slice, shape))]
        want = on_host(flat[path], shape).astype(dtype, copy=False)
        if not np.array_equal(got.view(bits), want.view(bits)):
            changed.append(path)
    if changed:
        what = f"what was written reads back otherwise: {changed[0]}"
        raise CheckpointError(what, where=str(folder), fix="check the disk, and export again")
