# SPDX-License-Identifier: Apache-2.0
"""When two configs are one model: the same logits from the same parameters, however it is said.

A width that is the default and one that is written out are the same, and so are edits that end in
the same layers. What only training reads does not count: dropout, initialisation, coefficients of
losses, the step of the balance bias, expert capacity. Nor does the padding of the vocabulary.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import Box, Dims, PositionBox
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.moe import MoE
from jaxgpt.layers import Layer
from jaxgpt.model import ModelConfig


def resolved(cfg: ModelConfig) -> dict[str, Any]:
    """A model by part: numbers and boxes, with everything said that defaults leave open."""
    parts: dict[str, Any] = {
        name: getattr(cfg, name) for name in ("vocab_size", "context_length", "d_model", "n_layers")
    }
    dims = cfg.dims()
    parts["embed"] = plain(cfg.embed, dims)
    # A vector that is added to the embedding; rotations and biases are those of each layer.
    added = cfg.position if type(cfg.position).build is not PositionBox.build else None
    parts["position"] = added or cfg.layers[0].position
    for i, layer in enumerate(cfg.layers):
        for field in dataclasses.fields(Layer):
            box = (added if field.name == "position" else None) or getattr(layer, field.name)
            parts[f"layer {i}: {field.name}"] = plain(box, cfg.dims(layer))
    return parts | {"final_norm": cfg.final_norm, "head": cfg.head}


def plain(box: Any, dims: Dims) -> Any:
    """A box with its defaults written out, and without what only training reads."""
    match box:
        case GQA():
            return dataclasses.replace(
                box,
                n_kv_heads=box.kv_heads,
                head_dim=box.width(dims),
                use_out_bias=box.use_bias if box.use_out_bias is None else box.use_out_bias,
                scale=box.scale or box.width(dims) ** -0.5,
                qk_norm_of="head" if box.qk_norm is None else box.qk_norm_of,
            )
        case MLA():
            scale = box.scale or (box.nope_dim + box.rope_dim) ** -0.5
            return dataclasses.replace(box, scale=scale)
        case MLP() | GatedMLP():
            return dataclasses.replace(box, d_ff=box.width(dims))
        case MoE():
            groups = {} if box.n_groups > 1 else {"top_groups": 1, "group_score": "max"}
            return dataclasses.replace(
                box,
                expert=plain(box.expert, dims),
                shared=plain(box.shared, dims),
                balance_coef=0.0,
                z_coef=0.0,
                balance_rate=None if box.balance_rate is None else 1.0,
                capacity_factor=None,
                **groups,
            )
        case Embed(width=dims.d_model):
            return dataclasses.replace(box, width=None)
    return box


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What differs between two models as `resolved` gives them, with the values of both.

    A difference that layers share is named once, with the first of them unless it is in all.
    """
    found: dict[str, list[str]] = {}
    for part in ours | theirs:
        where, _, name = part.rpartition(": ")
        for key, text in _differences(name, ours.get(part), theirs.get(part)):
            found.setdefault(f"{key} {text}", []).append(where)
    n_layers = ours["n_layers"]
    return [
        text
        + (f" in {where[0]}" if where[0] and len(where) < n_layers else "")
        + (f" and {len(where) - 1} more" if 1 < len(where) < n_layers else "")
        for text, where in found.items()
    ]


def distance(ours: dict[str, Any], theirs: dict[str, Any]) -> int:
    """In how many knobs two models differ, all those of a box where it is of another class."""
    total = 0
    for part in ours | theirs:
        a: Any = ours.get(part)
        b: Any = theirs.get(part)
        if isinstance(a, Box) and type(a) is not type(b):
            total += 1 + len(dataclasses.fields(a))  # type: ignore[arg-type]
        else:
            total += len(list(_differences("", a, b)))
    return total


def _differences(key: str, ours: Any, theirs: Any) -> Iterator[tuple[str, str]]:
    if ours == theirs:
        return
    if type(ours) is type(theirs) and dataclasses.is_dataclass(ours):
        for field in dataclasses.fields(ours):
            name = f"{key}.{field.name}"
            yield from _differences(name, getattr(ours, field.name), getattr(theirs, field.name))
    elif isinstance(ours, Box) and isinstance(theirs, Box) and type(ours) is not type(theirs):
        yield key, f"is {type(ours).__name__}, there {type(theirs).__name__}"
    else:
        yield key, f"is {ours}, there {theirs}"
