# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys

import jax
import pytest

from jaxgpt.errors import ConfigError
from jaxgpt.train import devices


def test_devices_in_words():
    assert devices.describe_devices() == f"{jax.device_count()} x cpu (jax {jax.__version__})"


def test_the_most_memory_so_far(monkeypatch):
    before = devices.peak_bytes()["peak_host_bytes"]
    bytearray(64 << 20)
    assert 1e7 < before <= devices.peak_bytes()["peak_host_bytes"]
    assert "peak_device_bytes" not in devices.peak_bytes(), "a CPU has the host's alone"

    class Device:
        def memory_stats(self):
            return {"peak_bytes_in_use": 7}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(), Device()])
    assert devices.peak_bytes()["peak_device_bytes"] == 7.0


SCRIPT = """
import sys
from jaxgpt.errors import ConfigError
from jaxgpt.train.devices import *
try:
    choose_device(eval(sys.argv[1]))
    print(describe_devices())
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "platforms, device, line",
    [
        ("nonsense", "None", "no device for JAX_PLATFORMS=nonsense: Unable to initialize"),
        ("", "'gpu'", 'fix: pip install -U "jax[cuda12]"'),
        ("cuda", "'cpu'", "2 x cpu"),
    ],
)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a machine with another device")
def test_a_device_that_is_not_there_is_one_line(platforms, device, line):
    flags = "--xla_force_host_platform_device_count=2"
    env = {**os.environ, "JAX_PLATFORMS": platforms, "XLA_FLAGS": flags}
    command = [sys.executable, "-c", SCRIPT, device]
    out = subprocess.run(command, env=env, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert line in out.stdout and out.stdout.count("\n") == 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a machine with another device")
def test_an_idle_gpu_is_named_once(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", "")
        assert devices.unused_gpu_warning() is None
        devices.DRIVER.touch()
        warning = devices.unused_gpu_warning()
        assert warning and 'pip install -U "jax[cuda12]"' in warning and "\n" not in warning
        jax.config.update("jax_platforms", "cpu")
        assert devices.unused_gpu_warning() is None, "the CPU was asked for"
    finally:
        jax.config.update("jax_platforms", before)


def test_a_back_end_that_fails_is_a_config_error(monkeypatch):
    def fail():
        raise RuntimeError("Unable to\ninitialize")

    monkeypatch.setattr(devices.jax, "devices", fail)
    with pytest.raises(ConfigError, match="Unable to initialize") as caught:
        devices.describe_devices()
    assert caught.value.exit_code == 2


def test_only_cpu_is_told_without_starting_jax(monkeypatch):
    assert devices.only_cpu("cpu") and not devices.only_cpu("gpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert devices.only_cpu(None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "jax_cuda12_plugin")
    assert not devices.only_cpu(None)
