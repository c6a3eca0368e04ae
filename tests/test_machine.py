# SPDX-License-Identifier: Apache-2.0
import os

import jax
import pytest

from jaxgpt.study import machine


def test_limits_are_rates_of_what_was_done(monkeypatch):
    """One second for each call: the rates are what a call multiplies, reads and moves."""
    asked = []

    def best(call, repeats):
        asked.append(repeats)
        jax.block_until_ready(call())
        return 1.0

    monkeypatch.setattr(machine, "_best", best)
    found = machine.measure_limits("bfloat16", largest=1024, n_bytes=1 << 16, repeats=3)
    assert found == machine.Limits("bfloat16", 2.0 * 256**3, 2.0**16, 2.0**17)
    assert set(asked) == {1, 3}


def test_products_grow_until_they_take_long(monkeypatch):
    sizes = []

    def best(call, repeats):
        sizes.append(jax.tree.leaves(call())[0].shape[0])
        return 1e-3

    monkeypatch.setattr(machine, "_best", best)
    rate = machine.matrix_rate("float32", largest=1024, repeats=2)
    assert sizes == [256, 256, 512, 512, 1024, 1024]
    assert rate == 2 * 1024**3 * 30 / 1e-3  # 30 products of a millisecond are a turn


def test_a_machine_can_read_and_multiply():
    found = machine.measure_limits("float32", largest=256, n_bytes=1 << 20, repeats=1)
    assert found.flops_per_s > 1e6 and found.read_bytes_per_s > 1e6 and found.copy_bytes_per_s > 1e6


def test_a_machine_is_described():
    found = machine.describe()
    assert found["cores"] == len(os.sched_getaffinity(0)) and found["memory_gib"] > 0.5
    assert found["jax"] == jax.__version__ and found["backend"] == "cpu" and found["cpu"]


def test_the_fastest_call_counts_and_the_first_does_not(monkeypatch):
    clock = iter([0.0, 9.0, 10.0, 13.0, 20.0, 22.0])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    assert machine._best(lambda: None, 2) == pytest.approx(2.0)
