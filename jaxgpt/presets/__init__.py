# SPDX-License-Identifier: Apache-2.0
"""Configurations by name: `MODELS` are architectures, `RUNS` are whole recipes."""

from jaxgpt.presets.models import MODELS
from jaxgpt.presets.runs import RUNS

__all__ = ["MODELS", "RUNS"]
