# SPDX-License-Identifier: Apache-2.0
"""Which kernel a call gets, on devices that need not be here."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxgpt.errors import ConfigError
from jaxgpt.kernels import Call, choose
from jaxgpt.kernels.choice import NAMES, SCORES_LIMIT_BYTES, check_name, refusal
from jaxgpt.kernels.dispatch import KERNELS
from jaxgpt.masks import Visibility

HOPPER = Call(32, 1024, 1024, 12, 64, dtype="bfloat16", device="gpu", capability=(9, 0))
LONG = Call(batch=1, queries=16_384, keys=16_384, n_heads=8, head_dim=64)


def test_small_calls_go_to_the_reference_and_large_ones_to_the_chunked_kernel():
    at_limit = Call(batch=1, queries=2048, keys=2048, n_heads=4, head_dim=64)
    assert 4 * 2048 * 2048 * 4 == SCORES_LIMIT_BYTES
    assert choose(at_limit).kernel == "reference"
    above = choose(dataclasses.replace(at_limit, keys=2049))
    assert str(above) == ("chunked (scores of more than 64 MiB; not cudnn: no NVIDIA GPU but cpu)")
    assert choose(LONG).kernel == "chunked"


def test_decoding_stays_with_the_reference_whatever_the_cache():
    one = Call(batch=256, queries=1, keys=32_768, n_heads=32, head_dim=64, plain=False)
    assert 256 * 32_768 * 32 * 4 > SCORES_LIMIT_BYTES
    assert choose(one).kernel == "reference"


@pytest.mark.parametrize("capability, widest", [((8, 0), 128), ((9, 0), 256), ((10, 0), 256)])
def test_cudnn_serves_plain_half_precision_attention(capability, widest):
    call = dataclasses.replace(HOPPER, capability=capability)
    for fits in (
        {},
        {"dtype": "float16"},
        {"head_dim": widest},
        {"head_dim": 128, "value_dim": 64},
    ):
        assert choose(dataclasses.replace(call, **fits)).kernel == "cudnn"
    assert refusal("cudnn", dataclasses.replace(call, head_dim=widest + 8))


@pytest.mark.parametrize(
    "change, why",
    [
        ({"device": "tpu", "capability": None}, "no NVIDIA GPU but tpu"),
        ({"capability": (7, 5)}, "compute capability 7.5, below 8.0"),
        ({"dtype": "float32"}, "float32 instead of bfloat16 or float16"),
        ({"dtype": "mixed"}, "mixed instead of bfloat16 or float16"),
        ({"head_dim": 60}, "head_dim=60 is no multiple of 8 up to 256"),
        ({"value_dim": 512}, "values of width 512 over keys of 64"),
        ({"plain": False}, "padding, segments, a prefix or a cache"),
        ({"extras": frozenset({"softcap", "dropout"})}, "the call has dropout and softcap"),
    ],
)
def test_what_keeps_a_call_from_cudnn_is_said(change, why):
    call = dataclasses.replace(HOPPER, **change)
    choice = choose(call)
    assert choice.kernel == "chunked" and choice.reason.endswith(f"not cudnn: {why}")
    with pytest.raises(ConfigError) as error:
        choose(dataclasses.replace(call, kernel="cudnn"))
    assert why in str(error.value) and "'reference'" in str(error.value)
    assert "'cudnn'" not in (error.value.fix or "")


@pytest.mark.parametrize(
    "change, why",
    [
        ({"dtype": "float64"}, "float64 arrays"),
        ({"extras": frozenset({"bias", "sinks"})}, "the call has sinks"),
        ({"value_dim": 128}, "values of width 128 over keys of 64"),
    ],
)
def test_what_xla_cannot_do(change, why):
    call = dataclasses.replace(LONG, kernel="xla", **change)
    assert refusal("xla", call) == why
    with pytest.raises(ConfigError, match=why):
        choose(call)
    assert choose(dataclasses.replace(LONG, kernel="xla", plain=False)).reason == "asked for"


def test_names():
    assert set(KERNELS) == set(NAMES)
    check_name("auto")
    with pytest.raises(ConfigError, match="no attention kernel 'flash'; fix: one of auto, refer"):
        choose(dataclasses.replace(LONG, kernel="flash"))


def test_a_call_is_read_from_shapes_alone():
    q, k, v = (
        jax.ShapeDtypeStruct((2, 5, n, w), jnp.bfloat16) for n, w in ((4, 8), (2, 8), (2, 6))
    )
    call = Call.of(q, k, v, Visibility.full(2, 5), bias=True, sinks=False)
    want = Call(2, 5, 5, 4, 8, 6, "bfloat16", extras=frozenset({"bias"}))
    assert call == want
    mixed = Call.of(q, k, jax.ShapeDtypeStruct(v.shape, jnp.float32), Visibility.full(2, 5))
    assert mixed.dtype == "mixed"


def test_the_default_device_decides():
    q = jax.ShapeDtypeStruct((1, 4, 1, 8), jnp.float32)
    for device in (jax.devices("cpu")[0], "cpu"):
        with jax.default_device(device):
            assert Call.of(q, q, q, Visibility.full(1, 4)).device == "cpu"
