# SPDX-License-Identifier: Apache-2.0
"""Reference curves: who leaves them, and who does not."""

import math

import numpy as np
import pytest

from jaxgpt.errors import ConfigError
from jaxgpt.study import curves
from jaxgpt.study.curves import Watch, band, losses_of, read_reference, reference_of, smoothed

STEPS = range(10, 801, 10)


def simulated(rng, shift=0.0, since=0):
    """A loss that falls: an offset of the seed, a drift, the noise of batches."""
    drift, seed, found = 0.0, 0.01 * rng.normal(), {}
    for step in STEPS:
        drift = 0.9 * drift + 0.004 * rng.normal()
        mean = 1.5 + 3 * math.exp(-5 * step / 800) + (shift if step > since else 0.0)
        found[step] = mean + seed + drift + 0.04 * rng.normal()
    return found


def leaves(training, curve):
    watch = Watch(training)
    lines = [line for step in sorted(curve) if (line := watch.look(step, curve[step]))]
    assert len(lines) == (watch.left is not None)  # said once
    return watch.left, lines


@pytest.mark.parametrize("n", [5, 8])
def test_seeds_left_out_stay_inside_and_worse_runs_do_not(n):
    rng = np.random.default_rng(n)
    false, found = 0, []
    for _ in range(60):
        training = band([smoothed(simulated(rng)) for _ in range(n)], curves.NEIGHBOURS)
        false += leaves(training, simulated(rng))[0] is not None
        found.append(leaves(training, simulated(rng, shift=0.15, since=200))[0])
    assert false <= 0.05 * 60
    early = [step for step in found if step is not None]
    assert len(early) >= 57 and min(early) > 200 and np.median(early) <= 300


def test_one_line_says_where_it_leaves():
    rng = np.random.default_rng(0)
    training = band([smoothed(simulated(rng)) for _ in range(8)], curves.NEIGHBOURS)
    left, lines = leaves(training, simulated(rng, shift=1.0, since=100))
    assert left == 130 and len(lines) == 1  # three records behind 100
    assert lines[0].startswith("step 130: the loss has left the reference curve: ")
    assert ", above " in lines[0] and lines[0].endswith(" for 3 records")
    assert ", below " in leaves(training, simulated(rng, shift=-1.0))[1][0]
    assert leaves(training, dict.fromkeys(STEPS, math.nan))[0] == 30
    assert Watch(training).look(5, math.nan) is None  # no point of the curve


def test_two_records_outside_are_no_alarm():
    training = curves.Band(list(STEPS), [2.0] * len(STEPS), [0.01] * len(STEPS), 8)
    watch = Watch(training)
    far = {100: 2.3, 120: 1.7}  # the mean of five records is outside at 100 and 110
    assert [watch.look(step, far.get(step, 2.0)) for step in STEPS] == [None] * len(STEPS)


def test_one_validation_loss_outside_is_enough():
    known = curves.Band([200, 400], [1.8, 1.6], [0.01, 0.01], 6)
    watch = Watch.validation(known)
    assert watch.look(200, 1.8 + 0.9 * 0.01 * curves.limit(known, 1)) is None
    line = watch.look(400, 1.7)
    assert line and line.startswith("step 400: the validation loss has left the reference curve: ")
    lucky = curves.cautious(curves.Band([1, 2, 3], [0.0] * 3, [0.03, 0.0, 0.01], 6))
    assert lucky.sd == pytest.approx([0.03, (1e-3 / 3) ** 0.5, 0.01])
    rng, false = np.random.default_rng(0), 0
    for _ in range(1000):
        runs = [{step: rng.normal() for step in (1, 2, 3, 4)} for _ in range(7)]
        watch = Watch.validation(band(runs[1:]))
        false += any([watch.look(step, runs[0][step]) for step in (1, 2, 3, 4)])
    assert false <= 40  # 2.5% are meant; the binomial's fifth deviation is 50


def test_smoothing_and_bands():
    assert smoothed({10: 1.0, 30: 3.0, 20: 5.0}, window=2) == {10: 1.0, 20: 3.0, 30: 4.0}
    found = band([{1: 1.0, 2: 2.0, 3: 0.0}, {1: 3.0, 2: 2.0}])
    assert (found.steps, found.mean, found.n) == ([1, 2], [2.0, 2.0], 2)
    assert found.sd == pytest.approx([2**0.5, 0])
    pooled = band([{1: 1.0, 2: 2.0}, {1: 3.0, 2: 2.0}], pooled=1)
    assert pooled.sd == pytest.approx([1, 1])
    with pytest.raises(ConfigError, match="two runs"):
        band([{1: 1.0}])
    records = [{"step": 1, "loss_nats": None}, {"step": 2, "loss_nats": 1}, {"step": 2}]
    assert losses_of(records, "loss_nats") == {1: pytest.approx(math.nan, nan_ok=True), 2: 1.0}


def test_a_file_of_a_few_thousand_bytes(tmp_path):
    rng = np.random.default_rng(0)
    runs = []
    for _ in range(5):
        own = simulated(rng)
        records = [{"step": step, "loss_nats": loss} for step, loss in own.items()]
        score = 1.6 + 0.01 * rng.normal()
        runs.append([*records, {"step": 800, "val_nats_per_token": score}])
    made = reference_of("tiny", {"train": {"steps": 800}}, {"source": "abc"}, runs)
    assert made.alarms == 0
    path = tmp_path / "tiny.json"
    made.write(path)
    assert path.stat().st_size < 5000
    found = read_reference(path)
    assert found.training.mean == pytest.approx(made.training.mean, abs=1e-4)
    assert found.training.sd == pytest.approx(made.training.sd, rel=1e-2)
    assert (found.name, found.facts, found.validation.steps) == ("tiny", {"source": "abc"}, [800])
    with pytest.raises(ConfigError, match="three at least"):
        reference_of("tiny", {}, {}, runs[:2])
    for damage in ("{}", "[1]", "{"):
        path.write_text(damage)
        with pytest.raises(ConfigError, match="cannot read the reference curve"):
            read_reference(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_reference(tmp_path / "none.json")
