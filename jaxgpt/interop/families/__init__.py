# SPDX-License-Identifier: Apache-2.0
"""The families of public checkpoints, by the `model_type` of their config.json."""

import difflib
from collections.abc import Mapping
from typing import Any

from jaxgpt.errors import ConfigError
from jaxgpt.interop.families import deepseek, gemma, gpt, llama, moe, neox, opt
from jaxgpt.interop.families.base import Family
from jaxgpt.interop.reading import Config
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
