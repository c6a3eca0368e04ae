# SPDX-License-Identifier: Apache-2.0
r"""How far is the planner off? Memory and time of training steps, predicted and measured, on a CPU.

    python benchmarks/planning.py --out planning.json --markdown planning.md

Memory is what XLA's memory analysis of the compiled step says, on one device and on eight fake
ones, and for some models also what the process really took: its arrays, and the growth of its peak
resident set during steps. Time is measured by turns; the rates of the machine are measured in the
same run, and the two efficiencies are fitted on the first three models alone. Nothing else is.
"""

import argparse
import ctypes
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
from harness import Report, in_turns, limits_of, parser, ready_device

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.rope import RoPE
from jaxgpt.flops import count_params
from jaxgpt.model import ModelConfig
from jaxgpt.study.bench import Training, alternate
from jaxgpt.study.planning.ahead import compile_step
from jaxgpt.study.planning.chips import this_cpu
from jaxgpt.study.planning.memory import step_memory
from jaxgpt.study.planning.setting import Setting
from jaxgpt.study.planning.state import state_of
from jaxgpt.study.planning.timing import Efficiency, step_time
from jaxgpt.train.config import MeshConfig, OptimConfig, TrainConfig

MIB = 2.0**20


def gpt(width, layers, context, heads, vocab, **more):
    """Learned positions, LayerNorm, GELU, a tied head."""
    attention = GQA(heads, more.pop("kv", None))
    sizes = {"vocab_size": vocab, "context_length": context, "d_model": width}
    return ModelConfig(**sizes, n_layers=layers, attention=attention, **more)


