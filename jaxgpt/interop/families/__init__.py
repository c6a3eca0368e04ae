# SPDX-License-Identifier: Apache-2.0
"""The families of public checkpoints, by the `model_type` of their config.json."""

import difflib
import math
from collections.abc import Mapping
from typing import Any

from jaxgpt.errors import ConfigError
from jaxgpt.interop.families import deepseek, gemma, gpt, llama, moe, neox, opt
from jaxgpt.interop.families.base import Family
from jaxgpt.interop.reading import Config
from jaxgpt.interop.same import differences, distance, resolved
from jaxgpt.model import ModelConfig

FAMILIES: dict[str, Family] = {
    **gpt.FAMILIES,
    **llama.FAMILIES,
    **moe.FAMILIES,
    **deepseek.FAMILIES,
    **gemma.FAMILIES,
    **neox.FAMILIES,
    **opt.FAMILIES,
}
"""Every family by its `model_type`."""


def family_of(data: Mapping[str, Any], where: str) -> Family:
    """The family that a config.json names.

    Args:
      data: The parsed config.
      where: The file, for messages.

    Raises:
      ConfigError: It names none, or one that is not here.
    """
    name = data.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        near = difflib.get_close_matches(str(name), FAMILIES, n=3) or list(FAMILIES)
        raise ConfigError(f"model_type={name!r} is not known", where=where, fix=f"one of {near}")
    return FAMILIES[name]


def read_config(data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """The model that a config.json describes, in either dialect.

    Raises:
      ConfigError: An unknown family, or a key or value that is not understood.
    """
    config = Config(data, where)
    family = family_of(data, where)
    try:
        cfg = family.read(config)
    except ConfigError as error:  # of a box, which does not know the file
        raise ConfigError(error.what, where=error.where or where, fix=error.fix) from None
    config.close()
    return cfg


def write_config(cfg: ModelConfig, family: str | None = None) -> dict[str, Any]:
    """The config.json of a model, in both dialects as far as they can stand side by side.

    A family can say what a model is if reading what it writes gives the same model
    (`jaxgpt.interop.same`). Dropout and initialisation are not written, nor is `mup_base`, whose
    factors are folded into the weights (`jaxgpt.interop.folded`).

    Args:
      cfg: The model, its vocabulary known.
      family: Its `model_type`; None: the first family that can say it.

    Raises:
      ConfigError: No such family, or none that can; then it names what differs in the nearest one.
    """
    if family is not None and family not in FAMILIES:
        raise ConfigError(f"no family {family!r}", fix=f"one of {', '.join(FAMILIES)}")
    if cfg.vocab_size is None:
        raise ConfigError("vocab_size is None", fix="that of the tokenizer")
    ours, found = resolved(cfg), []
    for name in FAMILIES if family is None else [family]:
        try:
            data = {"model_type": name, "architectures": [FAMILIES[name].architecture]}
            data |= FAMILIES[name].write(cfg)
            theirs = resolved(read_config(data, name))
        except ConfigError as error:  # not even the box that it needs
            found.append((math.inf, name, [error.what]))
            continue
        if ours == theirs:
            return data
        found.append((distance(ours, theirs), name, differences(ours, theirs)))
    _, name, reasons = min(found, key=lambda each: each[0])
    text = ", ".join(reasons[:4]) + (f" and {len(reasons) - 4} more" if len(reasons) > 4 else "")
    if family is None:
        name = f"no family of public checkpoints has this model; the nearest is {name}, but"
    else:
        name = f"{family} has no such model:"
    raise ConfigError(f"{name} {text}", fix="for export, train with the boxes of a family")
