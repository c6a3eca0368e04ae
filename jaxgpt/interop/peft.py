# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters as a folder that PEFT loads on top of the model that they were trained for.

PEFT adds `B A * lora_alpha / r` to a module's matrix. Where a family holds q, k and v in one
matrix, their adapters become one of the rank of all together, whose B is zero outside of the blocks
of each: the same products, in the same order. Left out: reading.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jaxgpt.errors import CheckpointError, ConfigError
from jaxgpt.interop.families import FAMILIES, write_config
from jaxgpt.interop.newfolder import check_place, new_folder
from jaxgpt.interop.rows import Piece, Shape, plan, true_shapes
from jaxgpt.interop.save import Saved, on_host
from jaxgpt.interop.tokenfiles import as_text
from jaxgpt.interop.written import write_tensors
from jaxgpt.model import ModelConfig
from jaxgpt.shapes import Params
from jaxgpt.train.config import LoraConfig
from jaxgpt.train.digest import by_path
from jaxgpt.train.lora import NAME

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
FLOAT32 = np.dtype(np.float32)


def save_adapter(
    folder: str | Path,
    config: ModelConfig,
    params: Params,
    lora: LoraConfig,
    *,
    base: str | None = None,
    revision: str | None = None,
    family: str | None = None,
    force: bool = False,
) -> Saved:
    """Write adapters, in float32, without the model.

    Args:
      folder: The place. It gets all files at once, or none.
      config: The model.
      params: With adapters, as `jaxgpt.train.lora.init_lora` makes them.
      lora: Their rank and alpha.
      base: Folder or hub id of the model that they belong to.
      revision: Its commit.
      family: A `model_type`; None: the first one that has such a model.
      force: Replace an earlier export.

    Raises:
      ConfigError: There are no adapters, no family has such a model, an adapter belongs to no
        module that PEFT can adapt, or something is in the folder already.
      DivergedError: An adapter is not finite.
      ResourceError: It cannot be written.
      CheckpointError: What was written reads back otherwise.
    """
    if lora.rank is None:
        raise ConfigError("there are no adapters", fix="export the model itself")
    if config.mup_base is not None:
        raise ConfigError("adapters of a model with mup_base fit no other", fix="export the model")
    check_place(Path(folder).expanduser(), force=force)
    name, shapes = write_config(config, family)["model_type"], true_shapes(config)
    pieces = plan(FAMILIES[name].rows, config, shapes)
    modules = _modules(pieces, by_path(params[NAME]), shapes)
    tensors = {
        f"{PREFIX}{module}.lora_{letter}.weight": array
        for module, (_, *pair) in modules.items()
        for letter, array in zip("AB", pair, strict=True)
    }
    everywhere = [name.removesuffix(".weight") for piece in pieces for name in piece.tensors]
    settings = _settings(modules, everywhere, lora)
    settings |= {"base_model_name_or_path": base, "revision": revision}
    all_shapes = {name: array.shape for name, array in tensors.items()}
    n_params = sum(array.size for array in tensors.values())
    n_bytes = n_params * FLOAT32.itemsize
    with new_folder(folder, n_bytes, force=force) as filling:
        write_tensors(
            filling, all_shapes, FLOAT32, tensors.items(), max_file_bytes=n_bytes, single=WEIGHTS
        )
        (filling / CONFIG).write_text(as_text(settings), encoding="utf-8")
        found = load_file(filling / WEIGHTS)
        if found.keys() != tensors.keys() or any(
            not np.array_equal(found[name], tensors[name]) for name in found
        ):
            raise CheckpointError("what was written reads back otherwise", where=str(filling))
    return Saved(name, n_params, n_bytes)


Module = tuple[Piece, np.ndarray, np.ndarray]
"""Where its matrix comes from, A [r, in] and B [out, r]."""


def _modules(
    pieces: list[Piece], adapters: Mapping[str, Any], shapes: Mapping[str, Shape]
) -> dict[str, Module]:
    """What PEFT has for each adapted module."""
    adapted = {f"{path.rpartition('/')[0]}/kernel" for path in adapters}
    modules = {}
    for piece in pieces:
        paths = [path for path in piece.params if path in adapted]
        if not paths:
            continue
        name, pairs = _module_name(piece, shapes), {}
        for path in paths:
            a, b = (adapters[f"{path.removesuffix('kernel')}{letter}"] for letter in "ab")
            pairs[path] = on_host(a, a.shape), on_host(b, (b.shape[0], shapes[path][-1]))
        stacked = np.concatenate([a.T for a, _ in pairs.values()])
        blocks, row = {}, 0
        for path in piece.params:
            blocks[path] = np.zeros((len(stacked), shapes[path][-1]), np.float32)
            if path in pairs:
                b = pairs[path][1]
                blocks[path][row : row + len(b)] = b
                row += len(b)
        dealt = Piece(piece.params, ("B",), False, True, piece.run).write(blocks)
        modules[name] = piece, stacked, dealt["B"]
    return modules


def _module_name(piece: Piece, shapes: Mapping[str, Shape]) -> str:
    """Of the module that holds the matrix of a piece; ConfigError where PEFT cannot adapt it."""
    path, name = piece.params[0], piece.tensors[0].removesuffix(".weight")
    # In a model with experts, which transformers has in one matrix and in no module, PEFT takes the
    # names of every FFN for theirs. The module of embed_out has another name in memory.
    mixed = "/ffn/" in path and any("/experts/" in other for other in shapes)
    if mixed or name == "embed_out":
        raise ConfigError(
            f"PEFT has no adapter for {path}, which is {piece.tensors[0]} there",
            fix="export the merged model, or train with --lora.targets='attention/*'",
        )
    return name


def _settings(
    modules: Mapping[str, Module], everywhere: list[str], lora: LoraConfig
) -> dict[str, Any]:
    """An adapter_config.json. What stands in all layers is named once, without their number."""
    ranks: dict[str, int] = {}
    for name, (_, a, _) in modules.items():
        short = re.sub(r".*?\.\d+\.", "", name, count=1)
        alike = [other for other in everywhere if f".{other}".endswith(f".{short}")]
        same = all(other in modules and len(modules[other][1]) == len(a) for other in alike)
        ranks[short if same else name] = len(a)
    assert lora.rank is not None
    wider = {name: rank for name, rank in ranks.items() if rank != lora.rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": _number(lora.alpha),
        "lora_dropout": 0.0,
        "target_modules": sorted(ranks),
        "rank_pattern": wider,
        "alpha_pattern": {n: _number(lora.alpha * r / lora.rank) for n, r in wider.items()},
        "fan_in_fan_out": any(not piece.transposed for piece, _, _ in modules.values()),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _number(value: float) -> int | float:
    """As PEFT writes it: whole where it is."""
    return int(value) if value == int(value) else value
