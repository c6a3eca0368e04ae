# SPDX-License-Identifier: Apache-2.0
"""A public model as a whole, by folder or hub id: config, parameters and tokenizer.

Also what a training run begins with: the same parameters for a model with a shorter context, placed
where the run wants them. Left out: how a folder's files become these (`load.py`,
`jaxgpt.data.pretrained`), and how they get here (`hub.py`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxgpt.data.base import Tokenizer
from jaxgpt.data.pretrained import TOKENIZER, load_folder_tokenizer
from jaxgpt.errors import ConfigError
from jaxgpt.interop.families import read_config
from jaxgpt.interop.hub import fetch_model
from jaxgpt.interop.load import load as load_folder
from jaxgpt.interop.reading import read_json
from jaxgpt.interop.rows import Shape, flat_shapes, nested
from jaxgpt.model import ModelConfig
from jaxgpt.shapes import Params
from jaxgpt.train.digest import by_path

POSITIONS = "position/"  # tables with a row for each position


class Pretrained(NamedTuple):
    """A model that somebody has trained.

    Attributes:
      config: Its boxes and sizes.
      params: As `jaxgpt.init_params` makes them.
      tokenizer: With its special tokens and chat template; None where the folder has none.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None


def load(
    path_or_id: str | Path,
    *,
    revision: str | None = None,
    dtype: DTypeLike = jnp.float32,
    sharding: Callable[[str, Shape], Sharding] | None = None,
    timeout_s: float = 10.0,
    say: Callable[[str], None] = lambda line: None,
) -> Pretrained:
    """A model of any family that we know, from a Hugging Face folder or the hub.

    Args:
      path_or_id: A folder, `OWNER/NAME`, `OWNER/NAME@REVISION`, or a short name such as `gpt2`.
      revision: A commit, branch or tag of the hub.
      dtype: Of the parameters, whatever that of the files.
      sharding: From the path and shape of a parameter to where it lives; None: on the default
        device.
      timeout_s: Seconds without progress until the hub is given up.
      say: Called with a line for each long download, and for tensors that are no parameters.

    Raises:
      ConfigError: No such model, or one that is not understood in full.
      CheckpointError: Damaged or unsafe files.
      ResourceError: The hub cannot be reached, stalls, breaks off, or refuses for now.
    """
    folder, _ = fetch_model(path_or_id, revision, timeout_s, say=say)
    read_model(folder)  # its mistakes first
    tokenizer = load_folder_tokenizer(folder) if (folder / TOKENIZER).exists() else None
    found = load_folder(folder, dtype=dtype, sharding=sharding)
    for line in skipped_lines(found.skipped):
        say(line)
    return Pretrained(found.config, found.params, tokenizer)


def read_model(folder: Path) -> ModelConfig:
    """The model that a folder's config.json describes; no weights are read.

    Raises:
      ConfigError: It is not understood in full.
      CheckpointError: It is not there, or is no JSON.
    """
    file = folder / "config.json"
    return read_config(read_json(file), str(file))


def initial_params(
    folder: Path,
    cfg: ModelConfig,
    abstract: Params,
    *,
    say: Callable[[str], None] = lambda line: None,
) -> Params:
    """A folder's parameters as those of a run, for `jaxgpt.train.loop.fit`.

    Args:
      folder: Of the model.
      cfg: The run's model, as `check_fits` lets it pass.
      abstract: Its parameters' shapes and shardings.
      say: Called with a line for tensors that are no parameters.

    Returns:
      In float32, a learned position's table cut to the run's context.

    Raises:
      ConfigError, CheckpointError: As `load`, and as `check_fits`.
    """
    check_fits(cfg, folder)
    wanted = by_path(abstract)
    anywhere = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def where(path: str, shape: Shape) -> Sharding:
        return wanted[path].sharding if wanted[path].shape == shape else anywhere

    found = load_folder(folder, sharding=where)
    for line in skipped_lines(found.skipped):
        say(line)
    flat = by_path(found.params)
    for path, leaf in wanted.items():
        if flat[path].shape != leaf.shape:
            flat[path] = jax.device_put(flat[path][: leaf.shape[0]], leaf.sharding)
    return nested(flat)


def check_fits(cfg: ModelConfig, folder: Path) -> None:
    """See that a folder's parameters are those of a model, but for a shorter context.

    Raises:
      ConfigError: Another shape, or a longer context.
    """
    theirs = read_model(folder)
    if cfg.context_length > theirs.context_length:
        raise ConfigError(
            f"context_length={cfg.context_length} exceeds the {theirs.context_length} tokens that "
            "the model was trained with",
            where=str(folder),
            fix=f"--model.context_length={theirs.context_length}",
        )
    ours, there = flat_shapes(cfg), flat_shapes(theirs)
    changed = [
        f"{path} is {_shown(ours.get(path))}, there {_shown(there.get(path))}"
        for path in sorted(ours.keys() | there.keys())
        if ours.get(path) != there.get(path)
        and not (path.startswith(POSITIONS) and path in ours and path in there)
    ]
    if changed:
        more = f" and {len(changed) - 2} more" if len(changed) > 2 else ""
        raise ConfigError(
            "the weights do not fit the model: " + ", ".join(changed[:2]) + more,
            where=str(folder),
            fix="leave out the --model options that change a shape",
        )


def skipped_lines(skipped: dict[str, str]) -> list[str]:
    """A line for each kind of tensor that is no parameter."""
    kinds: dict[str, list[str]] = {}
    for name, why in skipped.items():
        kinds.setdefault(why, []).append(name)
    return [
        f"skipped {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {why}"
        for why, names in kinds.items()
    ]


def _shown(shape: Shape | None) -> str:
    return "absent" if shape is None else str(list(shape))
