# SPDX-License-Identifier: Apache-2.0
"""Memory by formula is within a tenth of what XLA takes for the compiled step, on CPU."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.rope import RoPE
from jaxgpt.costs import kv_bytes_per_token
from jaxgpt.flops import count_params
from jaxgpt.model import ModelConfig
from jaxgpt.study.machine import Limits
from jaxgpt.study.planning.ahead import compile_step
from jaxgpt.study.planning.chips import chip, this_cpu
from jaxgpt.study.planning.memory import decode_memory, moments, step_memory
from jaxgpt.study.planning.setting import Setting
from jaxgpt.study.planning.state import state_of
from jaxgpt.train.config import MeshConfig, OptimConfig, TrainConfig

GPT = ModelConfig(
    vocab_size=500, context_length=40, d_model=48, n_layers=2, attention=GQA(4), vocab_multiple=4
)
LLAMA = dataclasses.replace(
    GPT,
    d_model=64,
    context_length=32,
    attention=GQA(8, 2, use_bias=False),
    position=RoPE(),
    norm=RMSNorm(),
    final_norm=RMSNorm(),
    ffn=GatedMLP(96),
    head=Untied(),
)
CPU = this_cpu(Limits("float32", 1e11, 1e10, 1e10), 2.0**34)


def setting(model, mesh=None, device=CPU, **train):
    mesh = MeshConfig(**({"data": 1} | (mesh or {})))
    return Setting(model, OptimConfig(), TrainConfig(**train), mesh, device)


def needs(one, rows=None):
    return step_memory(one, state_of(one), rows).bytes


def xla(one):
    return compile_step(one.model, one.optim, one.train, one.mesh).bytes


CASES = {
    "gpt": (GPT, {"batch_size": 48}),
    "llama": (LLAMA, {"batch_size": 40}),
    "update": (GPT, {"batch_size": 1}),
    "scan": (LLAMA, {"batch_size": 24, "scan": True, "remat": "full"}),
}


def test_one_device():
    one = setting(dataclasses.replace(GPT, n_layers=1), batch_size=48)
    assert needs(one) == pytest.approx(xla(one), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_device_more(name):
    model, train = CASES[name]
    one = setting(model, **train)
    assert needs(one) == pytest.approx(xla(one), rel=0.1)


@pytest.mark.slow
def test_eight_devices():
    meshes = [
        ({"fsdp": 8}, {"batch_size": 32}),
        ({"fsdp": 4, "tensor": 2}, {"batch_size": 32}),
        ({"data": 2, "fsdp": 4}, {"batch_size": 32, "scan": True, "remat": "full"}),
    ]
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(meshes)],
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    for (mesh, train), found in zip(meshes, json.loads(done.stdout), strict=True):
        assert needs(setting(LLAMA, mesh, **train)) == pytest.approx(found, rel=0.1), mesh


def test_the_moments_have_the_bytes_of_the_formulas():
    one = setting(GPT, batch_size=2)
    state = state_of(one)
    by_name = {memory.moment: memory.kinds for memory in moments(one, state)}
    n = 4 * sum(count_params(GPT).values())
    assert state.parameters == n
    # A step that is not finite changes nothing: steps and both moments are there beside the old.
    update = by_name["update"]
    assert update["gradients"] == n and update["update"] == n + state.moments
    loss = by_name["loss"]
    assert loss["logits"] == 80 * 500 * (4 + 4) and loss["batch"] == 80 * 12
    D, F, scores = 48, 192, 4 * 40
    a_layer = 6 * D + 4 * D + 3 * F + scores
    assert loss["activations"] == 4 * 80 * (2 * a_layer + 3 * D)
    assert loss["copies"] == n


def test_recomputation_scan_chunks_and_accumulation_need_less():
    a100 = chip("a100-80")
    plain = setting(LLAMA, device=a100, batch_size=64, kernel="reference")
    kept = {memory.moment: memory.kinds for memory in moments(plain, state_of(plain))}["loss"]
    for less in ({"remat": "dots"}, {"remat": "full"}, {"loss_chunk": 8}, {"accumulate": 4}):
        train = dataclasses.replace(plain.train, **less)
        other = dataclasses.replace(plain, train=train)
        found = {memory.moment: memory.kinds for memory in moments(other, state_of(other))}["loss"]
        both = ("activations", "logits")
        assert sum(found[k] for k in both) < sum(kept[k] for k in both), less
    # XLA's CPU back end drops the barriers of a recomputation that is not in a scan.
    cpu = dataclasses.replace(plain, chip=CPU)
    assert needs(cpu) == needs(
        dataclasses.replace(cpu, train=dataclasses.replace(cpu.train, remat="full"))
    )


@pytest.mark.parametrize("remat", ["none", "full"])
def test_more_devices_never_need_more_and_more_rows_never_less(remat):
    train = {"batch_size": 64, "remat": remat, "kernel": "reference", "scan": True}
    sizes = [needs(setting(LLAMA, {"fsdp": n}, **train)) for n in (2, 8, 16)]
    assert sizes == sorted(sizes, reverse=True)
    one = setting(LLAMA, {"fsdp": 2}, **train)
    state = state_of(one)
    by_rows = [step_memory(one, state, rows).bytes for rows in (1, 2, 3, 4, 7, 8, 16, 40)]
    assert by_rows == sorted(by_rows)


def test_fused_attention_keeps_no_scores():
    long = dataclasses.replace(LLAMA, context_length=4096)
    train = {"batch_size": 1, "dtype": "bfloat16"}
    fused = setting(long, device=chip("h100"), **train)
    assert fused.kernel(long.layers[0], 1) == "cudnn"
    other = setting(long, device=chip("h100"), kernel="reference", **train)
    at_loss = (
        next(memory.kinds for memory in moments(one, state_of(one)) if memory.moment == "loss")
        for one in (other, fused)
    )
    more, less = (kinds["activations"] for kinds in at_loss)
    # Probabilities in float32 and in bfloat16, and no logarithm of each denominator.
    assert more - less == 2 * 8 * 4096 * (4096 * 6 - 4)
    assert setting(long, device=chip("v100"), **train).kernel(long.layers[0], 1) == "chunked"


def test_decoding_takes_weights_and_caches():
    one = setting(LLAMA, {"tensor": 2}, device=chip("h100"), dtype="bfloat16")
    found = decode_memory(one, state_of(one), 8, 100).kinds
    assert found["cache"] == 8 * 100 * kv_bytes_per_token(LLAMA, "bfloat16") / 2
    n = sum(count_params(LLAMA).values())
    assert n / 2 * 2 <= found["weights"] < 1.02 * n / 2 * 2
    int8 = decode_memory(one, state_of(one), 8, 100, "int8").kinds
    assert int8["weights"] == found["weights"] / 2


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["mlp", "gated"])
def test_both_gelus_keep_the_same(model, scan):
    """Their derivatives are written out alike; XLA keeps as many bytes of one as of the other."""

    def taken(activation):
        ffn = dataclasses.replace(model.ffn, activation=activation)
        one = setting(dataclasses.replace(model, ffn=ffn), batch_size=40, scan=scan)
        return needs(one), xla(one)

    (needed, took), (needed_tanh, took_tanh) = map(taken, ("gelu", "gelu_tanh"))
    assert needed == needed_tanh and took == pytest.approx(took_tanh, rel=0.02)


if __name__ == "__main__":
    print(
        json.dumps([xla(setting(LLAMA, mesh, **train)) for mesh, train in json.loads(sys.argv[1])])
    )
