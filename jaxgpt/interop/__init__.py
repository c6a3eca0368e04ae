# SPDX-License-Identifier: Apache-2.0
"""Public checkpoints: configs and weights of the families we know, in and out, without torch."""

from jaxgpt.interop.families import FAMILIES, read_config, write_config
from jaxgpt.interop.hub import fetch_model
from jaxgpt.interop.load import Loaded
from jaxgpt.interop.peft import save_adapter
from jaxgpt.interop.pretrained import Pretrained, load
from jaxgpt.interop.save import Saved, save

__all__ = [
    "FAMILIES",
    "Loaded",
    "Pretrained",
    "Saved",
    "fetch_model",
    "load",
    "read_config",
    "save",
    "save_adapter",
    "write_config",
]
