# SPDX-License-Identifier: Apache-2.0
"""What the writers of config.json share, the reverse of the readers in `base.py`.

A writer says what a model is in the words of its family, in both dialects where they can stand
side by side. It need not see whether that is all of the model: `write_config` reads it back.
"""

from typing import Any, TypeVar

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import Box
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Tied
from jaxgpt.boxes.norm import LayerNorm, RMSNorm
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig

T = TypeVar("T", bound=Box)

WORDS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "gelu_sigmoid": "quick_gelu",
    "relu": "relu",
    "relu_squared": "relu2",
    "silu": "silu",
}
"""Our words for activations, and theirs."""

GPT_WORDS = WORDS | {"gelu_tanh": "gelu_new"}
"""The same, as older families have them."""


def boxes(cfg: ModelConfig, name: str) -> list[Any]:
    """The box of that name in each layer."""
    return [getattr(layer, name) for layer in cfg.layers]


def box_of(cfg: ModelConfig, name: str, cls: type[T]) -> T:
    """The first layer's box of a class; its default where no layer has one.

    With the default another model is written, which `write_config` finds out.
    """
    return next((box for box in boxes(cfg, name) if isinstance(box, cls)), cls())


def write_sizes(cfg: ModelConfig) -> dict[str, Any]:
    """The plain numbers of a model."""
    return {
        "vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.context_length,
        "hidden_size": cfg.d_model,
        "num_hidden_layers": cfg.n_layers,
    }


def write_rms_norms(cfg: ModelConfig) -> dict[str, Any]:
    """The epsilon of all norms."""
    return {"rms_norm_eps": float(box_of(cfg, "norm", RMSNorm).eps)}


def write_layer_norms(cfg: ModelConfig, key: str = "layer_norm_eps") -> dict[str, Any]:
    """The epsilon of all norms."""
    return {key: float(box_of(cfg, "norm", LayerNorm).eps)}


def write_heads(cfg: ModelConfig, *, width: bool = False) -> dict[str, Any]:
    """Numbers of heads, and their width; with `width` also where it follows from the others."""
    box = box_of(cfg, "attention", GQA)
    keys = {"num_attention_heads": box.n_heads, "num_key_value_heads": box.kv_heads}
    if width or box.head_dim is not None:
        keys["head_dim"] = box.width(cfg.dims())
    return keys


def write_attention_bias(cfg: ModelConfig) -> dict[str, Any]:
    """Whether q, k, v and the output have biases."""
    return {"attention_bias": box_of(cfg, "attention", GQA).use_bias}


def write_ffn(
    cfg: ModelConfig, box: MLP | GatedMLP, width: str = "intermediate_size"
) -> dict[str, Any]:
    """Hidden width and activation of an FFN."""
    return {width: box.width(cfg.dims()), "hidden_act": WORDS[box.activation]}


def write_gated(cfg: ModelConfig, width: str = "intermediate_size") -> dict[str, Any]:
    """The same for the gated FFN of the layers."""
    return write_ffn(cfg, box_of(cfg, "ffn", GatedMLP), width)


def write_head(cfg: ModelConfig) -> dict[str, Any]:
    """Whether the head is the embedding."""
    return {"tie_word_embeddings": isinstance(cfg.head, Tied)}


def write_window(cfg: ModelConfig) -> dict[str, Any]:
    """The window, of all layers or none."""
    return {"sliding_window": _window(cfg)}


def write_layer_types(cfg: ModelConfig) -> dict[str, Any]:
    """Which layers have the window, and its size: a number even if none has it."""
    words = {True: "full_attention", False: "sliding_attention"}
    full = [getattr(box, "window", None) is None for box in boxes(cfg, "attention")]
    return {"sliding_window": _window(cfg) or 4096, "layer_types": [words[each] for each in full]}


def write_switched_window(cfg: ModelConfig) -> dict[str, Any]:
    """The same with Qwen's switch; older versions know only of a first layer with a window."""
    keys = write_layer_types(cfg)
    sliding = [word == "sliding_attention" for word in keys["layer_types"]]
    first = sliding.index(True) if any(sliding) else cfg.n_layers
    keys |= {"use_sliding_window": any(sliding), "max_window_layers": first}
    return keys | write_window(cfg)


def _window(cfg: ModelConfig) -> int | None:
    windows = (getattr(box, "window", None) for box in boxes(cfg, "attention"))
    return next((window for window in windows if window is not None), None)


def require_divisible(cfg: ModelConfig) -> None:
    """Raise ConfigError where transformers refuses heads of a width of their own."""
    n_heads = getattr(cfg.layers[0].attention, "n_heads", 1)
    if cfg.d_model % n_heads:
        raise ConfigError(f"d_model={cfg.d_model} is not divisible by n_heads={n_heads}")
