# SPDX-License-Identifier: Apache-2.0
"""What a family is, and the rows and readers that several families share."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import HeadBox
from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.boxes.head import Tied, Untied
from jaxgpt.boxes.norm import LayerNorm, RMSNorm
from jaxgpt.interop.reading import Config
from jaxgpt.interop.rows import Row
from jaxgpt.layers import LayerEdit
from jaxgpt.model import ModelConfig

INV_FREQ = "rates of the rope, which are computed"
MASK = "a causal mask, no parameter"

ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
}
"""Their words for activations, and ours."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Models of one `model_type`.

    Attributes:
      read: Their config to ours; the caller closes the config.
      rows: Their tensors and our parameters, for all models of the family.
      write: Our config to theirs, without `model_type`; ConfigError where they have no such model.
      architecture: Transformers' class of the model with its head.
      prefix: Of the names inside the model without its head; files of that part alone lack it.
      skips: Patterns of tensors that are no parameters, and what they are.
      extra_layers: A key that counts layers behind the last one, and the beginning of their
        tensors' names, with `{i}`.
    """

    read: Callable[[Config], ModelConfig]
    rows: tuple[Row, ...]
    write: Callable[[ModelConfig], dict[str, Any]]
    architecture: str
    prefix: str = "model."
    skips: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"model.layers.{i}.self_attn.rotary_emb.inv_freq": INV_FREQ}
    )
    extra_layers: tuple[str, str] | None = None


# --- rows -----------------------------------------------------------------------------------------


def linear(tensor: str, param: str, **how: Any) -> tuple[Row, ...]:
    """A matrix that is stored [out, in], and its bias."""
    return (
        Row(f"{tensor}.weight", f"{param}/kernel", transposed=True, **how),
        Row(f"{tensor}.bias", f"{param}/bias", **how),
    )


def norm(tensor: str, param: str) -> tuple[Row, ...]:
    """A norm's scale and bias."""
    return Row(f"{tensor}.weight", f"{param}/scale"), Row(f"{tensor}.bias", f"{param}/bias")


LAYER, BLOCK = "model.layers.{i}", "block_{i}"

ENDS = (
    Row("model.embed_tokens.weight", "embed/embedding"),
    *norm("model.norm", "final_norm"),
    *linear("lm_head", "head/out"),
)
PRE_NORMS = (
    *norm(f"{LAYER}.input_layernorm", f"{BLOCK}/attention_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", f"{BLOCK}/ffn_norm"),
)
QKV = (
    *linear(f"{LAYER}.self_attn.q_proj", f"{BLOCK}/attention/q"),
    *linear(f"{LAYER}.self_attn.k_proj", f"{BLOCK}/attention/k"),
    *linear(f"{LAYER}.self_attn.v_proj", f"{BLOCK}/attention/v"),
)
ATTENTION = (
    *QKV,
    *linear(f"{LAYER}.self_attn.o_proj", f"{BLOCK}/attention/out"),
    *norm(f"{LAYER}.self_attn.q_norm", f"{BLOCK}/attention/q_norm"),
    *norm(f"{LAYER}.self_attn.k_norm", f"{BLOCK}/attention/k_norm"),
)


def gated_mlp(tensor: str, param: str, names: str = "gate_proj up_proj down_proj") -> Iterable[Row]:
    """The matrices of a gated FFN, in the order gate, up, down."""
    for theirs, ours in zip(names.split(), ("gate", "up", "down"), strict=True):
        yield from linear(f"{tensor}.{theirs}", f"{param}/{ours}")


MLP = tuple(gated_mlp(f"{LAYER}.mlp", f"{BLOCK}/ffn"))

DECODER = (*ENDS, *PRE_NORMS, *ATTENTION, *MLP)
"""Llama's table."""


# --- readers --------------------------------------------------------------------------------------


def sizes(c: Config) -> dict[str, Any]:
    """The plain numbers of a model."""
    return {
        "vocab_size": c.count("vocab_size"),
        "context_length": c.count("max_position_embeddings"),
        "d_model": c.count("hidden_size"),
        "n_layers": c.count("num_hidden_layers"),
    }


def rms_norms(c: Config, default: float = 1e-6, **knobs: Any) -> dict[str, Any]:
    """The norm of the blocks, and the same behind the last one."""
    box = RMSNorm(eps=c.number("rms_norm_eps", default=default), **knobs)
    return {"norm": box, "final_norm": box}


def layer_norms(c: Config) -> dict[str, Any]:
    """The norm of the blocks, and the same behind the last one."""
    box = LayerNorm(eps=c.number("layer_norm_eps", default=1e-5))
    return {"norm": box, "final_norm": box}


def attention(c: Config, head_dim: int | None = None, **knobs: Any) -> GQA:
    """The box; `head_dim` is for configs that have none."""
    return GQA(
        n_heads=c.count("num_attention_heads"),
        n_kv_heads=c.count("num_key_value_heads", default=None),
        head_dim=c.count("head_dim", default=head_dim, null=None),
        **knobs,
    )


def gated(c: Config, width: str = "intermediate_size", times: int = 1, **knobs: Any) -> GatedMLP:
    """The box, of the width that a key says, or some times that."""
    return GatedMLP(d_ff=times * c.count(width), activation=activation(c), **knobs)


def activation(c: Config, default: str = "silu") -> Any:
    """Our word for it."""
    return c.choice(ACTIVATIONS, "hidden_act", default=default)


def head(c: Config, *, tied: bool, **knobs: Any) -> HeadBox:
    """The box; `tied` is for configs that do not say."""
    box = Tied if c.flag("tie_word_embeddings", default=tied) else Untied
    return box(**knobs)


def layer_types(c: Config, default: Iterable[bool]) -> list[bool]:
    """For each layer, whether it has the window; `default` is for configs that do not say."""
    n_layers = c.count("num_hidden_layers")
    known = {"sliding_attention": True, "full_attention": False}
    types = c.items("layer_types", default=None)
    if types is None:
        return list(default)
    if len(types) != n_layers or any(t not in list(known) for t in types):
        raise c.error("layer_types", f"is not one of {list(known)} for each of {n_layers} layers")
    return [known[word] for word in types]


def edits_at(layers: Iterable[int], n_layers: int, **change: Any) -> tuple[LayerEdit, ...]:
    """The same change to some layers, in ascending order: one edit where they are evenly spaced."""
    layers = list(layers)
    if not layers:
        return ()
    start, every = layers[0], layers[1] - layers[0] if len(layers) > 1 else 1
    if layers != list(range(start, layers[-1] + 1, every)):
        return tuple(LayerEdit(start=i, stop=i + 1, **change) for i in layers)
    stop = None if layers[-1] + every >= n_layers else layers[-1] + 1
    return (LayerEdit(start=start, every=every, stop=stop, **change),)


def windows(sliding: list[bool], window: int | None) -> tuple[int | None, tuple[LayerEdit, ...]]:
    """The window of the attention box, and the edits that take it away; 0 is as good as None."""
    if not window or not any(sliding):
        return None, ()
    full = [i for i, slides in enumerate(sliding) if not slides]
    return window, edits_at(full, len(sliding), set={"attention.window": None})
