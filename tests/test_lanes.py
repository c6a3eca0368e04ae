# SPDX-License-Identifier: Apache-2.0
"""Lanes: each is the run that it would be alone."""

import dataclasses
import functools
import os
import random
import shutil
import signal

import jax
import numpy as np
import pytest
from micro import MODEL as WITH_BIASES
from micro import OPTIM

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.init import Normal
from jaxgpt.data.config import DataConfig
from jaxgpt.errors import ConfigError, DivergedError, Interrupted
from jaxgpt.model import param_shapes
from jaxgpt.train.checkpoint import Checkpoints
from jaxgpt.train.config import TrainConfig
from jaxgpt.train.files import read_metrics
from jaxgpt.train.lanes import fit_lanes
from jaxgpt.train.lanetrainer import Lane
from jaxgpt.train.loop import fit
from jaxgpt.train.optimizers import AdamW
from jaxgpt.train.runfolder import open_run
from jaxgpt.train.stepfolder import read_meta, step_folders
from jaxgpt.train.texts import Texts

MODEL = dataclasses.replace(WITH_BIASES, attention=GQA(2, use_bias=False))
"""A bias of keys has no gradient but rounding, and AdamW makes steps of it."""
TRAIN = TrainConfig(steps=8, batch_size=4, dispatch=3, eval_every=4, save_every=4, log_every=1)
TOLERANCE = 1e-5
"""Relative, after 8 steps in float32: products with an axis of lanes may add up in other orders.

Ten times that of the largest entry for parameters: AdamW makes steps of gradients however small.
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(random.Random(0).choices("abcdefg \n", k=600)))
    return DataConfig(path=str(path))


def lane(path, data, *, model=MODEL, optim=OPTIM, **changes):
    return Lane(open_run(path), model, data, optim, dataclasses.replace(TRAIN, **changes))


def alone(path, lane):
    folder = open_run(path)
    fit(folder, lane.model, lane.data, lane.optim, lane.train)
    return folder


def series(folder, key):
    return np.array([r[key] for r in read_metrics(folder.metrics_path) if key in r])


def params(folder, step=8):
    """The arrays of a checkpoint as they are on the disk."""
    with Checkpoints(folder.checkpoints_path, read_only=True) as checkpoints:
        model = dataclasses.replace(MODEL, vocab_size=9)
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), param_shapes(model)
        )
        return checkpoints.restore_params(shapes, step=step).params


def digest(folder, step=8):
    return read_meta(step_folders(folder.checkpoints_path)[step], step)["digest"]


def assert_same_run(lane, folder):
    """The same batches, keys and rates, and so the same numbers up to rounding."""
    for key in ("loss_nats", "val_nats_per_token", "grad_norm", "lr", "max_attention_logit"):
        theirs = series(folder, key)
        assert len(theirs) > 1
        np.testing.assert_allclose(series(lane.folder, key), theirs, rtol=TOLERANCE, err_msg=key)
    for key in ("tokens", "n_tokens"):
        assert series(lane.folder, key).tolist() == series(folder, key).tolist()
    leaves = map(jax.tree.leaves, (params(lane.folder), params(folder)))
    for ours, theirs in zip(*leaves, strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=10 * TOLERANCE * scale)


def test_each_lane_is_the_run_alone(tmp_path, data, capsys):
    """Seeds, with batches and dropout of their own; the folder of a lane is that of a run."""
    lanes = [lane(tmp_path / f"lanes/seed{s}", data, seed=s) for s in (3, 4)]
    fit_lanes(lanes, {})
    said = capsys.readouterr().out
    assert "lanes: 2 lanes on " in said and "saved step 8 of 2 lanes" in said
    assert "mean of 2 lanes, standard deviation" in said
    for one in lanes:
        assert_same_run(one, alone(tmp_path / f"alone{one.train.seed}", one))
    assert not np.allclose(*(series(one.folder, "loss_nats") for one in lanes), rtol=1e-3)
    before = [digest(one.folder) for one in lanes]
    fit(lanes[0].folder, MODEL, data, OPTIM, dataclasses.replace(lanes[0].train, steps=9))
    assert [digest(one.folder) for one in lanes] == before
    assert list(step_folders(lanes[0].folder.checkpoints_path)) == [4, 8, 9]


@pytest.mark.slow
def test_numbers_and_starts_differ_on_one_set_of_batches(tmp_path, data):
    """A rate, decay, clipping, a moment's memory, and the size of fresh weights."""
    changed = [
        dict(lr=1e-2, weight_decay=0.1, clip=1.0, method=AdamW(beta2=0.99)),
        dict(lr=3e-2, weight_decay=0.5, clip=0.1, method=AdamW(beta2=0.9)),
    ]
    optims = [dataclasses.replace(OPTIM, schedule="wsd", **each) for each in changed]
    models = [MODEL, dataclasses.replace(MODEL, init=Normal(std=0.1))]
    seeds = dict(batch_seed=7, ema_decay=0.9)
    lanes = [
        lane(tmp_path / f"lanes/{i}", data, model=models[i], optim=optims[i], seed=i, **seeds)
        for i in range(2)
    ]
    values = {
        "optim.lr": [1e-2, 3e-2],
        "optim.weight_decay": [0.1, 0.5],
        "optim.clip": [1.0, 0.1],
        "optim.method.beta2": [0.99, 0.9],
    }
    fit_lanes(lanes, values)
    assert_same_run(lanes[1], alone(tmp_path / "alone", lanes[1]))


