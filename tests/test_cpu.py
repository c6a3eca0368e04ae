# SPDX-License-Identifier: Apache-2.0
import ctypes
import subprocess
import sys

import pytest

from jaxgpt.train import cpu

SCRIPT = """
import resource, sys
import numpy as np
from jaxgpt.train.cpu import tune_cpu

if sys.argv[1] == "tuned":
    assert tune_cpu(64 << 20)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work():
    np.ones(32 << 20, np.uint8)

work()
before = faults()
for _ in range(10):
    work()
print(faults() - before)
"""


def faults(how):
    command = [sys.executable, "-c", SCRIPT, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_freed_memory_is_used_again():
    """Ten times 32 MB: tuned, the pages of the first time serve the others."""
    try:
        ctypes.CDLL("libc.so.6").gnu_get_libc_version()
    except (OSError, AttributeError):
        pytest.skip("not on glibc")
    assert faults("tuned") < faults("plain") / 10


def test_elsewhere_nothing_happens(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(cpu.ctypes, "CDLL", missing)
    assert cpu.tune_cpu() is False
