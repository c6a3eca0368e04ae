# SPDX-License-Identifier: Apache-2.0
"""How do time and memory of a training step grow with layers, width, context and batch?

    python benchmarks/scaling.py --figure docs/img/scaling.png --memory-figure docs/img/memory.png

One knob is turned at a time, the others stay at the base. Predicted is the growth of the FLOPs
(`jaxgpt.costs`), from the largest measured value down. Memory is what XLA sets aside for a step of
one row beside parameters and batch, which it knows without running it.
"""

import argparse
import dataclasses
import math
from pathlib import Path

import drawing
import jax
from harness import Report, limits_of, parser, ready_device

from jaxgpt.boxes.attention import GQA
from jaxgpt.costs import total, train_costs
from jaxgpt.data.batches import Batch
from jaxgpt.model import ModelConfig
from jaxgpt.study.bench import Training, alternate, compared
from jaxgpt.train.config import OptimConfig, TrainConfig
from jaxgpt.train.optim import optimizer
from jaxgpt.train.step import init_state, train_step


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The base, and the values that each knob takes.

    Attributes:
      base: Layers, width, context, batch.
      knobs: Values by knob.
      contexts: Of the memory's curve.
      dtype: Of compute.
      kernel: Of attention, of the curve that is linear.
    """

    base: dict[str, int]
    knobs: dict[str, tuple[int, ...]]
    contexts: tuple[int, ...]
    dtype: str = "float32"
    kernel: str = "chunked"


SWEEPS = {
    "tiny": Sweep(
        {"layers": 1, "width": 16, "context": 8, "batch": 1},
        {"layers": (1, 2)},
        (64, 128),
    ),
    "cpu": Sweep(
        {"layers": 4, "width": 128, "context": 128, "batch": 8},
        {
            "layers": (1, 2, 4, 8, 16),
            "width": (64, 128, 256, 512),
            "context": (64, 128, 256, 512, 1024),
            "batch": (2, 4, 8, 16, 32),
        },
        (1024, 2048, 4096, 8192, 16_384),
    ),
    "gpu": Sweep(
        {"layers": 12, "width": 768, "context": 1024, "batch": 16},
        {
            "layers": (3, 6, 12, 24, 48),
            "width": (256, 512, 768, 1536, 3072),
            "context": (512, 1024, 2048, 4096, 8192),
            "batch": (2, 4, 8, 16, 32, 64),
        },
        (4096, 8192, 16_384, 32_768, 65_536),
        *("bfloat16", "auto"),
    ),
}
KERNELS = {
    "auto": ("in blocks of keys", drawing.BLUE),
    "chunked": ("in blocks of keys", drawing.BLUE),
    "reference": ("all scores at once", drawing.RED),
}


def model(size, vocab_size=1024):
    """Heads of 32 on CPU's sizes, of 64 on a GPU's."""
    width = size["width"]
    return ModelConfig(
        vocab_size=vocab_size,
        context_length=size["context"],
        d_model=width,
        n_layers=size["layers"],
        attention=GQA(max(1, width // (64 if width > 512 else 32))),
    )


def measure(sweep, options):
    """Timings by knob and value; equal sizes are measured once, all by turns."""
    sizes = {
        (knob, value): {**sweep.base, knob: value}
        for knob, values in sweep.knobs.items()
        for value in values
    }
    turns = {}
    for size in sizes.values():
        key = str(sorted(size.items()))
        if key not in turns:
            train = TrainConfig(batch_size=size["batch"], dtype=sweep.dtype)
            steps = Training(model(size), OptimConfig(), train)
            n = max(1, round(options.turn_seconds / steps.run(1)))
            turns[key] = lambda steps=steps, n=n: steps.run(n)
    found = alternate(turns, rounds=options.rounds)
    return {at: (size, found[str(sorted(size.items()))]) for at, size in sizes.items()}


def slope(xs, ys):
    """Of a straight line through the last two points, on logarithmic axes."""
    return math.log(ys[-1] / ys[-2]) / math.log(xs[-1] / xs[-2])


def tables(sweep, found, limits):
    """A record for each knob."""
    for knob in sweep.knobs:
        rows = []
        for (which, value), (size, timing) in found.items():
            if which == knob:
                cost = total(train_costs(model(size), size["batch"], dtype=sweep.dtype))
                tokens = size["batch"] * size["context"]
                row = compared(timing, cost, limits, tokens)
                rows.append({"name": f"{knob} {value}", "value": value, "ratio": {}, **row})
        xs = [row["value"] for row in rows]
        slopes = {name: slope(xs, [row[name] for row in rows]) for name in ("ms_best", "gflops")}
        title = (
            f"{knob}; slope at the end {slopes['ms_best']:.2f}, of the FLOPs {slopes['gflops']:.2f}"
        )
        yield knob, {"title": title, "limits": dataclasses.asdict(limits), "rows": rows}


def draw_times(sweep, records, path):
    made = drawing.figure(8.0, 6.4)
    units = {
        "layers": "layers",
        "width": "width",
        "context": "context (tokens)",
        "batch": "batch (rows)",
    }
    panels = made.subplots(-(-len(records) // 2), 2, squeeze=False).flat
    for axes, (knob, record) in zip(panels, records.items(), strict=False):
        rows = record["rows"]
        xs, ms = ([row[name] for row in rows] for name in ("value", "ms_best"))
        predicted = [ms[-1] * row["gflops"] / rows[-1]["gflops"] for row in rows]
        axes.plot(xs, predicted, "--", color=drawing.GREY, label="growth of the FLOPs")
        axes.plot(xs, ms, "o-", color=drawing.BLUE, label="measured")
        drawing.log_axes(axes, xs, units[knob], "ms a step")
        axes.legend(frameon=False)
    drawing.save(made, path)


def step_bytes(context, kernel, dtype):
    """Bytes that a compiled step of one row needs beside its arguments."""
    cfg = model({"layers": 2, "width": 64, "context": context}, vocab_size=256)
    tx = optimizer(OptimConfig(), 100, 1.0)
    state = jax.eval_shape(lambda: init_state(cfg, tx, 0))
    ids_BT = jax.ShapeDtypeStruct((1, context), "int32")
    batch = Batch(ids_BT, ids_BT, jax.ShapeDtypeStruct((1, context), "float32"))
    train = TrainConfig(batch_size=1, kernel=kernel, dtype=dtype)

    def step(state, batch):
        return train_step(state, batch, cfg=cfg, tx=tx, train=train)

    made = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    return made.memory_analysis().temp_size_in_bytes


def memory(sweep):
    """Bytes by kernel and context; the reference stops where its scores alone take gigabytes."""
    found = {}
    for kernel in (sweep.kernel, "reference"):
        contexts = [T for T in sweep.contexts if kernel != "reference" or 2 * 4 * T**2 <= 2**31]
        found[kernel] = {T: step_bytes(T, kernel, sweep.dtype) for T in contexts}
    return found


def draw_memory(found, path):
    made = drawing.figure(6.0, 4.2)
    axes = made.subplots()
    for kernel, sizes in found.items():
        xs, mib = list(sizes), [n / 2**20 for n in sizes.values()]
        name, color = KERNELS[kernel]
        axes.plot(xs, mib, "o-", color=color, label=name)
    first = next(iter(found.values()))
    xs = list(first)
    last = first[xs[-1]] / 2**20
    axes.plot(xs, [last * x / xs[-1] for x in xs], "--", color=drawing.GREY, label="linear in T")
    drawing.log_axes(axes, xs, "context T (tokens)", "memory of a training step (MiB)")
    axes.legend(frameon=False)
    drawing.save(made, path)


def main(argv=None):
    made = parser(__doc__)
    made.add_argument("--shape", choices=SWEEPS, default="cpu")
    made.add_argument("--figure", type=Path, help="of the times")
    made.add_argument("--memory-figure", type=Path)
    made.add_argument("--times", action=argparse.BooleanOptionalAction, default=True)
    made.set_defaults(turn_seconds=0.3, rounds=3)
    options = made.parse_args(argv)
    ready_device()
    sweep = SWEEPS[options.shape]
    report = Report("Scaling: time and memory of a training step", options.out)
    if options.times:
        found = measure(sweep, options)
        records = dict(tables(sweep, found, limits_of(options, sweep.dtype)))
        for record in records.values():
            report.add(record)
        if options.figure:
            draw_times(sweep, records, options.figure)
    sizes = memory(sweep)
    report.record["memory_bytes"] = sizes
    report.write()
    print("\n| context | " + " | ".join(sizes) + " | (MiB)\n| --- |" + " --- |" * len(sizes))
    for T in sweep.contexts:
        cells = [f"{by[T] / 2**20:,.1f}" if T in by else "-" for by in sizes.values()]
        print(f"| {T:,} | {' | '.join(cells)} |")
    if options.memory_figure:
        draw_memory(sizes, options.memory_figure)


if __name__ == "__main__":
    main()