def llama(width, layers, context, heads, vocab, **more):
    """RoPE, RMSNorm, SwiGLU, a head of its own."""
    boxes = {"position": RoPE(), "norm": RMSNorm(), "final_norm": RMSNorm(), "head": Untied()}
    boxes |= {"ffn": GatedMLP()} | more
    return gpt(width, layers, context, heads, vocab, **boxes)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how it is trained, and what of it is measured."""

    model: ModelConfig
    train: TrainConfig
    mesh: MeshConfig = MeshConfig(data=1)
    fitted: bool = False  # the efficiencies of time
    timed: bool = False
    resident: bool = False  # the process's own memory


def rows(n, **train):
    return TrainConfig(batch_size=n, **train)


CASES = {
    "GPT, 4 x 256, T 128": Case(gpt(256, 4, 128, 4, 2048), rows(16), fitted=True, timed=True),
    "Llama, 3 x 384, GQA, T 256": Case(
        llama(384, 3, 256, 6, 4096, kv=2), rows(8), fitted=True, timed=True
    ),
    "GPT, 6 x 128, T 256": Case(gpt(128, 6, 256, 4, 512), rows(16), fitted=True, timed=True),
    "Llama, 2 x 512, MHA, T 128": Case(
        llama(512, 2, 128, 8, 1024), rows(16), timed=True, resident=True
    ),
    "GPT, 8 x 192, T 512": Case(gpt(192, 8, 512, 6, 4096), rows(4), timed=True, resident=True),
    "GPT, 4 x 320, MQA, ReLU, T 192": Case(
        gpt(320, 4, 192, 5, 8192, kv=1, ffn=MLP(activation="relu")), rows(12), timed=True
    ),
    "Llama, 6 x 256, scan, remat full": Case(
        llama(256, 6, 128, 4, 2048, kv=2), rows(16, scan=True, remat="full"), timed=True
    ),
    "GPT, 6 x 192, scan, remat dots": Case(
        gpt(192, 6, 128, 4, 1024), rows(24, scan=True, remat="dots")
    ),
    "GPT, 3 x 256, scan": Case(gpt(256, 3, 128, 8, 1024), rows(16, scan=True)),
    "GPT, 2 x 256, V 16384, loss_chunk": Case(gpt(256, 2, 256, 4, 16384), rows(8, loss_chunk=32)),
    "Llama, 3 x 256, accumulate 4": Case(llama(256, 3, 128, 4, 2048), rows(32, accumulate=4)),
    "GPT, 4 x 256, fsdp 8": Case(gpt(256, 4, 64, 8, 2048), rows(16), MeshConfig(1, fsdp=8)),
    "Llama, 4 x 256, fsdp 4": Case(
        llama(256, 4, 64, 8, 1024, kv=4), rows(16), MeshConfig(2, fsdp=4)
    ),
    "GPT, 4 x 256, fsdp 4 x tensor 2": Case(
        gpt(256, 4, 64, 8, 2048), rows(16), MeshConfig(1, fsdp=4, tensor=2)
    ),
    "Llama, 5 x 320, fsdp 4, scan, remat full": Case(
        llama(320, 5, 96, 5, 1024), rows(16, scan=True, remat="full"), MeshConfig(1, fsdp=4)
    ),
}
"""The first three are those that the efficiencies are fitted on."""
TINY = {
    "a": Case(gpt(16, 1, 8, 2, 32), rows(2), fitted=True, timed=True, resident=True),
    "b": Case(gpt(16, 2, 8, 2, 32), rows(4), MeshConfig(1, fsdp=4)),
}


def setting_of(case, chip):
    return Setting(case.model, OptimConfig(), case.train, case.mesh, chip)


def compiled(case):
    found = compile_step(case.model, OptimConfig(), case.train, case.mesh)
    return {"bytes": found.bytes, "compile_s": found.lower_s + found.compile_s}


def resident(case):
    """Bytes that the process takes in a step: its arrays, and what comes on top while it runs."""
    steps = Training(case.model, OptimConfig(), case.train)
    steps.run(1)
    arrays = sum(x.nbytes for x in jax.live_arrays())
    ctypes.CDLL(None).malloc_trim(0)  # what glibc keeps of the step before
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_of_process("VmRSS")
    steps.run(2)
    return {"bytes": arrays + memory_of_process("VmHWM") - before}


def memory_of_process(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


WORK = {"compiled": compiled, "resident": resident}


def elsewhere(what, names, shape, devices):
    """`WORK` on some cases in a process of its own."""
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={devices}"
    words = [sys.executable, __file__, "--shape", shape, "--work", what, *names]
    done = subprocess.run(
        words, env=os.environ | {"XLA_FLAGS": flags}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def memories(cases, shape, chip):
    """A row for each case."""
    by_devices = {}
    for name, case in cases.items():
        by_devices.setdefault(setting_of(case, chip).devices, []).append(name)
    measured, real = {}, {}
    for devices, names in by_devices.items():
        measured |= elsewhere("compiled", names, shape, devices)
    for name, case in cases.items():
        if case.resident:
            real |= elsewhere("resident", [name], shape, 1)
    for name, case in cases.items():
        setting = setting_of(case, chip)
        found = step_memory(setting, state_of(setting))
        yield {
            "name": name,
            "parameters": sum(count_params(case.model).values()),
            "devices": setting.devices,
            "moment": found.moment,
            "predicted": found.bytes,
            "measured": measured[name]["bytes"],
            "resident": real.get(name, {}).get("bytes"),
            "error": found.bytes / measured[name]["bytes"] - 1,
        }


def times(cases, options):
    """Seconds of a step of each timed case, the best of the rounds, and its median."""
    turns = {}
    for name, case in cases.items():
        if case.timed:
            steps = Training(case.model, OptimConfig(), case.train)
            turns[name] = in_turns(steps.run, options.turn_seconds)
    return alternate(turns, rounds=options.rounds)


def fit(settings, seconds):
    """The efficiencies of at most 1 with the least squared logarithmic error: a search."""
    states = [state_of(setting) for setting in settings]
    shares = [0.02 * 1.06**i for i in range(68)]

    def error(pair):
        at = Efficiency(*pair)
        return sum(
            math.log(step_time(one, state, at).seconds / s) ** 2
            for one, state, s in zip(settings, states, seconds, strict=True)
        )

    coarse = min(itertools.product(shares[::6], repeat=2), key=error)
    for step in (1.06**3, 1.06, 1.02):
        near = [[min(x * step**i, 1.0) for i in range(-3, 4)] for x in coarse]
        coarse = min(itertools.product(*near), key=error)
    return Efficiency(*coarse)


def timed_rows(cases, timings, efficiency, chip):
    for name, timing in timings.items():
        setting = setting_of(cases[name], chip)
        predicted = step_time(setting, state_of(setting), efficiency)
        yield {
            "name": name,
            "fitted": cases[name].fitted,
            "predicted": predicted.seconds,
            "products": predicted.products,
            "memory": predicted.memory,
            "measured": timing.best,
            "median": timing.median,
            "spread": timing.spread,
            "error": predicted.seconds / timing.best - 1,
        }


def missed(row, most):
    return f"{row['error']:+.1%}" + (" **miss**" if abs(row["error"]) > most else "")


def memory_table(found):
    lines = [
        "| memory of a step | parameters | devices | worst moment | predicted MiB | XLA MiB "
        "| process MiB | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        real = "" if row["resident"] is None else f"{row['resident'] / MIB:,.1f}"
        lines.append(
            f"| {row['name']} | {row['parameters']:,} | {row['devices']} | {row['moment']} | "
            f"{row['predicted'] / MIB:,.1f} | {row['measured'] / MIB:,.1f} | {real} | "
            f"{missed(row, 0.1)} |"
        )
    return "\n".join(lines)


def time_table(found, efficiency, limits):
    lines = [
        f"Measured: {limits.flops_per_s / 1e9:,.4g} GFLOP/s, copies at "
        f"{limits.copy_bytes_per_s / 1e9:,.4g} GB/s; fitted on the first three: products "
        f"{efficiency.products:.3f}, memory {efficiency.memory:.3f}.",
        "",
        "| time of a step | fitted | predicted ms | of them products, memory | measured ms, best "
        "| median | spread | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        lines.append(
            f"| {row['name']} | {'yes' if row['fitted'] else 'no'} | {1e3 * row['predicted']:,.1f} "
            f"| {1e3 * row['products']:,.1f}, {1e3 * row['memory']:,.1f} | "
            f"{1e3 * row['measured']:,.1f} | {1e3 * row['median']:,.1f} | {row['spread']:.0%} | "
            f"{missed(row, 0.2)} |"
        )
    return "\n".join(lines)


def work(options, cases):
    """What a process of its own does: the last line that it prints is JSON."""
    print(json.dumps({name: WORK[options.work](cases[name]) for name in options.names}))


def main(argv=None):
    made = parser(__doc__)
    made.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    made.add_argument("--work", choices=WORK, help=argparse.SUPPRESS)
    made.add_argument("--shape", choices=("cpu", "tiny"), default="cpu")
    made.add_argument("--markdown", type=Path, help="a file for the tables")
    made.add_argument("--times", action=argparse.BooleanOptionalAction, default=True)
    made.set_defaults(turn_seconds=0.7, rounds=5)
    options = made.parse_args(argv)
    cases = CASES if options.shape == "cpu" else TINY
    if options.work:
        work(options, cases)
        return
    began = time.perf_counter()
    ready_device()
    report = Report("Planning: predicted and measured", options.out)
    limits = limits_of(options, "float32")
    chip = this_cpu(limits, 64 * 2.0**30)
    found = list(memories(cases, options.shape, chip))
    tables = [memory_table(found)]
    print("\n" + tables[0], flush=True)
    report.record["memory"] = found
    report.write()
    if options.times:
        timings = times(cases, options)
        fitted = [name for name, case in cases.items() if case.fitted]
        settings = [setting_of(cases[name], chip) for name in fitted]
        efficiency = fit(settings, [timings[name].best for name in fitted])
        timed = list(timed_rows(cases, timings, efficiency, chip))
        report.record["time"] = timed
        report.record["limits"] = dataclasses.asdict(limits)
        report.record["efficiency"] = dataclasses.asdict(efficiency)
        tables.append(time_table(timed, efficiency, limits))
        print("\n" + tables[1], flush=True)
    report.record["wall_s"] = round(time.perf_counter() - began, 1)
    print(f"\n{report.record['wall_s']:.0f} s")
    report.write()
    if options.markdown is not None:
        options.markdown.write_text("\n\n".join(tables) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
