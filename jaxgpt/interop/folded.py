# SPDX-License-Identifier: Apache-2.0
"""A muP model as an ordinary one: its factors on logits and scores go into the weights.

No family of public checkpoints knows the factors. Left out: rates and initialisation, which a
trained model no longer has.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import NormBox
from jaxgpt.boxes.head import Tied, Untied
from jaxgpt.boxes.norm import LayerNorm, RMSNorm
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig


def folded(cfg: ModelConfig, flat: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
    """The same logits, to rounding, without `mup_base`.

    Args:
      cfg: The model.
      flat: Its parameters by path; they are not changed.

    Raises:
      ConfigError: There is no weight to take a factor.
    """
    plain, flat = dataclasses.replace(cfg, mup_base=None), dict(flat)
    if plain.dims() == cfg.dims():
        return plain, flat
    ratio = cfg.dims().width_ratio
    if isinstance(cfg.head, Untied):
        flat["head/out/kernel"] = flat["head/out/kernel"] / ratio
    elif isinstance(cfg.head, Tied):
        _times(flat, "final_norm", cfg.final_norm, 1 / ratio)
    else:
        raise ConfigError(f"mup_base: head={type(cfg.head).__name__} cannot take 1/{ratio:g}")
    for i, layer in enumerate(cfg.layers):
        box, q = layer.attention, f"block_{i}/attention/q"
        if not isinstance(box, GQA):
            continue
        factor = box.factor(cfg.dims(layer)) / box.factor(plain.dims(layer))
        if box.qk_norm is not None:
            _times(flat, f"{q}_norm", box.qk_norm, factor)
        else:
            for path in (f"{q}/kernel", f"{q}/bias"):
                if path in flat:
                    flat[path] = flat[path] * factor
    return plain, flat


def _times(flat: dict[str, Any], path: str, norm: NormBox, factor: float) -> None:
    """What a norm gives, times a factor, in place."""
    match norm:
        case RMSNorm(one_plus=True):
            flat[f"{path}/scale"] = (1 + flat[f"{path}/scale"]) * factor - 1
        case RMSNorm() | LayerNorm():
            for each in (f"{path}/scale", f"{path}/bias"):
                if each in flat:
                    flat[each] = flat[each] * factor
        case _:
            what = f"mup_base: {path}={type(norm).__name__} has no scale to take {factor:g}"
            raise ConfigError(what, fix="for export, a LayerNorm or an RMSNorm")
