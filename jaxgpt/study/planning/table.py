# SPDX-License-Identifier: Apache-2.0
"""A plan as a table for people, and as a record for programs."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxgpt.flops import count_params
from jaxgpt.study.planning.ahead import Compiled
from jaxgpt.study.planning.memory import Memory
from jaxgpt.study.planning.plan import Plan
from jaxgpt.study.planning.setting import Setting
from jaxgpt.study.planning.timing import DecodeStep, Efficiency
from jaxgpt.study.planning.traffic import HIDDEN

GIB = 2.0**30
MOMENTS = {
    "forward": "in the last layer",
    "loss": "at the loss",
    "backward": "on the way back",
    "update": "in the update",
    "decode": "decoding",
}


def about(setting: Setting, name: str) -> str:
    """Model, devices and batch, in two lines."""
    cfg, train, chip = setting.model, setting.train, setting.chip
    mesh = " x ".join(f"{axis} {n}" for axis, n in setting.sizes.items() if n > 1) or "one device"
    how = [f"remat={train.remat}"] + ["scan"] * train.scan
    how += [] if train.loss_chunk is None else [f"loss_chunk={train.loss_chunk}"]
    n, tokens = sum(count_params(cfg).values()), train.batch_size * cfg.context_length
    return (
        f"{name}: {n:,} parameters, {cfg.context_length:,} tokens a row, {train.dtype}, "
        f"{', '.join(how)}\n"
        f"{setting.devices} x {chip.name} ({chip.memory_bytes / GIB:.1f} GiB): {mesh}; "
        f"batch {train.batch_size:,} rows, {tokens:,} tokens: {setting.rows} rows on a device in "
        f"each of {train.accumulate} micro-batches\n"
    )


def memory_lines(memory: Memory, available: float) -> Iterator[str]:
    """Kinds of memory, GiB a device."""
    yield f"{'memory of a device':28} {'GiB':>10}"
    for kind, n_bytes in memory.kinds.items():
        if n_bytes:
            yield f"  {kind:26} {n_bytes / GIB:>10.3f}"
    where = f"all, {MOMENTS[memory.moment]}"
    yield f"  {where:26} {memory.bytes / GIB:>10.3f} of {available / GIB:.3f} that may be used"


def plan_text(plan: Plan, name: str, efficiency: Efficiency, reserve: float) -> str:
    """The whole plan."""
    setting, step = plan.setting, plan.step
    lines = [about(setting, name), *memory_lines(plan.memory, plan.available), *_fit(plan), ""]
    lines += [f"{'time of a step':28} {'ms':>10}"]
    for what, seconds in (
        ("products", step.products),
        ("memory", step.memory),
        ("waiting for the network", step.waiting),
        (f"all; the limit is {step.limit}", step.seconds),
    ):
        lines.append(f"  {what:26} {1e3 * seconds:>10,.4g}")
    lines += [f"  {line}" for line in _sent(plan)]
    lines += ["", f"{step.tokens_per_s:,.0f} tokens/s, MFU {step.mfu:.1%}"]
    if plan.tokens is not None:
        cost = "" if plan.cost is None else f", ${plan.cost:,.0f}"
        lines.append(f"{plan.tokens:.4g} tokens: {plan.days:,.4g} days{cost}")
    lines.append(f"hint: 20 tokens for each parameter are {plan.hint_tokens:.3g} tokens")
    return "\n".join([*lines, "", *assumptions(setting, efficiency, reserve)]) + "\n"


def _fit(plan: Plan) -> Iterator[str]:
    largest = f"{plan.largest:,} rows" if plan.largest else "none, not one row on each device"
    if plan.fits:
        yield f"  it fits; the largest batch that does: {largest}"
        return
    yield f"  it does not fit; the largest batch that does: {largest}"
    for options, n_bytes in plan.fixes:
        yield f"  fix: {options} ({n_bytes / GIB:.3f} GiB)"


def _sent(plan: Plan) -> Iterator[str]:
    for one in plan.step.sent:
        where = "within a host" if one.within else "between hosts"
        how = "while others compute" if one.axis in HIDDEN else "waited for"
        yield (
            f"{one.axis}: {one.bytes / 1e9:,.3g} GB at {one.bytes_per_s / 1e9:,.3g} GB/s {where}, "
            f"{1e3 * one.seconds:,.4g} ms {how}"
        )


def assumptions(setting: Setting, efficiency: Efficiency, reserve: float) -> list[str]:
    """What is taken for granted."""
    chip = setting.chip
    flops, share = chip.flops_per_s(setting.train.dtype), chip.matrix_share * efficiency.products
    memory = chip.memory_bytes_per_s * efficiency.memory
    lines = [
        "assumed:",
        f"  products at {share:.0%} of {flops / 1e12:,.4g} TFLOP/s ({setting.train.dtype}); memory "
        f"at {efficiency.memory:.0%} of {chip.memory_bytes_per_s / 1e9:,.4g} GB/s = "
        f"{memory / 1e9:,.4g} GB/s",
        "  traffic of fsdp and data at full rate while devices compute, that of tensor, context",
        "  and expert at full rate while they wait; no failures, evaluations or checkpoints",
        f"  {reserve:.0%} of the memory left alone; arrays are those of XLA:CPU (docs/planning.md)",
        f"  {chip.name}: {chip.source}" + (f"; {chip.note}" if chip.note else ""),
    ]
    if setting.remat != setting.train.remat:
        lines.append("  remat without scan saves nothing on a CPU: --train.scan=true")
    return lines


def compiled_text(found: Compiled, memory: Memory) -> str:
    """What XLA takes beside the formulas."""
    rows = {
        "arguments": found.arguments,
        "temporary": found.temporary,
        "outputs of their own": found.outputs - found.shared,
        "all": found.bytes,
        "by the formulas": memory.bytes,
    }
    lines = [f"{'compiled for ' + found.device:28} {'GiB':>10}"]
    lines += [f"  {name:26} {n_bytes / GIB:>10.3f}" for name, n_bytes in rows.items()]
    lines.append(
        f"  formulas {memory.bytes / found.bytes - 1:+.1%}; traced in {found.lower_s:.1f} s, "
        f"compiled in {found.compile_s:.1f} s, nothing allocated"
    )
    return "\n".join(lines) + "\n"


def decode_text(
    setting: Setting, name: str, memory: Memory, available: float, step: DecodeStep, context: int
) -> str:
    """A plan of decoding."""
    n = sum(count_params(setting.model).values())
    lines = [
        f"{name}: {n:,} parameters; {step.batch:,} rows of {context:,} tokens, "
        f"{setting.train.dtype}, {setting.devices} x {setting.chip.name}",
        "",
        *memory_lines(memory, available),
        "  it fits" if memory.bytes <= available else "  it does not fit",
        "",
        f"{1e3 * step.seconds:,.4g} ms a token, {step.tokens_per_s:,.0f} tokens/s; the limit is "
        f"{step.limit}",
    ]
    return "\n".join(lines) + "\n"


def record(plan: Plan) -> dict[str, Any]:
    """The plan as plain data: bytes, seconds, tokens a second, days and dollars."""
    step = plan.step
    return {
        "device": plan.setting.chip.name,
        "devices": plan.setting.devices,
        "batch_size": plan.setting.train.batch_size,
        "memory_bytes": {**plan.memory.kinds, "all": plan.memory.bytes},
        "moment": plan.memory.moment,
        "available_bytes": plan.available,
        "fits": plan.fits,
        "largest_batch_size": plan.largest,
        "fixes": [{"options": words, "bytes": n} for words, n in plan.fixes],
        "step_s": step.seconds,
        "products_s": step.products,
        "memory_s": step.memory,
        "waiting_s": step.waiting,
        "sent": [{**dataclasses.asdict(one), "seconds": one.seconds} for one in step.sent],
        "limit": step.limit,
        "tokens_per_s": step.tokens_per_s,
        "mfu": step.mfu,
        "tokens": plan.tokens,
        "days": plan.days,
        "cost": plan.cost,
        "hint_tokens": plan.hint_tokens,
    }
