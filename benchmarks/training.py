# SPDX-License-Identifier: Apache-2.0
r"""How fast is a training step, beside nanoGPT and PyTorch, and how much is left?

    python benchmarks/training.py --shape notes --torch-python PYTHON_WITH_TORCH \
        --nanogpt CHECKOUT --dispatch 1 16

`notes` is the model of the note on decoder-only transformers, `nanogpt-cpu` nanoGPT's recipe for a
laptop, `gpt2-124m` and `gpt2-1.5b` are for a GPU. A step is forward, backward, clipping and AdamW,
on another batch each time. FLOPs: 6 N + 12 L d T a token (`jaxgpt.costs`), attention over all keys.
"""

import argparse
import dataclasses
import sys

from harness import Competitor, Peer, Report, compete, in_turns, limits_of, parser, ready_device

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.ffn import MLP
from jaxgpt.boxes.norm import LayerNorm
from jaxgpt.costs import total, train_costs
from jaxgpt.flops import count_params
from jaxgpt.model import ModelConfig
from jaxgpt.presets.models import wikitext2_char
from jaxgpt.study.bench import Training
from jaxgpt.train.config import OptimConfig, TrainConfig
from jaxgpt.train.optimizers import AdamW


def without_biases(vocab_size, context, width, n_heads, n_layers):
    """GPT-2 as nanoGPT trains it: no biases, the exact GELU."""
    norm = LayerNorm(use_bias=False)
    return ModelConfig(
        vocab_size=vocab_size,
        context_length=context,
        d_model=width,
        n_layers=n_layers,
        norm=norm,
        attention=GQA(n_heads, use_bias=False),
        ffn=MLP(activation="gelu", use_bias=False),
        final_norm=norm,
    )


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model to train, and how.

    Attributes:
      model: The model.
      dtype: Of compute.
      batch_sizes: That are tried where none is asked for.
      note: Whether the peer in plain PyTorch is the note's model.
    """

    model: ModelConfig
    dtype: str
    batch_sizes: tuple[int, ...]
    note: bool = False


def note_model(vocab_size, context, width, n_layers):
    small = dataclasses.replace(wikitext2_char(), vocab_size=vocab_size, context_length=context)
    return dataclasses.replace(small, d_model=width, n_layers=n_layers, vocab_multiple=1)


SHAPES = {
    "tiny": Shape(note_model(11, 8, 16, 1), "float32", (2,), note=True),
    "notes": Shape(note_model(96, 96, 128, 3), "float32", (32,), note=True),
    "nanogpt-cpu": Shape(without_biases(65, 64, 128, 4, 4), "float32", (12,)),
    "gpt2-124m": Shape(without_biases(50_304, 1024, 768, 12, 12), "bfloat16", (16, 32, 64)),
    "gpt2-1.5b": Shape(without_biases(50_304, 1024, 1600, 25, 48), "bfloat16", (8, 16)),
}


def ours(options, shape, rows, dispatch):
    optim = OptimConfig(AdamW(beta2=0.95))
    how = {"dispatch": dispatch, "remat": options.remat, "loss_chunk": options.loss_chunk}
    train = TrainConfig(batch_size=rows, dtype=shape.dtype, scan=options.scan, **how)
    steps = Training(shape.model, optim, train)
    return in_turns(steps.run, options.turn_seconds), {"compile_s": steps.compile_s}


def peers(options, shape, rows):
    """Name, interpreter and settings of each."""
    cfg = shape.model
    settings = {
        "vocab_size": cfg.vocab_size,
        "block_size": cfg.context_length,
        "n_embd": cfg.d_model,
        "n_head": cfg.attention.n_heads,
        "n_layer": cfg.n_layers,
        "batch_size": rows,
        "dtype": shape.dtype,
    }
    found = []
    python = options.nanogpt_python or options.torch_python or sys.executable
    if options.nanogpt:
        found.append(("nanoGPT", python, {**settings, "checkout": options.nanogpt}))
    if options.torch_python and shape.note:
        found.append(("PyTorch", options.torch_python, settings))
    for name, python, settings in found:
        for mode in options.modes:
            yield f"{name} {mode}", python, {**settings, "compile": mode == "compiled"}


def table(options, name, shape, rows):
    cfg, tokens = shape.model, rows * shape.model.context_length
    cost = total(train_costs(cfg, rows, dtype=shape.dtype))
    found, opened = [], []
    try:
        for dispatch in options.dispatch:
            turn, facts = ours(options, shape, rows, dispatch)
            called = f"jaxgpt, {dispatch} a dispatch"
            found.append(Competitor(called, turn, cost, tokens, ours=True, facts=facts))
        for called, python, settings in peers(options, shape, rows):
            peer = Peer(python, "torch_training.py", settings)
            opened.append(peer)
            turn = in_turns(
                lambda n, peer=peer: peer.ask(what="steps", n=n)["seconds"], options.turn_seconds
            )
            found.append(Competitor(called, turn, cost, tokens, facts=peer.facts))
        n_params = sum(count_params(cfg).values())
        title = (
            f"{name}: {n_params:,} parameters, batch {rows} x {cfg.context_length}, {shape.dtype}"
        )
        return compete(title, found, limits_of(options, shape.dtype), options.rounds)
    finally:
        for peer in opened:
            peer.close()


def main(argv=None):
    made = parser(__doc__)
    made.add_argument("--shape", choices=SHAPES, default="notes")
    made.add_argument("--batch-size", type=int, nargs="+", help="rows, a table for each")
    made.add_argument("--dispatch", type=int, nargs="+", default=[1], help="steps in a dispatch")
    made.add_argument("--remat", choices=("none", "dots", "full"), default="none")
    made.add_argument("--loss-chunk", type=int)
    made.add_argument("--scan", action=argparse.BooleanOptionalAction, default=False)
    made.add_argument("--nanogpt", help="a checkout of nanoGPT")
    made.add_argument("--nanogpt-python", help="an interpreter with torch, for it")
    made.add_argument("--torch-python", help="an interpreter with torch, for the note's model")
    made.add_argument("--modes", nargs="+", default=["eager"], choices=("eager", "compiled"))
    options = made.parse_args(argv)
    ready_device()
    shape = SHAPES[options.shape]
    report = Report("Training: a step, and tokens a second", options.out)
    for rows in options.batch_size or shape.batch_sizes:
        report.add(table(options, options.shape, shape, rows))


if __name__ == "__main__":
    main()
