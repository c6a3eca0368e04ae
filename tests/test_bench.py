# SPDX-License-Identifier: Apache-2.0
import dataclasses

import jax
import micro
import numpy as np

from jaxgpt.boxes.head import Untied
from jaxgpt.costs import Cost
from jaxgpt.flops import count_params
from jaxgpt.study import bench
from jaxgpt.study.bench import Decoding, Timing, Training, alternate, bytes_per_number, compared
from jaxgpt.study.machine import Limits
from jaxgpt.train.config import TrainConfig

CFG = dataclasses.replace(micro.MODEL, vocab_size=40, dropout=0.0)


def test_timings_are_summed_up():
    timing = Timing((3.0, 2.0, 7.0))
    assert (timing.best, timing.median, timing.spread) == (2.0, 3.0, 2.5)


def test_turns_alternate():
    order = []

    def turn(name, seconds):
        def run():
            order.append(name)
            return seconds

        return run

    found = alternate({"a": turn("a", 1.0), "b": turn("b", 2.0)}, rounds=3)
    assert order == ["a", "b"] * 3
    assert found == {"a": Timing((1.0,) * 3), "b": Timing((2.0,) * 3)}
    order.clear()
    alternate({"a": turn("a", 1.0)}, seconds=0.0)
    assert order == ["a"]  # at least one round


def test_a_timing_beside_the_limits():
    cost = Cost(flops=8e9, weight_bytes=1e9, cache_bytes=2e9, other_bytes=1e9)
    limits = Limits("float32", flops_per_s=16e9, read_bytes_per_s=4e9, copy_bytes_per_s=1.0)
    found = compared(Timing((2.0, 2.0, 4.0)), cost, limits, 10)
    assert found == {
        "ms_median": 2000.0,
        "ms_best": 2000.0,
        "spread": 1.0,
        "rounds": 3,
        "tokens_per_s": 5.0,
        "gflops": 8.0,
        "gbytes": 4.0,
        "gflops_per_s": 4.0,
        "share_of_matrix_rate": 0.25,
        "gbytes_per_s": 2.0,
        "share_of_read_rate": 0.5,
        "share_of_limit": 0.5,  # a second of reading against half of one of products
    }


def test_training_trains():
    train, dispatch = TrainConfig(batch_size=2, dispatch=2), 2
    steps = Training(CFG, micro.OPTIM, train)
    before = jax.device_get(steps._state)
    assert before.step == dispatch and steps.compile_s > 0
    assert steps.run(3) > 0
    assert steps._state.step == dispatch + 4  # whole dispatches
    table = [state.params["embed"]["embedding"] for state in (before, steps._state)]
    assert not np.array_equal(*table)


def test_decoding_times_both_parts(monkeypatch):
    asked = []
    stream = bench.stream

    def counted(*args, **options):
        asked.append((args[2], options["max_new_tokens"]))
        return stream(*args, **options)

    monkeypatch.setattr(bench, "stream", counted)
    text = Decoding(CFG, bench.random_params(CFG), batch=2, prompt_tokens=5)
    assert text.prefill() > 0
    first_s, step_s = text.decode(4)
    assert first_s > 0 and step_s > 0
    assert [new for _, new in asked] == [1, 4]
    assert [len(prompt) for prompt in asked[0][0]] == [5, 5] and asked[0][0] == asked[1][0]


def test_bytes_of_weights_are_those_that_are_read():
    tied, untied = (
        dataclasses.replace(CFG, head=head, vocab_multiple=1) for head in (CFG.head, Untied())
    )
    params = bench.random_params(tied)
    assert bytes_per_number(tied, params) == 4.0
    half = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    assert bytes_per_number(tied, half) == 2.0
    # An untied table is looked up, whatever it is kept in.
    params = dict(bench.random_params(untied))
    params["embed"] = jax.tree.map(lambda x: x.astype("bfloat16"), params["embed"])
    assert bytes_per_number(untied, params) == 4.0
    assert count_params(untied)["embed"] > 0
