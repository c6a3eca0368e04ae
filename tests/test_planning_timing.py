# SPDX-License-Identifier: Apache-2.0
"""Times by roofline: FLOPs of the costs, bytes of rings, and what is waited for."""

import dataclasses

import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.costs import total, train_costs
from jaxgpt.flops import train_flops_per_token
from jaxgpt.model import ModelConfig
from jaxgpt.study.planning.chips import chip
from jaxgpt.study.planning.setting import Setting
from jaxgpt.study.planning.state import state_of
from jaxgpt.study.planning.timing import (
    EFFICIENCY,
    Efficiency,
    Step,
    decode_time,
    device_costs,
    step_time,
)
from jaxgpt.study.planning.traffic import Traffic, link, traffic
from jaxgpt.train.config import MeshConfig, OptimConfig, TrainConfig

MODEL = ModelConfig(vocab_size=512, context_length=64, d_model=64, n_layers=2, attention=GQA(8))


def setting(mesh=None, device="h100", model=MODEL, **train):
    train = {"batch_size": 32, "dtype": "bfloat16", **train}
    mesh = MeshConfig(**(mesh or {}))
    return Setting(model, OptimConfig(), TrainConfig(**train), mesh, chip(device))


def flops(one):
    return sum(cost.flops for cost in device_costs(one, state_of(one)).values())


def test_gpt2_on_an_h200_is_what_the_efficiency_was_fitted_on():
    gpt2 = ModelConfig(vocab_size=50_304)
    one = setting(device="h200", model=gpt2, batch_size=64)
    assert step_time(one, state_of(one)).tokens_per_s == pytest.approx(516_000, rel=0.02)


def test_devices_share_the_flops():
    alone = flops(setting(kernel="reference"))
    assert alone == total(train_costs(MODEL, 32)).flops
    assert flops(setting({"fsdp": 4, "tensor": 2}, kernel="reference")) == alone / 8
    fused = flops(setting())
    assert fused == pytest.approx(32 * 64 * train_flops_per_token(MODEL, causal=True))


def test_what_is_computed_again_counts():
    once = flops(setting())
    costs = device_costs(setting(), state_of(setting()))
    layers = once - costs["head"].flops
    assert flops(setting(remat="full")) - once == pytest.approx(layers / 3)
    assert flops(setting(remat="dots")) - once == pytest.approx(costs["scores"].flops / 3)
    assert flops(setting(loss_chunk=8)) - once == pytest.approx(costs["head"].flops / 3)


def test_the_optimizer_moves_what_a_device_stores():
    for mesh in ({}, {"fsdp": 8}):
        one = setting(mesh)
        state = state_of(one)
        moved = device_costs(one, state)["optimizer"].bytes
        assert moved == 4 * state.trained + 2 * state.moments


def test_rings_send_what_they_must():
    one = setting({"fsdp": 8})
    state = state_of(one)
    (found,) = traffic(one, state)
    whole = sum(p.whole * p.times for p in state.params if p.split)
    vectors = sum(p.stored * p.times for p in state.params if not p.split)
    # Gathered in bfloat16, gradients scattered in float32, vectors summed.
    assert found.bytes == pytest.approx(7 / 8 * whole * (0.5 + 1) + 2 * 7 / 8 * vectors)
    (data,) = traffic(setting({"data": 8}), state_of(setting({"data": 8})))
    assert data.bytes == pytest.approx(2 * 7 / 8 * (whole + vectors))
    (tensor,) = traffic(setting({"tensor": 8}), state_of(setting({"tensor": 8})))
    positions = 7 / 8 * 64 * 64 * (2 + 4)  # are split over tensor too, and gathered
    assert tensor.bytes == 2 * 7 / 8 * 32 * 64 * 64 * 2 * (4 * 2 + 2) + positions
    (context,) = traffic(setting({"context": 4}), state_of(setting({"context": 4})))
    assert context.axis == "context" and context.bytes > 3 * 32 * 16 * 2 * 64 * 2 * 2 * 2


def test_accumulation_gathers_again():
    mesh = {"fsdp": 4}
    once, twice = (
        traffic(s, state_of(s))[0].bytes for s in (setting(mesh), setting(mesh, accumulate=2))
    )
    assert twice == 2 * once


def test_links_within_a_host_and_beyond():
    one = setting({"fsdp": 4, "tensor": 8})
    assert link(one, "tensor") == (450e9, True)
    assert link(one, "fsdp") == (50e9, False)  # each device its own network link
    assert link(setting({"fsdp": 8}), "fsdp") == (450e9, True)
    assert link(setting({"fsdp": 16}), "fsdp") == (400e9, False)  # a ring with eight links
    assert link(setting({"fsdp": 16}, "tpu-v5e"), "fsdp") == (200e9, True)


def test_parameters_travel_while_devices_compute():
    def step(**sent):
        links = tuple(Traffic(axis, seconds, 1.0, True) for axis, seconds in sent.items())
        return Step(3.0, 1.0, links, tokens=100, model_flops=10.0, peak=10.0)

    assert step().seconds == 4.0 and step().limit == "compute"
    assert step(fsdp=3.0).seconds == 4.0
    assert step(fsdp=9.0).seconds == 9.0 and step(fsdp=9.0).limit == "network"
    assert step(tensor=1.0, data=5.0).seconds == 6.0
    assert step(tensor=1.0).tokens_per_s == 20.0 and step().mfu == 0.25


def test_efficiency_scales_what_it_is_for():
    one = setting(model=ModelConfig())
    state, given = state_of(one), EFFICIENCY["gpu"]
    half = dataclasses.replace(given, products=given.products / 2)
    assert step_time(one, state, half).seconds > step_time(one, state).seconds
    slow = Efficiency(given.products, 1e-6)
    assert step_time(one, state, slow).limit == "memory"


def test_decoding_reads_weights_and_caches():
    one = setting()
    found = decode_time(one, 1, 64)
    assert found.limit == "memory"
    assert decode_time(one, 64, 64).tokens_per_s > 5 * found.tokens_per_s
    assert decode_time(one, 1, 64, "int8").seconds < found.seconds
