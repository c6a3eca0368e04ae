# SPDX-License-Identifier: Apache-2.0
"""Public checkpoints: configs and weights of the families we know, without torch."""

from jaxgpt.interop.families import FAMILIES, read_config
from jaxgpt.interop.hub import fetch_model
from jaxgpt.interop.load import Loaded
from jaxgpt.interop.pretrained import Pretrained, load

__all__ = ["FAMILIES", "Loaded", "Pretrained", "fetch_model", "load", "read_config"]