def stopping(monkeypatch, after):
    """A signal during an evaluation."""
    evaluate, calls = Texts.evaluate, []

    def stop(self, *args, **more):
        calls.append(1)
        if len(calls) == after:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, *args, **more)

    monkeypatch.setattr(Texts, "evaluate", stop)


@pytest.mark.slow
def test_lanes_go_on_to_the_same_bits(tmp_path, data, monkeypatch):
    """A signal in an evaluation: all are saved, and the evaluation is made up for."""
    make = [functools.partial(lane, data=data, seed=s) for s in (0, 1)]
    whole = [each(tmp_path / f"whole/{s}") for s, each in enumerate(make)]
    fit_lanes(whole, {})
    parts = [each(tmp_path / f"parts/{s}") for s, each in enumerate(make)]
    with monkeypatch.context() as patched:
        stopping(patched, after=2)
        with pytest.raises(Interrupted, match="after step 4, which is saved"):
            fit_lanes(parts, {})
    fit_lanes(parts, {})
    shutil.rmtree(step_folders(parts[1].folder.checkpoints_path)[8])  # killed between two saves
    fit_lanes(parts, {})
    for one, other in zip(parts, whole, strict=True):
        assert digest(one.folder) == digest(other.folder)
        for key in ("loss_nats", "val_nats_per_token"):
            assert series(one.folder, key).tolist() == series(other.folder, key).tolist()


@pytest.mark.slow
def test_a_lane_that_diverges_is_left_behind(tmp_path, data, capsys):
    optims = [dataclasses.replace(OPTIM, lr=lr, clip=None) for lr in (1e-2, 1e38)]
    more = dict(max_bad_steps=2, save_every=2)
    lanes = [
        lane(tmp_path / f"lanes/{name}", data, optim=optim, **more)
        for name, optim in zip(("good", "bad"), optims, strict=True)
    ]
    ended = {}
    fit_lanes(lanes, {"optim.lr": [1e-2, 1e38]}, on_diverged=ended.__setitem__)
    said = capsys.readouterr().out
    assert list(ended) == ["bad"] and "bad diverged, 1 lanes go on: " in said
    assert "bad: warning: step 1 skipped" in said
    assert list(step_folders(lanes[0].folder.checkpoints_path)) == [4, 6, 8]
    assert 8 not in step_folders(lanes[1].folder.checkpoints_path)
    fit_lanes(lanes, {"optim.lr": [1e-2, 1e38]}, diverged=ended)
    assert "all lanes are finished at step 8" in capsys.readouterr().out
    worse = [lane(tmp_path / f"worse/{i}", data, optim=optims[1], seed=i, **more) for i in (0, 1)]
    with pytest.raises(DivergedError):
        fit_lanes(worse, {})


def test_what_decides_what_is_computed_cannot_differ(tmp_path, data):
    lanes = [lane(tmp_path / f"{i}", data) for i in (0, 1)]
    with pytest.raises(ConfigError, match=r"train\.z_coef cannot differ between lanes"):
        fit_lanes(lanes, {"train.z_coef": [0.0, 1e-4]})


def test_batches_may_have_a_seed_of_their_own():
    assert TrainConfig(seed=3).order == 3 and TrainConfig(seed=3, batch_seed=0).order == 0
    for bad in (-1, 2**32):
        with pytest.raises(ConfigError, match="batch_seed="):
            TrainConfig(batch_seed=bad)
