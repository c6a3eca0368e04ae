# SPDX-License-Identifier: Apache-2.0
"""Which limit binds training, prefill and decoding, and how near does each come to it?

    python benchmarks/roofline.py --figure docs/img/roofline.png

One model, random weights, a cache of half the context: a training step, prompts, and decoding at
growing batch sizes. Predicted are FLOPs and bytes (`jaxgpt.costs`), and from them the least time on
this machine. Then the costs of each box.
"""

import dataclasses
from pathlib import Path

import drawing
from harness import Competitor, Report, compete, in_turns, limits_of, parser, ready_device

from jaxgpt.boxes.attention import GQA
from jaxgpt.costs import decode_costs, prefill_costs, total, train_costs
from jaxgpt.flops import count_params
from jaxgpt.model import ModelConfig
from jaxgpt.presets.models.llama import llama
from jaxgpt.sample.weights import for_decoding
from jaxgpt.study.bench import Decoding, Training, bytes_per_number, random_params
from jaxgpt.train.config import OptimConfig, TrainConfig


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model, rows of a training step and of prompts, rows of decoding steps, and the dtype."""

    model: ModelConfig
    rows: int
    decoding: tuple[int, ...]
    dtype: str = "float32"


SHAPES = {
    "tiny": Shape(
        ModelConfig(vocab_size=17, context_length=32, d_model=16, n_layers=1, attention=GQA(2)),
        *(1, (1, 2)),
    ),
    "cpu": Shape(
        llama(8, 512, 8, 1536, n_kv_heads=2, vocab_size=8192, context_length=512, tied=True),
        *(2, (1, 4, 16, 64)),
    ),
    "gpu": Shape(
        llama(16, 2048, 32, 8192, n_kv_heads=8, vocab_size=128_256, context_length=2048, tied=True),
        *(4, (1, 8, 32, 128), "bfloat16"),
    ),
}
COLORS = {"training": drawing.RED, "prefill": drawing.GREEN, "decode": drawing.BLUE}


def competitors(shape, options):
    """A line for each regime, with the costs of its boxes."""
    cfg, rows, dtype = shape.model, shape.rows, shape.dtype
    half = cfg.context_length // 2
    found, boxes = [], {}

    def add(name, run, costs, tokens):
        turn = in_turns(run, options.turn_seconds)
        boxes[name] = costs
        found.append(Competitor(name, turn, total(costs), tokens, ours=True))

    steps = Training(cfg, OptimConfig(), TrainConfig(batch_size=rows, dtype=dtype))
    costs = train_costs(cfg, rows, dtype=dtype, causal=True)
    add(f"training, {rows} x {cfg.context_length}", steps.run, costs, rows * cfg.context_length)
    ready = for_decoding(cfg, random_params(cfg), dtype=dtype)
    how = {"dtype": dtype, "weights": bytes_per_number(cfg, ready)}
    read = Decoding(cfg, ready, batch=rows, prompt_tokens=half, dtype=dtype)
    read.prefill()
    costs = prefill_costs(cfg, rows, half, **how)
    name = f"prefill, {rows} x {half}"
    add(name, lambda n: sum(read.prefill() for _ in range(n)) / n, costs, rows * half)
    new = min(64, half // 2)
    for many in shape.decoding:
        text = Decoding(cfg, ready, batch=many, prompt_tokens=half - new // 2, dtype=dtype)
        text.decode(new)
        costs = decode_costs(cfg, many, half, **how)
        add(f"decode, batch {many}", lambda _, text=text: text.decode(new)[1], costs, many)
    return found, boxes


def box_table(boxes):
    """GFLOP and MB of each box in each regime."""
    names = list(dict.fromkeys(box for costs in boxes.values() for box in costs))
    lines = [
        "| GFLOP, MB | " + " | ".join(names) + " | all |",
        "| --- |" + " --- |" * (len(names) + 1),
    ]
    for regime, costs in boxes.items():
        shown = [costs.get(name) for name in names] + [total(costs)]
        cells = ["-" if c is None else f"{c.flops / 1e9:.3g}, {c.bytes / 1e6:.3g}" for c in shown]
        lines.append(f"| {regime} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(table, path):
    limits, rows = table["limits"], table["rows"]
    rate, read = limits["flops_per_s"] / 1e9, limits["read_bytes_per_s"] / 1e9
    made = drawing.figure(6.4, 4.4)
    axes = made.subplots()
    xs = [row["gflops"] / row["gbytes"] for row in rows]
    low, high = min(*xs, rate / read) / 2, max(*xs, rate / read) * 4
    axes.plot([low, rate / read, high], [low * read, rate, rate], color=drawing.GREY)
    near = {"textcoords": "offset points", "fontsize": 9}
    axes.annotate(f"{rate:,.0f} GFLOP/s", (high, rate), (0, 4), ha="right", **near)
    middle = (low * rate / read) ** 0.5
    axes.annotate(f"{read:.3g} GB/s", (middle, middle * read), (-8, 4), ha="right", **near)
    seen = set()
    for x, row in zip(xs, rows, strict=True):
        regime, _, detail = row["name"].partition(", ")
        label = None if regime in seen else regime
        seen.add(regime)
        y = row["gflops_per_s"]
        axes.plot(x, y, "o", color=COLORS[regime], label=label)
        axes.annotate(detail, (x, y), (6, 2 if regime == "prefill" else -10), **near)
    drawing.log_axes(axes, None, "FLOPs a byte (predicted)", "GFLOP/s (measured)")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.legend(frameon=False, loc="lower right")
    drawing.save(made, path)


def main(argv=None):
    made = parser(__doc__)
    made.add_argument("--shape", choices=SHAPES, default="cpu")
    made.add_argument("--figure", type=Path)
    options = made.parse_args(argv)
    ready_device()
    shape = SHAPES[options.shape]
    report = Report("Roofline: which limit binds, and how near each regime comes", options.out)
    found, boxes = competitors(shape, options)
    n = sum(count_params(shape.model).values())
    title = f"{options.shape}: {n:,} parameters, {shape.dtype}"
    table = compete(title, found, limits_of(options, shape.dtype), options.rounds)
    table["boxes"] = {
        regime: {box: dataclasses.asdict(cost) for box, cost in costs.items()}
        for regime, costs in boxes.items()
    }
    report.add(table)
    print(f"\n{box_table(boxes)}")
    if options.figure:
        draw(table, options.figure)


if __name__ == "__main__":
    main()
