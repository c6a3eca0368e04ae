# SPDX-License-Identifier: Apache-2.0
"""What a layer keeps for the backward pass, for each token: numbers of two kinds.

The counts are those of the arrays that XLA keeps of the boxes' code, found once by reading the live
buffers of compiled steps, an array at a time; `docs/planning.md` has them as a table. Boxes of
other classes than ours count with the outputs of their kernels alone.
"""

import dataclasses

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import FFNBox
from jaxgpt.boxes.block import Parallel, Sandwich
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.norm import NoNorm
from jaxgpt.kernels.chunked import block_length
from jaxgpt.layers import Layer
from jaxgpt.study.planning.setting import Setting

HIDDEN = {"relu": 2, "relu_squared": 2, "silu": 3, "gelu_sigmoid": 3, "gelu_tanh": 3, "gelu": 3}
"""Arrays of the hidden width that two matrices with this activation between them keep."""
GATED = {"relu": 3, "relu_squared": 4, "silu": 5, "gelu_sigmoid": 5, "gelu_tanh": 5, "gelu": 5}
"""The same for three matrices, the activation on the gate."""
SCANNED = {"relu": 2, "relu_squared": 3, "silu": 4, "gelu_sigmoid": 4, "gelu_tanh": 2, "gelu": 2}
"""As `HIDDEN` between the passes of a scan, where XLA cannot choose; gated ones keep 2 more."""
SOFTMAX = ("reference", "xla")
"""Kernels that keep the probabilities of all keys."""
MASK = 0.25
"""Of a boolean beside a float32."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """Numbers for each token.

    Attributes:
      narrow: In the dtype of computation.
      wide: In float32, whatever that is.
    """

    narrow: float | int = 0.0
    wide: float | int = 0.0

    def bytes(self, number: float) -> float:
        """With `number` bytes for each narrow one."""
        return number * self.narrow + 4.0 * self.wide

    def __add__(self, other: "Kept") -> "Kept":
        return Kept(self.narrow + other.narrow, self.wide + other.wide)


def block(setting: Setting, layer: Layer, rows: int) -> Kept:
    """All that the backward pass of a layer reads, on one device."""
    return residual(setting, layer) + attention(setting, layer, rows) + ffn(setting, layer.ffn)


def residual(setting: Setting, layer: Layer) -> Kept:
    """The residual stream and the norms, whole on each device along `tensor`.

    A norm keeps what it normalised, in float32, and what it gave; the stream is kept behind each
    sub-block. Dropout keeps a mask and what it gave behind each of them.
    """
    D = setting.model.d_model
    norms = 0 if isinstance(layer.norm, NoNorm) else 4 if isinstance(layer.block, Sandwich) else 2
    outputs, normalised, sums = norms, norms, 2
    if isinstance(layer.block, Parallel):  # both norms normalise the same
        outputs, normalised, sums = norms // (1 + layer.block.one_norm), norms // 2, 1
    dropped = 4 if setting.model.dropout else 0
    return Kept(D * (outputs + sums + dropped), D * normalised)


def attention(setting: Setting, layer: Layer, rows: int) -> Kept:
    """Queries, keys, values, the mean of values, and what the kernel keeps."""
    box, dims, parts = layer.attention, setting.model.dims(layer), setting.sizes["tensor"]
    if isinstance(box, GQA):
        H, N, K = box.width(dims), box.n_heads / parts, max(box.kv_heads / parts, 1.0)
        normed = 3 * N * H + 2 * K * H if box.qk_norm is not None else 0.0
        kept = Kept(2 * N * H + 2 * K * H * setting.sizes["context"] + normed)
        heads, keys, values = N, K * H, K * H
    elif isinstance(box, MLA):
        N, W = box.n_heads / parts, box.nope_dim + box.rope_dim
        latents = 2 * box.kv_rank + box.rope_dim + 2 * (box.q_rank or 0)
        whole = Kept(latents, box.kv_rank + (box.q_rank or 0))
        kept = Kept(2 * N * W + 2 * N * box.v_dim) + whole
        heads, keys, values = N, N * W, N * box.v_dim
    else:
        return Kept(4.0 * setting.model.d_model)
    kernel = setting.kernel(layer, rows)
    if kernel in SOFTMAX:
        return kept + _scores(setting, heads, capped=getattr(box, "softcap", None) is not None)
    if kernel == "chunked":  # its keys and values are wide
        return kept + Kept(0.0, keys + values)
    return kept + Kept(0.0, heads)  # the logarithm of each query's denominator


def _scores(setting: Setting, heads: float, *, capped: bool) -> Kept:
    """Probabilities: in float32 for the softmax, as they are multiplied for the product.

    In float32 the two are one array, unless something stands between them that keeps its own
    inputs: a scan or the map over devices.
    """
    scores, mesh, scan = heads * setting.model.context_length, setting.devices > 1, setting.unit
    copies = 1.0 + mesh if scan is None or setting.remat != "none" else 2.0 + 3 * mesh
    cast = 0.0 if setting.train.dtype == "float32" else 1.0
    dropped = 3.0 if setting.model.dropout else 0.0
    return Kept(scores * (cast + dropped), scores * (copies + capped))


def ffn(setting: Setting, box: FFNBox) -> Kept:
    """Hidden units: inputs and output of the activation, and what its derivative needs."""
    dims, parts = setting.model.dims(), setting.sizes["tensor"]
    if isinstance(box, MoE):
        return _experts(setting, box)
    if not isinstance(box, GatedMLP | MLP):
        return Kept(2 * 4 * setting.model.d_model / parts)
    gated = isinstance(box, GatedMLP)
    arrays = (GATED if gated else HIDDEN)[box.activation]
    if setting.unit is not None and setting.remat == "none":  # their input is kept twice
        twice = gated * setting.model.d_model
        return Kept((SCANNED[box.activation] + 2 * gated) * box.width(dims) / parts + twice)
    return Kept(arrays * box.width(dims) / parts)


def _experts(setting: Setting, box: MoE) -> Kept:
    """The rows of chosen experts, all of which one device along `expert` may have to take."""
    D = setting.model.d_model
    rows = box.top_k * (box.capacity_factor or setting.sizes["expert"])
    one = ffn(setting, box.expert)
    kept = Kept(rows * (one.narrow + 4 * D), 3.0 * box.n_experts)
    return kept if box.shared is None else kept + ffn(setting, box.shared)


def products(setting: Setting, layer: Layer) -> Kept:
    """What remat=dots keeps of a layer: outputs of kernels that the backward pass reads."""
    parts, D = setting.sizes["tensor"], setting.model.d_model
    box, dims = layer.attention, setting.model.dims(layer)
    if isinstance(box, GQA):
        qkv = box.n_heads + 2 * max(box.kv_heads, parts)
        heads = qkv * box.width(dims) / parts
    elif isinstance(box, MLA):
        heads = box.n_heads * (box.nope_dim + box.rope_dim) / parts + box.kv_rank + box.rope_dim
        heads += box.q_rank or 0
    else:
        heads = 4.0 * D
    if isinstance(layer.ffn, MoE):
        hidden = _experts(setting, layer.ffn).narrow
    elif isinstance(layer.ffn, GatedMLP | MLP):
        hidden = layer.ffn.width(dims) * (2 if isinstance(layer.ffn, GatedMLP) else 1) / parts
    else:
        hidden = 4 * D / parts
    return Kept(2 * D + heads + hidden)


def passing(setting: Setting, layer: Layer, rows: int, *, forward: bool) -> float:
    """Bytes of what comes and goes while a layer is computed, at most, of all its tokens.

    Forward, scores before the softmax and the gates. Backward, the gradient of a gate, or those of
    the scores, for which the hidden units have gone; others take the place of what they are the
    gradients of.
    """
    tokens, heads = rows * setting.tokens, getattr(layer.attention, "n_heads", 0)
    keys, stream = setting.model.context_length, setting.number * setting.model.d_model
    kernel, heads = setting.kernel(layer, rows), heads / setting.sizes["tensor"]
    scores = 0.0
    if kernel in SOFTMAX:
        scores = 4.0 * heads * keys * tokens * (2 + MASK)
    elif kernel == "chunked":
        length = block_length(max(1, round(rows * heads * keys)), setting.tokens)
        scores = 4.0 * rows * heads * keys * length * (3 + MASK)
    gates = tokens * setting.number * _gates(setting, layer)
    if forward:
        return scores + gates + tokens * stream
    kept = tokens * ffn(setting, layer.ffn).bytes(setting.number)
    return max(gates, scores - kept) + tokens * stream


def _gates(setting: Setting, layer: Layer) -> float:
    """Numbers of a token's gates; 0 without any."""
    box, rows = layer.ffn, 1.0
    if isinstance(box, MoE):
        rows, box = box.top_k * (box.capacity_factor or setting.sizes["expert"]), box.expert
    if not isinstance(box, GatedMLP):
        return 0.0
    return rows * box.width(setting.model.dims()) / setting.sizes["tensor"]
