# SPDX-License-Identifier: Apache-2.0
"""Rows C of the faults: what a run notices of itself; what a bad step changes is in test_step."""

import dataclasses
import functools
import math
import random

import jax
import jax.numpy as jnp
import micro
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.rope import RoPE
from jaxgpt.cli.stored import check_average, load_params
from jaxgpt.config import RunConfig
from jaxgpt.data.batches import Batches
from jaxgpt.data.config import DataConfig
from jaxgpt.data.mixture import MixedBatches, Pattern
from jaxgpt.errors import ConfigError, DivergedError
from jaxgpt.flops import train_flops_per_token
from jaxgpt.model import ModelConfig, forward, init_params
from jaxgpt.testing import tiny, worn
from jaxgpt.train import digest as arrays
from jaxgpt.train.config import LoraConfig, OptimConfig, TrainConfig
from jaxgpt.train.files import read_metrics
from jaxgpt.train.health import Health, Speed, Spikes, attention_logits, peak_tflops, usual
from jaxgpt.train.loop import fit
from jaxgpt.train.lora import init_lora
from jaxgpt.train.runfolder import open_run
from jaxgpt.train.stepfolder import read_meta, step_folders

# --- losses ---------------------------------------------------------------------------------------


def test_usual_loss_by_hand():
    """Median 3, deviations 0 1 1 2 96: 1.4826 * 1 * 6 above it, whatever the one outlier."""
    assert usual([1.0, 2.0, 3.0, 4.0, 99.0]) == (3.0, pytest.approx(3 + 6 * 1.4826))
    assert usual([2.0] * 9) == (2.0, pytest.approx(2.1)), "5% where nothing moves"


def found(losses):
    spikes = Spikes()
    return [i for i, loss in enumerate(losses) if spikes.look(loss) is not None]


def test_spikes_are_named_once_and_noise_is_not():
    noise = np.random.default_rng(0).normal(0, 0.1, 5000)
    falling = 3 + 7 * np.exp(-np.arange(5000) / 300) + noise
    assert found(falling) == []
    falling[2000:2010] += 1.5
    falling[3000] += 1.5
    assert found(falling) == [2000, 3000]
    assert found([2.0] * 19 + [9.0]) == [] and found([2.0] * 20 + [9.0]) == [20]


def values(loss=2.0, norm=1.0, ratio=1e-3, finite=1.0, bad=0, skipped=0):
    counts = dict(finite=finite, bad_steps=bad, skipped_steps=skipped)
    return dict(loss_nats=loss, grad_norm=norm, update_ratio=ratio, **counts)


def test_the_line_of_a_skipped_step_and_the_end():
    """Rows C1, C2: a warning each, then rc 3."""
    health, seen = Health(3, lambda step: np.zeros((1, 3))), values(bad=1, skipped=4, finite=0.0)
    seen |= dict(loss_nats=math.nan, grad_norm=math.inf)
    line = health.look(7, seen)
    assert line == "step 7 skipped: loss nan, gradient norm inf (1 of at most 3 in a row)"
    assert seen["skipped"] is True and seen["skipped_steps"] == 4
    assert not {"finite", "bad_steps"} & set(seen)
    alone = health.look(8, values(ratio=math.inf, finite=0.0, bad=2, skipped=5))
    assert "loss 2, gradient norm 1, update inf of the weights (2 of" in alone
    with pytest.raises(DivergedError, match=r"not finite at step 9, the last of 3 in a row: .*inf"):
        health.look(9, values(loss=math.inf, finite=0.0, bad=3, skipped=6))
    assert DivergedError("").exit_code == 3


def test_the_line_of_a_spike_names_the_batch():
    """Row C6: step, loss, usual loss, gradient norm, and which windows."""
    batches = Batches(np.arange(100), 4, 10, seed=0)
    health = Health(3, batches.windows)
    for step in range(1, 31):
        assert health.look(step, values()) is None
    seen = values(loss=7.5, norm=12.25)
    line = health.look(31, seen)
    begins = [int(start) for start in batches.batch(30).tokens_BT[:, 0]]  # ids are places here
    shown = " ".join(map(str, begins[:8]))
    assert line == (
        "step 31: the loss jumped from about 2.0000: loss 7.5, gradient norm 12.25, "
        f"epoch 12 at ids {shown} and 2 more"
    )
    assert seen["spike"] is True and "skipped" not in seen


def test_windows_are_those_of_the_batch():
    texts = [np.arange(100), np.arange(1000, 1200)]
    parts = [Batches(ids, 4, 6, seed=i) for i, ids in enumerate(texts)]
    mixed = MixedBatches(parts, Pattern.of([1.0, 2.0]), 6)
    seen = set()
    for step in range(20):
        for batches in (parts[0], mixed):
            first_B = batches.batch(step).tokens_BT[:, 0]
            windows = batches.windows(step)
            assert windows.shape == (6, 3)
            found = [texts[text][start] for text, _, start in windows]
            np.testing.assert_array_equal(found, first_B)
            seen |= {(int(text), int(epoch)) for text, epoch, _ in windows}
    assert seen >= {(0, 0), (0, 1), (1, 0), (1, 1)}


