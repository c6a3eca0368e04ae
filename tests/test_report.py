# SPDX-License-Identifier: Apache-2.0
import io
import math
import re
import sys
import time

import pytest

from jaxgpt.losses import Score
from jaxgpt.train.files import MetricsWriter, read_metrics
from jaxgpt.train.report import Reporter, clock, process_age_s

IMPORTED = time.monotonic()
TICKS_S = 0.02  # of the clock that the kernel counts ages with, two


def run(out, path):
    with out:
        out.start(0, MetricsWriter(path))
        out.go()
        for step in range(1, 5):
            out.count(step - 1, step)
            out.step(step, {"loss_nats": 2.0, "lr": 1e-3}, log=step % 2 == 0)
        out.halt()
        out.score(4, Score(nats=20.0, n_tokens=10, n_chars=10, n_bytes=12))


def test_plain_lines_without_a_terminal(tmp_path, capsys):
    """Row I3: one line an event, no carriage return, no escape sequence."""
    run(Reporter(4, lambda n: n * 2**31), tmp_path / "m.jsonl")
    text = capsys.readouterr().out
    assert not re.search(r"[\r\x1b]", text)
    lines = text.splitlines()
    assert len(lines) == 3 and lines[0].startswith("step 2/4  loss 2.0000  lr 1.00e-03")
    assert "2.0000 nats/token" in lines[2] and "2.8854 bits/character" in lines[2]


def test_metrics_are_exact_past_two_billion_tokens(tmp_path):
    run(Reporter(4, lambda n: n * 2**31), tmp_path / "m.jsonl")
    records = read_metrics(tmp_path / "m.jsonl")
    assert [r["tokens"] for r in records] == [2 * 2**31, 4 * 2**31, 4 * 2**31]
    assert records[0]["tokens_per_s"] > 0
    assert records[2]["val_bits_per_byte"] == pytest.approx(2.4045, abs=1e-3)


class Gone(io.StringIO):
    """A pipe whose reader has left."""

    def __init__(self, tty):
        super().__init__()
        self._tty = tty

    def isatty(self):
        return self._tty

    def write(self, text):
        raise BrokenPipeError

    def flush(self):
        raise BrokenPipeError


@pytest.mark.parametrize("tty", [False, True])
def test_a_reader_that_left_does_not_stop_the_run(tmp_path, monkeypatch, tty):
    monkeypatch.setattr(sys, "stdout", Gone(tty))
    run(Reporter(4, lambda n: n * 8), tmp_path / "m.jsonl")
    assert len(read_metrics(tmp_path / "m.jsonl")) == 3


def test_the_first_step_is_timed_once(tmp_path, capsys):
    with Reporter(4, lambda n: n * 8, began=time.monotonic() - 100) as out:
        out.start(0, MetricsWriter(tmp_path / "m.jsonl"))
        out.first_step(2.04)
        for step in range(1, 5):
            out.step(step, {"loss_nats": 2.0, "lr": 1e-3}, log=step % 2 == 0)
    assert re.match(
        r"first step after 10\d\.\d s \(compiled in 2\.0 s\)\n", capsys.readouterr().out
    )
    first, second = read_metrics(tmp_path / "m.jsonl")
    assert first["first_step_wall_s"] >= 100 and first["compile_wall_s"] == 2.04
    assert "first_step_wall_s" not in second and "compile_wall_s" not in second


def test_the_age_of_this_process():
    before, age_s, began = time.monotonic(), process_age_s(), time.monotonic()
    assert before - IMPORTED < age_s, "it was there before this file was read"
    time.sleep(0.05)
    ended, older_s, after = time.monotonic(), process_age_s(), time.monotonic()
    assert ended - began - TICKS_S <= older_s - age_s <= after - before + TICKS_S


def test_steps_of_a_dispatch_count_together(tmp_path):
    """The rate is that of all of them, also beside the first."""
    with Reporter(4, lambda n: n * 8) as out:
        out.start(0, MetricsWriter(tmp_path / "m.jsonl"))
        out.go()
        time.sleep(0.01)
        out.count(0, 4)
        for step in range(1, 5):
            out.step(step, {"loss_nats": 2.0, "lr": 1e-3}, log=True)
    rates = {r["tokens_per_s"] for r in read_metrics(tmp_path / "m.jsonl")}
    assert len(rates) == 1 and 0 < rates.pop() <= 32 / 0.01


def test_durations():
    assert [clock(s) for s in (4.4, 200.0, 3725.0)] == ["4s", "3m20s", "1h02m"]


def test_what_is_the_matter_is_said_in_place_of_the_line_and_recorded(tmp_path, capsys):
    with Reporter(4, lambda n: n * 8) as out:
        out.start(0, MetricsWriter(tmp_path / "m.jsonl"))
        out.speed = lambda tokens_per_s: {"tflops": tokens_per_s * 2}
        out.step(1, {"loss_nats": math.nan, "lr": 1e-3}, log=False, line="warning: skipped")
        out.go()
        out.count(1, 3)
        out.step(2, {"loss_nats": 2.0, "lr": 1e-3}, log=False)
        out.step(3, {"loss_nats": 2.0, "lr": 1e-3}, log=True, line="warning: jumped")
        out.score(3, Score(20.0, 10, 10, 12), {"val_ema_nats_per_token": 1.5, "other": 7.0})
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["warning: skipped", "warning: jumped"] and len(lines) == 3
    assert lines[2].endswith("bits/character, of the moving average 1.5000 nats/token")
    records = read_metrics(tmp_path / "m.jsonl")
    assert [r["step"] for r in records] == [1, 3, 3]
    assert records[0]["loss_nats"] is None and "tflops" not in records[0]
    assert records[1]["tflops"] == pytest.approx(2 * records[1]["tokens_per_s"], abs=0.2)
    assert records[2]["other"] == 7.0 and records[2]["val_ema_nats_per_token"] == 1.5
