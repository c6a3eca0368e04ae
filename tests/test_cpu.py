# SPDX-License-Identifier: Apache-2.0
import ctypes
import subprocess
import sys

import pytest

from jaxgpt.train import cpu

SCRIPT = """
import resource, sys
from jaxgpt.train.cpu import tune_cpu

how, what = sys.argv[1:]
if how == "tuned":
    assert tune_cpu()

if what == "array":
    import numpy as np

    def work():
        np.ones(32 << 20, np.uint8)
else:
    from jaxgpt.presets.models import wikitext2_char
    from jaxgpt.study.bench import Training
    from jaxgpt.train.config import OptimConfig, TrainConfig

    training = Training(wikitext2_char(), OptimConfig(), TrainConfig(batch_size=32))

    def work():
        training.run(1)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(3):
    work()
before = faults()
for _ in range(10):
    work()
print((faults() - before) / 10)
"""


def faults(how, what):
    """Pages a round that the kernel had to clear."""
    command = [sys.executable, "-c", SCRIPT, how, what]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("what", ["array", pytest.param("step", marks=pytest.mark.slow)])
def test_freed_memory_is_used_again(what):
    """Of 32 MB, and of the 160 that a training step takes on whichever thread it runs."""
    try:
        ctypes.CDLL("libc.so.6").gnu_get_libc_version()
    except (OSError, AttributeError):
        pytest.skip("not on glibc")
    assert faults("tuned", what) < faults("plain", what) / 10


def test_elsewhere_nothing_happens(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(cpu.ctypes, "CDLL", missing)
    assert cpu.tune_cpu() is False
