# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxgpt import errors
from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.rope import RoPE
from jaxgpt.errors import ConfigError
from jaxgpt.model import LayerEdit, ModelConfig

HERE = Path(__file__).parent


def test_an_error_is_one_line_with_place_and_fix():
    error = ConfigError("batch=6", where="--train.batch", fix="8 or 16")
    assert str(error) == "batch=6 (--train.batch); fix: 8 or 16"
    assert str(ConfigError("batch=6")) == "batch=6"
    assert (error.what, error.where, error.fix) == ("batch=6", "--train.batch", "8 or 16")


def test_exit_codes_and_the_python_classes_that_research_code_expects():
    kinds = {
        errors.ConfigError: (2, ValueError),
        errors.DivergedError: (3, ArithmeticError),
        errors.CheckpointError: (4, Exception),
        errors.ResourceError: (5, OSError),
    }
    for kind, (exit_code, parent) in kinds.items():
        assert kind("x").exit_code == exit_code and isinstance(kind("x"), parent)
        assert isinstance(kind("x"), errors.JaxgptError)
    assert errors.Interrupted("x", signum=15).exit_code == 143


WRONG = {  # E2, E3
    "d_model=130 is not divisible by n_heads=4": lambda: ModelConfig(d_model=130, attention=GQA(4)),
    "fix: n_heads of [1, 2, 4, 8, 16]": lambda: ModelConfig(d_model=16, attention=GQA(3)),
    "n_heads=6 is not divisible by n_kv_heads=4": lambda: GQA(6, n_kv_heads=4),
    "fix: n_kv_heads of [1, 2, 3, 6]": lambda: GQA(6, n_kv_heads=4),
    "head_dim=3 is 3 channels": lambda: ModelConfig(d_model=12, attention=GQA(4), position=RoPE()),
    "dropout=1.0 must be in [0, 1)": lambda: ModelConfig(dropout=1.0),
    "dropout=-0.1 must be in [0, 1)": lambda: ModelConfig(dropout=-0.1),
    "dropout=nan must be in [0, 1)": lambda: ModelConfig(dropout=float("nan")),
    "vocab_size=0 must be positive": lambda: ModelConfig(vocab_size=0),
    "context_length=-1 must be positive": lambda: ModelConfig(context_length=-1),
    "d_model=0 must be positive": lambda: ModelConfig(d_model=0),
    "n_layers=0 must be positive": lambda: ModelConfig(n_layers=0),
    "vocab_multiple=0 must be positive": lambda: ModelConfig(vocab_multiple=0),
    "n_heads=0 must be positive": lambda: GQA(0),
    "every=0 must be positive": lambda: LayerEdit(every=0),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_sizes_are_refused(message):
    with pytest.raises(ConfigError) as error:
        WRONG[message]()
    assert message in str(error.value) and error.value.exit_code == 2
    assert "\n" not in str(error.value)


def test_wrong_sizes_are_refused_without_asserts_too():  # E7
    code = """
import test_errors
assert False, "asserts are on"
for message, make in test_errors.WRONG.items():
    try:
        make()
    except test_errors.ConfigError as error:
        if message not in str(error):
            raise SystemExit(f"{message}: {error}")
    else:
        raise SystemExit(f"accepted: {message}")
"""
    done = subprocess.run(
        [sys.executable, "-O", "-B", "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
