# SPDX-License-Identifier: Apache-2.0
"""What the page of a run says of its training, part by part, from what its folder holds.

Each function makes the content of one part; what is not there is a line that says why. A run may be
finished, interrupted or under way. Left out: how HTML is made (`page.py`), what the model does
(`page_results.py`), where configurations come from (the command line).
"""

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxgpt.errors import JaxgptError
from jaxgpt.flops import count_active_params, count_params
from jaxgpt.model import ModelConfig
from jaxgpt.study.page import (
    Html,
    missing,
    paragraph,
    picture,
    table,
)
from jaxgpt.study.page_curves import norm_figure, positive, speed_figure
from jaxgpt.study.plots import loss_figure
from jaxgpt.train.config import LoraConfig, OptimConfig, TrainConfig
from jaxgpt.train.files import size
from jaxgpt.train.optim import optimizer
from jaxgpt.train.report import clock
from jaxgpt.train.step import init_state

Parts = list[Html]

EVENTS = 50
SPEEDS = {
    "model_tflops_per_s_full": "model TFLOP/s, all keys of the context counted",
    "model_tflops_per_s_causal": "model TFLOP/s, only the keys that a query sees",
    "mfu_full": "share of the devices' peak (MFU), all keys",
    "mfu_causal": "share of the devices' peak (MFU), keys that are seen",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A run as its folder shows it.

    Attributes:
      name: Of the run.
      model: Its vocabulary is None where it has no tokenizer yet.
      optim: The optimizer.
      train: Length and intervals.
      lora: Adapters.
      records: Of metrics.jsonl.
      facts: Of run.json.
    """

    name: str
    model: ModelConfig
    optim: OptimConfig
    train: TrainConfig
    lora: LoraConfig
    records: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The last one on record."""
        return max((r["step"] for r in self.records if "step" in r), default=0)

    def with_key(self, key: str) -> list[Mapping[str, Any]]:
        """The records that have a value of that name."""
        return [r for r in self.records if r.get(key) is not None and "step" in r]

    def last(self, key: str) -> Any:
        """The newest value of that name; None: there is none."""
        found = self.with_key(key)
        return found[-1][key] if found else None

    @property
    def wall_s(self) -> float:
        """Seconds of all processes up to their last records."""
        times = [r["wall_s"] for r in self.records if isinstance(r.get("wall_s"), int | float)]
        ends = (a for a, b in zip(times, [*times[1:], -1.0], strict=False) if b < a)
        return sum(ends, 0.0)


def lead(run: Run) -> Parts:
    """In a sentence or two what the run is and how far it has come."""
    size_of = "A model"
    if run.model.vocab_size is not None:
        size_of += f" of {sum(count_params(run.model).values()):,} parameters"
    done, steps = run.step, run.train.steps
    state = f"all of its {steps:,} steps" if done >= steps else f"{done:,} of {steps:,} steps"
    said = f"{size_of}, trained for {state} on {run.last('tokens') or 0:,} tokens"
    if (nats := run.last("val_nats_per_token")) is not None:
        said += f"; validation loss {nats:.4f} nats per token"
    why = "It is under way, or was interrupted; the same command goes on with it."
    return [paragraph(f"{said}.")] + ([paragraph(why)] if done < steps else [])


def about(run: Run, rows: Sequence[tuple[str, Any]]) -> Parts:
    """Where it comes from (`rows`), its size, and its parameters by box."""
    model = run.model
    facts = [
        *rows,
        ("layers", model.n_layers),
        ("width", model.d_model),
        ("attention", type(model.attention).__name__),
        ("FFN", type(model.ffn).__name__),
        ("context, in tokens", model.context_length),
        ("sequences in a step", run.train.batch_size),
        ("steps", f"{run.step:,} of {run.train.steps:,}"),
        ("tokens trained", run.last("tokens") or 0),
        ("time", clock(run.wall_s)),
    ]
    if model.vocab_size is None:
        return [table(facts), missing("count of parameters", "the run has no tokenizer yet")]
    facts.insert(-4, ("vocabulary", model.vocab_size))
    counts, active = count_params(model), count_active_params(model)
    total = sum(counts.values())
    lines = [(box, n, f"{n / total:.1%}") for box, n in counts.items()]
    lines.append(("all", total, ""))
    if active < total:
        lines.append(("used by one token", active, f"{active / total:.1%}"))
    return [table(facts), table(lines, ("box", "parameters", "share"))]


def curves(run: Run) -> Parts:
    """Losses and rate; gradients and updates."""
    try:
        figure = loss_figure(run.records, name=run.name)
    except JaxgptError as error:
        return [missing("curves", error.what)]
    ends = []
    for key, what in (("loss_nats", "training"), ("val_nats_per_token", "validation")):
        if found := run.with_key(key):
            first, last = found[0], found[-1]
            ends.append(
                f"{what} loss from {first[key]:.3f} at step {first['step']} to {last[key]:.3f} "
                f"at step {last['step']}"
            )
    alt = f"Curves by step: {', '.join(ends)}; below them the learning rate."
    said = "Losses in nats per token and, below, the learning rate. Training losses are averaged "
    said += "over a fiftieth of the run where there are many; the pale line is each of them."
    parts = [picture(figure, alt, said)]
    if (norms := norm_figure(run.records, name=run.name)) is not None:
        alt = "Curves by step: gradient norm and what else is named along the vertical axes."
        parts.append(picture(norms, alt, "Norms are of all parameters that are trained, together."))
    return parts


def speed(run: Run) -> Parts:
    """Tokens per second, milliseconds a step, the first step, and the share of the peak."""
    _, rates = positive(run.records, "tokens_per_s")
    if not len(rates):
        return [missing("speed", "no step is on record")]
    rows: list[tuple[str, Any]] = [("tokens per second, at the end", float(rates[-1]))]
    rows.append(("tokens per second, median of the records", statistics.median(map(float, rates))))
    if tokens := run.last("n_tokens"):
        rows.append(("ms a step, at the end", 1e3 * tokens / float(rates[-1])))
    rows += [(what, run.last(key)) for key, what in SPEEDS.items() if run.with_key(key)]
    starts = [
        (r["step"], r["first_step_wall_s"], r.get("compile_wall_s"))
        for r in run.with_key("first_step_wall_s")
    ]
    head = ("on record at step", "first step after (s)", "of that compiling (s)")
    parts = [table(rows), *([table(starts, head, caption="Starts")] if starts else [])]
    if (figure := speed_figure(run.records, name=run.name)) is not None:
        alt = f"Curve by step: tokens per second, {rates[0]:,.0f} first and {rates[-1]:,.0f} last."
        said = "The average since the process began, without compilation and evaluation."
        parts.append(picture(figure, alt, said))
    if not run.with_key("mfu_full"):
        parts.append(missing("share of the peak (MFU)", "the peak of the devices is not known"))
    return parts


def memory(run: Run) -> Parts:
    """What the state takes by its shapes, and what was measured."""
    parts = []
    if run.model.vocab_size is not None:
        tx = optimizer(run.optim, run.train.steps, run.model.dims().width_ratio)
        make = functools.partial(init_state, run.model, tx, 0, lora=run.lora)
        state = jax.eval_shape(functools.partial(make, ema=run.train.ema_decay is not None))
        kinds = {"parameters": state.params, "optimizer": state.opt_state}
        kinds |= {"moving average": state.extra["ema"]} if "ema" in state.extra else {}
        rows = [(name, size(_bytes(tree))) for name, tree in kinds.items()]
        parts.append(table(rows, caption="Held between steps, of all devices together, by shapes"))
    peaks = {key: max(positive(run.records, key)[1], default=0) for key in _byte_names(run.records)}
    if peaks:
        rows = [
            (key.removesuffix("_bytes").replace("_", " "), size(int(n))) for key, n in peaks.items()
        ]
        return [*parts, table(rows, caption="Measured, the most on record")]
    return [*parts, missing("measured memory", "the run records none")]


def _bytes(tree: Any) -> int:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape")]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _byte_names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({key for record in records for key in record if key.endswith("_bytes")})


def health(run: Run) -> Parts:
    """Steps that were skipped, and jumps of the loss."""
    if not run.records:
        return [missing("events", "no step is on record")]
    events = [r for r in run.records if r.get("skipped") or r.get("spike")]
    counts = [
        ("steps that were skipped, for they were not finite", int(run.last("skipped_steps") or 0)),
        ("jumps of the loss on record", sum(bool(r.get("spike")) for r in events)),
    ]
    rows = [
        (
            r["step"],
            "skipped" if r.get("skipped") else "jump",
            *("not finite" if r.get(key) is None else r[key] for key in ("loss_nats", "grad_norm")),
        )
        for r in events[-EVENTS:]
        if "step" in r
    ]
    parts = [table(counts)]
    if rows:
        caption = f"The last {len(rows)} of {len(events)}" if len(events) > len(rows) else None
        head = ("step", "what", "loss (nats)", "gradient norm")
        parts.append(table(rows, head, caption=caption))
    return parts
