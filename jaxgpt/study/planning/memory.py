# SPDX-License-Identifier: Apache-2.0
"""Memory of a training step on one device, by kind, at the worst moment of the step.

Four moments can be the worst: the last layer of the forward pass; the loss, when all layers have
kept what the backward pass reads and the logits are there; the first layer of the backward pass,
where it is computed again; and the update, when gradients, steps and new moments are all there,
since a step that is not finite must change nothing. `docs/planning.md` has the formulas.
"""

import dataclasses
from collections import Counter, defaultdict

from jaxgpt.costs import BYTES, kv_bytes_per_token
from jaxgpt.flops import has_own_head
from jaxgpt.study.planning.activations import Kept, block, passing, products
from jaxgpt.study.planning.setting import Setting
from jaxgpt.study.planning.state import FLOAT, Param, State

BATCH = 12
"""Bytes of a token: the id, the next one, and its weight; positions and segments take 8 more."""
KINDS = (
    *("parameters", "moments", "average", "batch", "copies", "gradients", "update"),
    *("activations", "logits"),
)
"""In the order of tables. `copies`: parameters that are gathered, stacked for a scan, or kept apart
from the new ones; `update`: steps and new moments."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      moment: Of the step: `forward`, `loss`, `backward` or `update`; `decode` for decoding.
      kinds: By kind.
    """

    moment: str
    kinds: dict[str, float]

    @property
    def bytes(self) -> float:
        """All together."""
        return sum(self.kinds.values())


def step_memory(setting: Setting, state: State, rows: int | None = None) -> Memory:
    """What a training step takes on one device: the worst of its moments.

    Args:
      setting: The run.
      state: From `state_of`.
      rows: Of a micro-batch on a device; None: as the batch splits.
    """
    return max(moments(setting, state, rows), key=lambda memory: memory.bytes)


def moments(setting: Setting, state: State, rows: int | None = None) -> list[Memory]:
    """The moments of a step that can be the worst."""
    rows = setting.rows if rows is None else rows
    train, tokens = setting.train, rows * setting.tokens
    fixed = {
        "parameters": state.parameters,
        "moments": state.moments,
        "average": state.average,
        "batch": (BATCH + 8 * setting.packed) * tokens * train.accumulate,
    }
    always, one, part, ends = _copies(setting, state)
    stacked = _stacked(setting, state)
    always += stacked
    summed = state.trained if train.accumulate > 1 else 0.0
    head = sum(p.whole * p.times for p in state.params if p.trained and _of_head(p, setting))
    kept, at_ends, forward, backward = _activations(setting, rows)
    by_moment = {
        "forward": {
            "copies": always + one + ends,
            "gradients": summed + stacked,
            "activations": kept + at_ends + forward,
        },
        "loss": {
            "copies": always + ends,
            "gradients": summed + head,
            "activations": kept + at_ends,
            "logits": _logits(setting, tokens),
        },
        "backward": {
            "copies": always + part,
            "gradients": summed + head + stacked,
            "activations": kept + backward,
        },
        "update": {"gradients": state.trained, "update": state.trained + state.moments},
    }
    return [
        Memory(name, {kind: float(n) for kind, n in {**fixed, **kinds}.items()})
        for name, kinds in by_moment.items()
    ]


def decode_memory(
    setting: Setting, state: State, batch: int, context: int, weights: str | None = None
) -> Memory:
    """What decoding takes: weights, and the caches of `batch` rows of `context` tokens.

    The weights are split over `tensor` and `expert` as in training, rows over the other axes.

    Args:
      setting: The model, the dtype of computation and caches, the mesh.
      state: From `state_of`.
      batch: Rows, of all devices together.
      context: Tokens of a row.
      weights: In which the weights are kept; None: the dtype.
    """
    number = BYTES[weights or setting.train.dtype]
    held = sum(p.whole / FLOAT * p.times for p in state.params)
    parts = setting.sizes["tensor"]
    rows = -(-batch * parts // setting.devices)
    cache = rows * context * kv_bytes_per_token(setting.model, setting.train.dtype) / parts
    logits = rows * setting.model.dims().padded_vocab_size / parts * (setting.number + 4)
    return Memory("decode", {"weights": number * held, "cache": cache, "logits": logits})


def _copies(setting: Setting, state: State) -> tuple[float, float, float, float]:
    """Parameters beside the stored ones: of all layers, of one, of a part of one, and of the ends.

    What a mesh splits is gathered: all of it before the first layer, and kept for the backward
    pass; with recomputation, that of one layer forward, and of one attention or FFN backward. What
    is whole is copied, as the new parameters are written over the old.
    """
    always, ends = 0.0, 0.0
    layers: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for p in state.params:
        if p.in_block and p.split and setting.remat != "none":
            block, box, *_ = p.path.split("/")
            layers[block][box] += p.used
        elif p.split and not p.in_block:
            ends += p.used
        else:
            always += (p.used if p.split else p.stored) * p.times
    one = max((sum(boxes.values()) for boxes in layers.values()), default=0.0)
    part = max((max(boxes.values()) for boxes in layers.values()), default=0.0)
    return always, one, part, ends


def _stacked(setting: Setting, state: State) -> float:
    """The parameters of scanned layers, stored as they are."""
    n_layers = len(setting.model.layers[setting.scanned])
    share = n_layers / setting.model.n_layers
    return share * sum((p.stored * p.times for p in state.params if p.in_block), 0.0)


def _activations(setting: Setting, rows: int) -> tuple[float, float, float, float]:
    """Bytes that all layers keep, that the ends keep, and what a layer adds, forward and backward.

    A layer that is computed again adds all that it would have kept, but the stream behind it. One
    that keeps all adds nothing before its arrays are there, unless a scan made room for all layers.
    """
    cfg, tokens, number = setting.model, rows * setting.tokens, setting.number
    stream, again = tokens * number * cfg.d_model, setting.remat != "none"
    ends = Kept((2 + (cfg.dropout > 0)) * cfg.d_model, cfg.d_model).bytes(number) * tokens
    kept = forward = backward = 0.0
    for layer, times in Counter(cfg.layers).items():
        whole = block(setting, layer, rows).bytes(number) * tokens
        dots = products(setting, layer).bytes(number) * tokens
        kept += times * {"none": whole, "dots": dots, "full": stream}[setting.remat]
        if again or setting.unit is not None:
            forward = max(forward, passing(setting, layer, rows, forward=True))
        more = whole - stream if again else 0.0
        backward = max(backward, passing(setting, layer, rows, forward=False) + more)
    return kept, ends, forward, backward


def _logits(setting: Setting, tokens: int) -> float:
    """Logits, and the exponentials and the gradient of them: two at a time, in chunks all three."""
    cfg, chunk = setting.model, setting.train.loss_chunk
    width = cfg.dims().padded_vocab_size / setting.sizes["tensor"]
    share = 1.0 if chunk is None else min(1.0, chunk / cfg.context_length)
    capped = getattr(cfg.head, "softcap", None) is not None
    arrays = 1 + capped + (chunk is not None)
    return tokens * share * width * (setting.number * arrays + 4)


def _of_head(p: Param, setting: Setting) -> bool:
    """Whether the readout multiplies with a parameter."""
    own = has_own_head(setting.model)
    return p.path.startswith("head/") or (not own and p.path == "embed/embedding")
