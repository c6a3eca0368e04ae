# SPDX-License-Identifier: Apache-2.0
"""Devices by name: every row has its source, and figures that can be; a wrong name is told."""

import pytest

from jaxgpt.errors import ConfigError
from jaxgpt.study.machine import Limits
from jaxgpt.study.planning.chips import CHIPS, chip, this_cpu
from jaxgpt.train.health import peak_tflops

KINDS = {
    "a100-80": "NVIDIA A100",
    "h100": "NVIDIA H100",
    "h200": "NVIDIA H200",
    "tpu-v4": "TPU v4",
    "tpu-v5e": "TPU v5 lite",
    "tpu-v5p": "TPU v5p",
    "tpu-v6e": "TPU v6 lite",
}


def test_every_row_says_where_it_is_from():
    assert len(CHIPS) >= 11
    for name, one in CHIPS.items():
        assert one.name == name and one.source.startswith("https://")
        assert 1e13 < one.float32_flops_per_s <= one.bfloat16_flops_per_s < 1e16
        assert 1e10 < one.memory_bytes < 1e12 and 5e11 < one.memory_bytes_per_s < 1e13
        assert one.network_bytes_per_s <= one.link_bytes_per_s < one.memory_bytes_per_s
        assert (one.platform == "gpu") == (one.capability is not None)


@pytest.mark.parametrize("name", KINDS)
def test_peaks_are_those_that_runs_are_measured_by(name):
    for dtype in ("bfloat16", "float32"):
        assert chip(name).flops_per_s(dtype) == pytest.approx(
            1e12 * (peak_tflops(KINDS[name], dtype) or 0), rel=0.002
        )


def test_figures_of_the_data_sheets():
    h100 = chip("h100")
    assert (h100.memory_bytes, h100.memory_bytes_per_s) == (80e9, 3.35e12)
    assert h100.link_bytes_per_s == 450e9  # of 900 GB/s, half in each direction
    assert h100.network_bytes_per_s == 50e9  # 400 Gbit/s
    assert chip("tpu-v4").memory_bytes == 32 * 2**30


def test_a_wrong_name_gets_the_nearest():
    with pytest.raises(ConfigError, match="no device 'H1000'; fix: did you mean h100"):
        chip("H1000")
    with pytest.raises(ConfigError, match=r"fix: one of v100, .*, cpu"):
        chip("!")


def test_this_machine_is_what_was_measured():
    one = this_cpu(Limits("float32", 1e11, 2e10, 1.5e10), 2.0**33)
    assert one.flops_per_s("float32") == 1e11 and one.matrix_share == 1.0
    assert (one.platform, one.memory_bytes, one.memory_bytes_per_s) == ("cpu", 2.0**33, 1.5e10)