# --- speed ----------------------------------------------------------------------------------------


def test_rates_of_devices():
    assert peak_tflops("NVIDIA H200", "bfloat16") == peak_tflops(
        "NVIDIA H100 80GB HBM3", "bfloat16"
    )
    assert peak_tflops("NVIDIA H100 PCIe", "bfloat16") == 756
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "float32") == 156
    assert peak_tflops("TPU v5 lite", "bfloat16") == 197 and peak_tflops("TPU v5", "float32") == 459
    assert peak_tflops("cpu", "float32") is None


def test_utilisation_by_hand():
    rates = Speed(full=2e9, causal=1e9, peak_tflops=100.0).metrics(10_000.0)
    assert rates == {
        "model_tflops_per_s_full": 20.0,
        "mfu_full": 0.2,
        "model_tflops_per_s_causal": 10.0,
        "mfu_causal": 0.1,
    }
    cfg = ModelConfig()
    here = Speed.of(cfg, "float32")  # a CPU
    assert here.full == train_flops_per_token(cfg, causal=False) > here.causal
    assert set(here.metrics(1.0)) == {"model_tflops_per_s_full", "model_tflops_per_s_causal"}


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attention",
    [GQA(4, 2, window=3), MLA(4, kv_rank=6, nope_dim=5, rope_dim=4, v_dim=3)],
    ids=["window", "latent"],
)
def test_the_largest_logit_is_among_those_that_count(attention):
    """Against products of queries and keys by hand; the future and what left the window do not."""
    cfg = tiny(attention=attention, position=RoPE(), n_layers=2)
    params = worn(cfg)
    tokens_1T = jax.random.randint(jax.random.key(5), (1, 12), 0, 20)
    got = jax.jit(functools.partial(attention_logits, cfg=cfg))(params, tokens_1T)
    assert list(got) == [f"block_{i}/attention/scores" for i in range(cfg.n_layers)]
    sites = ["*/attention/scores", "*/attention/probs", "*/queries", "*/keys"]
    look = jax.jit(lambda params, ids: forward(cfg, params, ids, capture=sites).captured)
    seen = look(params, tokens_1T)
    beyond = 0
    for site, value in got.items():
        scores = np.asarray(seen[site])[0]
        if isinstance(attention, GQA):
            block = site.removesuffix("scores")
            q, k = (np.asarray(seen[block + name])[0] for name in ("queries", "keys"))
            k = k.repeat(q.shape[1] // k.shape[1], 1)
            scores = np.einsum("tnh,snh->nts", q, k) * q.shape[-1] ** -0.5
        visible = np.asarray(seen[site.replace("scores", "probs")])[0] > 0
        assert value == pytest.approx(scores[visible].max(), rel=1e-4)
        beyond += scores.max() > scores[visible].max()
    assert beyond, "the test can fail: somewhere a larger one is not seen"


def test_attention_without_scores_and_adapters():
    @dataclasses.dataclass(frozen=True)
    class Own(GQA):
        def build(self, dims, name=None):
            return super().build(dims, name="mixer")

    lora = LoraConfig(rank=2)
    cfg = tiny(n_layers=1)
    params = init_params(cfg, jax.random.key(0))
    tokens_1T = jnp.arange(6)[None]
    adapted = init_lora(params, lora, jax.random.key(1))
    plain = attention_logits(params, tokens_1T, cfg=cfg)
    assert attention_logits(adapted, tokens_1T, cfg=cfg, lora=lora) == plain
    own = tiny(n_layers=1, attention=Own(4))
    assert attention_logits(init_params(own, jax.random.key(0)), tokens_1T, cfg=own) == {}


# --- the run --------------------------------------------------------------------------------------

MODEL = dataclasses.replace(micro.MODEL, dropout=0.0)
TRAIN = TrainConfig(
    steps=10, batch_size=4, eval_every=5, save_every=1, log_every=3, keep=99, ema_decay=0.9
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(random.Random(0).choices("abcdefg \n", k=600)))
    return DataConfig(path=str(path))


@pytest.fixture
def bad(monkeypatch):
    """Steps whose weights, and so loss and gradient, are not finite: a set to change."""
    steps, make = set(), Batches.batch

    def batch(self, step, rows=None):
        made = make(self, step, rows)
        weight = np.float32(np.inf if step + 1 in steps else 1)
        return made.replace(weights_BT=made.weights_BT * weight)

    monkeypatch.setattr(Batches, "batch", batch)
    return steps


def train(path, data, **changes):
    folder = open_run(path)
    with folder.lock():
        train = dataclasses.replace(TRAIN, **changes)
        fit(folder, MODEL, data, OptimConfig(lr=1e-2, warmup_steps=2), train)
    return folder


def digest(folder, step):
    return read_meta(step_folders(folder.checkpoints_path)[step], step)["digest"]


def part(digests, name):
    return {path: value for path, value in digests.items() if path.startswith(name)}


def test_a_run_through_bad_steps(tmp_path, data, bad, capsys):
    """C1: counted across a resume; stopped in front of the last straw; nothing bad is saved."""
    bad |= {2, 6, 7, 8}
    for _ in range(2):  # the second goes on from 7 and knows of two
        with pytest.raises(DivergedError, match="at step 8, the last of 3 in a row: loss nan"):
            train(tmp_path / "run", data)
        folder = open_run(tmp_path / "run")
        assert list(step_folders(folder.checkpoints_path)) == [1, 2, 3, 4, 5, 6, 7]
    out = capsys.readouterr().out
    assert "warning: step 2 skipped: loss nan, gradient norm nan (1 of at most 3 in a row)" in out
    assert "warning: step 7 skipped: loss nan, gradient norm nan (2 of at most 3 in a row)" in out
    states = {step: digest(folder, step) for step in (1, 2, 5, 7)}
    for name in ("params", "ema", "rest/opt_state"):
        assert part(states[1], name) == part(states[2], name) != part(states[5], name)
        assert part(states[5], name) == part(states[7], name) and part(states[5], name)
    train(tmp_path / "run", data, max_bad_steps=4)
    records = read_metrics(folder.metrics_path)
    by_step = {r["step"]: r for r in records if "grad_norm" in r}
    assert list(by_step) == [2, 3, 6, 7, 8, 9, 10], "at the interval, and what was skipped"
    skipped = [2, 6, 7, 8]
    assert [step for step, r in by_step.items() if r.get("skipped")] == skipped
    assert by_step[8]["loss_nats"] is None and by_step[10]["skipped_steps"] == 4
    assert by_step[10]["lr"] == pytest.approx(1e-2 * (0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2))
    assert {"param_norm", "update_ratio", "model_tflops_per_s_causal"} <= set(by_step[10])
    scored = [r for r in records if "val_nats_per_token" in r]
    assert [r["step"] for r in scored] == [5, 10]
    for record in scored:
        assert record["val_ema_nats_per_token"] > 0 and record["max_attention_logit"] > -9
        assert record["val_ema_nats_per_token"] != record["val_nats_per_token"]

    plain, average = (
        load_params(folder, dataclasses.replace(MODEL, vocab_size=9), "latest", ema=ema)
        for ema in (False, True)
    )
    stored = digest(folder, 10)
    assert arrays.digest({"params": plain}) == part(stored, "params")
    assert arrays.digest({"ema": average}) == part(stored, "ema")
    train(tmp_path / "whole", data, max_bad_steps=4)
    assert digest(open_run(tmp_path / "whole"), 10) == stored


def test_a_spike_is_said_and_recorded(tmp_path, data, monkeypatch, capsys):
    """Row C6: targets that the text hardly has, in step 40."""
    path = tmp_path / "text.txt"
    path.write_text("ab" * 400 + "cd")
    make = Batches.batch

    def batch(self, step, rows=None):
        made = make(self, step, rows)
        return made.replace(targets_BT=made.targets_BT | 2) if step == 39 else made

    monkeypatch.setattr(Batches, "batch", batch)
    plain = dict(ema_decay=None, save_every=99, eval_every=99, log_every=99)
    folder = train(tmp_path / "run", DataConfig(path=str(path)), steps=42, **plain)
    lines = [line for line in capsys.readouterr().out.splitlines() if "jumped" in line]
    assert len(lines) == 1 and lines[0].startswith("warning: step 40: the loss jumped from about")
    assert "epoch 3 at ids" in lines[0]
    records = [r for r in read_metrics(folder.metrics_path) if "grad_norm" in r]
    assert [(r["step"], r.get("spike")) for r in records] == [(40, True), (42, None)]


def test_wrong_knobs_are_refused():
    for wrong in ({"ema_decay": 1.0}, {"ema_decay": 0.0}, {"z_coef": -1.0}, {"z_coef": math.nan}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
            TrainConfig(**wrong)
    with pytest.raises(ConfigError, match="max_bad_steps=0 is too small"):
        TrainConfig(max_bad_steps=0)
    with pytest.raises(ConfigError, match="--ema is for a run that keeps a moving average"):
        check_average(RunConfig())
    check_average(RunConfig(train=TrainConfig(ema_decay=0.9)))
