# SPDX-License-Identifier: Apache-2.0
"""A model that trains in a moment, with dropout, for tests of runs in this process."""

from jaxgpt.boxes.attention import GQA
from jaxgpt.model import ModelConfig
from jaxgpt.train.config import OptimConfig

MODEL = ModelConfig(
    vocab_size=None,
    context_length=16,
    d_model=16,
    n_layers=1,
    dropout=0.1,
    attention=GQA(2),
    vocab_multiple=8,
)
OPTIM = OptimConfig(lr=1e-2, warmup_steps=2)
