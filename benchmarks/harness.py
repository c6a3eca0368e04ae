# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of speed share: peers in processes of their own, turns, records and tables.

A benchmark names its competitors and what a unit of their work costs. They run by turns in one
process tree, so that all meet the same disturbances, and the limits of the machine are measured in
the same run. What comes of it is a JSON file with everything, and a table for people.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.costs import Cost
from jaxgpt.study import machine
from jaxgpt.study.bench import alternate, compared
from jaxgpt.train.cpu import tune_cpu
from jaxgpt.train.devices import only_cpu

HERE = Path(__file__).resolve().parent
PAUSE_S = 0.05
"""Between two turns: threads of the last one may still look for work."""
COLUMNS = {
    "ms_best": ("ms, best", "{:,.4g}"),
    "ms_median": ("median", "{:,.4g}"),
    "spread": ("spread", "{:.0%}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "gflops_per_s": ("GFLOP/s", "{:,.4g}"),
    "share_of_matrix_rate": ("of matrix rate", "{:.1%}"),
    "gbytes_per_s": ("GB/s", "{:,.4g}"),
    "share_of_read_rate": ("of read rate", "{:.1%}"),
    "ratio": ("times as fast as", "{}"),
}


class Peer:
    """A process that does work when it is asked to, and says how long it took.

    Args:
      python: Its interpreter.
      script: A file beside this one, which calls `serve.serve`.
      settings: What it is told at the start.

    Raises:
      RuntimeError: It did not start, or ended.
    """

    def __init__(self, python: str | Path, script: str, settings: Mapping[str, Any]):
        command = [str(python), str(HERE / script), json.dumps(dict(settings))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.facts = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """One piece of work."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        with self._process:  # closes the pipes and waits
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"{self._process.args} ended with {self._process.returncode}")
        return json.loads(line)


@dataclasses.dataclass(frozen=True)
class Competitor:
    """One line of a table.

    Attributes:
      name: For the table.
      turn: Runs for a while and returns seconds a unit of work.
      cost: Of a unit.
      tokens: Of a unit.
      ours: Whether it is jaxgpt's; others are what it is compared with.
      facts: What else is to be said of it: seconds to compile, versions.
    """

    name: str
    turn: Callable[[], float]
    cost: Cost
    tokens: int
    ours: bool = False
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def in_turns(run: Callable[[int], float], turn_s: float) -> Callable[[], float]:
    """A turn of about `turn_s` seconds, of something that runs n units and says seconds a unit."""
    n = max(1, round(turn_s / run(1)))
    return lambda: run(n)


def compete(
    title: str, competitors: Sequence[Competitor], limits: machine.Limits, rounds: int
) -> dict[str, Any]:
    """Let them run by turns; the record of one table, as `Report.add` takes it."""

    def rested(turn: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            time.sleep(PAUSE_S)
            return turn()

        return run

    timings = alternate({one.name: rested(one.turn) for one in competitors}, rounds=rounds)
    rows = [
        {
            "name": one.name,
            "ours": one.ours,
            **compared(timings[one.name], one.cost, limits, one.tokens),
            "ms": [1e3 * s for s in timings[one.name].seconds],
            **one.facts,
        }
        for one in competitors
    ]
    rates = {row["name"]: row["tokens_per_s"] for row in rows if not row["ours"]}
    for row in rows:
        row["ratio"] = {name: row["tokens_per_s"] / rate for name, rate in rates.items()}
        row["ratio"].pop(row["name"], None)
    return {"title": title, "limits": dataclasses.asdict(limits), "rows": rows}


class Report:
    """Tables and their records; `write` makes the JSON file.

    Args:
      question: What the benchmark asks.
      out: The JSON file; None: none.
    """

    def __init__(self, question: str, out: Path | None):
        self.out = out
        self.record: dict[str, Any] = {
            "question": question,
            "command": " ".join(["python", *sys.argv]),
            "commit": _commit(),
            "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "machine": machine.describe(),
            "load_at_start": os.getloadavg()[0],
            "tables": [],
        }
        about = self.record["machine"]
        print(f"{question}\n\n`{self.record['command']}`\n")
        print(
            f"{about['devices']}, {about['cpu']}, {about['cores']} cores, jax {about['jax']}, ",
            end="",
        )
        print(
            f"commit {self.record['commit']}, load {self.record['load_at_start']:.1f}", flush=True
        )

    def add(self, table: dict[str, Any]) -> None:
        """Print a table, and keep its record."""
        self.record["tables"].append(table)
        print(f"\n{markdown(table)}", flush=True)
        self.write()

    def write(self) -> None:
        """The file, whole, as far as there are results."""
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")


def markdown(table: dict[str, Any]) -> str:
    """A table for people."""
    limits = table["limits"]
    lines = [
        f"**{table['title']}**; measured limits: {limits['flops_per_s'] / 1e9:,.4g} GFLOP/s in "
        f"{limits['dtype']}, read {limits['read_bytes_per_s'] / 1e9:.4g} GB/s, copy "
        f"{limits['copy_bytes_per_s'] / 1e9:.4g} GB/s",
        "",
        "| | " + " | ".join(head for head, _ in COLUMNS.values()) + " |",
        "| --- |" + " --- |" * len(COLUMNS),
    ]
    for row in table["rows"]:
        shown = {**row, "ratio": ", ".join(f"{name} {x:.2f}" for name, x in row["ratio"].items())}
        cells = (form.format(shown[name]) for name, (_, form) in COLUMNS.items())
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    lines += [f"\n{row['name']}: {row['note']}" for row in table["rows"] if "note" in row]
    return "\n".join(lines)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all of them have."""
    made = argparse.ArgumentParser(
        description=(doc or "").splitlines()[0],
        epilog="\n".join((doc or "").splitlines()[1:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--rounds", type=int, default=5, help="of turns, each competitor one")
    made.add_argument("--turn-seconds", type=float, default=1.0, help="that a turn lasts, about")
    made.add_argument("--out", type=Path, help="the JSON file to write")
    made.add_argument(
        "--largest", type=int, default=8192, help="rows of the largest square product"
    )
    made.add_argument("--bytes", type=int, default=1 << 29, help="of the array that is read")
    return made


def limits_of(options: argparse.Namespace, dtype: str) -> machine.Limits:
    """The machine's limits, measured now."""
    return machine.measure_limits(dtype, largest=options.largest, n_bytes=options.bytes)


def ready_device() -> None:
    """Before JAX starts: tune a CPU as the commands do, and leave peers some of a GPU's memory."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if only_cpu(None):
        tune_cpu()


def _commit() -> str:
    """Of the checkout, with `+` where files differ from it."""
    try:
        run = [
            subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True)
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "-uno"))
        ]
    except OSError:
        return "unknown"
    return (run[0].stdout.strip() or "unknown") + ("+" if run[1].stdout.strip() else "")
