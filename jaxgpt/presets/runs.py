# SPDX-License-Identifier: Apache-2.0
"""Recipes by name: functions that return a whole RunConfig; the first line says what it is.

The model's vocabulary is the tokenizer's everywhere (`vocab_size=None`). A recipe that needs a text
names a file that is not there by chance; `--data.path` says where yours is.
"""

import dataclasses
from collections.abc import Callable

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.ffn import MLP
from jaxgpt.boxes.init import Normal
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.rope import RoPE
from jaxgpt.config import PRETRAINED, RunConfig
from jaxgpt.data.config import DataConfig
from jaxgpt.model import ModelConfig
from jaxgpt.presets import models
from jaxgpt.study.config import ShowConfig
from jaxgpt.train.config import OptimConfig, TrainConfig
from jaxgpt.train.optimizers import AdamW, Muon


def tiny() -> RunConfig:
    """A character model of the text inside Python: minutes on a laptop."""
    small = shakespeare()
    return dataclasses.replace(
        small,
        model=dataclasses.replace(small.model, context_length=128),
        data=DataConfig(),
        train=dataclasses.replace(
            small.train, steps=800, batch_size=12, eval_every=200, save_every=200
        ),
    )


def shakespeare() -> RunConfig:
    """A character model of tinyshakespeare.txt, 0.7 million parameters."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=None,
            context_length=64,
            d_model=128,
            n_layers=3,
            position=RoPE(theta=200.0),  # wavelengths of 6 to 900 characters, for a context of 64
            norm=RMSNorm(),
            attention=GQA(n_heads=4, n_kv_heads=1, use_bias=False, qk_norm=RMSNorm()),
            ffn=MLP(d_ff=768, activation="relu_squared", use_bias=False),
            final_norm=RMSNorm(),
            init=Normal(std=None, residual="zero"),
        ),
        data=DataConfig(path="tinyshakespeare.txt"),
        optim=OptimConfig(Muon(), lr=5e-3, final_lr=0.0, schedule="wsd", decay_fraction=0.8),
        train=TrainConfig(steps=1000, batch_size=24, dispatch=8, eval_every=500, save_every=500),
    )


def wikitext2_char() -> RunConfig:
    """A character model of WikiText-2 with PyTorch's defaults everywhere.

    The first 300,000 characters of all rows joined by newlines, a constant rate, no clipping, and
    decay of all parameters, as in `torch.optim.AdamW(model.parameters())`.
    """
    return RunConfig(
        model=dataclasses.replace(models.wikitext2_char(), vocab_size=None),
        data=DataConfig(path="wikitext-2", max_chars=300_000),
        optim=OptimConfig(
            AdamW(beta2=0.999),
            lr=2e-4,
            schedule="constant",
            warmup_steps=0,
            weight_decay=0.01,
            decay="all",
            clip=None,
        ),
        train=TrainConfig(steps=400, batch_size=32, eval_every=100, save_every=200),
        show=ShowConfig(prompt="T", sample_tokens=95),  # what fits into the context
    )


def gpt2_124m() -> RunConfig:
    """GPT-2 124M on the folder `openwebtext` of prepared tokens, 491,520 a step.

    Source: nanoGPT, config/train_gpt2.py (https://github.com/karpathy/nanoGPT).
    Differs from it: biases, and the tanh form of GELU, as in GPT-2 itself.
    """
    return RunConfig(
        model=dataclasses.replace(models.gpt2(), vocab_size=None),
        data=DataConfig(path="openwebtext", tokenizer="gpt2"),
        optim=OptimConfig(AdamW(beta2=0.95), lr=6e-4, final_lr=6e-5, warmup_steps=2000),
        train=TrainConfig(
            steps=600_000,
            batch_size=480,
            accumulate=40,
            dtype="bfloat16",
            eval_every=1000,
            save_every=1000,
        ),
    )


def _own_text(vocab_size: int) -> DataConfig:
    """The file or folder `text`, by a tokenizer that is trained on it."""
    return DataConfig(path="text", tokenizer="bpe", vocab_size=vocab_size, val_fraction=0.01)


def transformer_2017() -> RunConfig:
    """The decoder of Attention Is All You Need, on the file or folder `text`.

    Source: Vaswani et al. 2017, sections 5.1 and 5.3: 25,000 tokens a batch, 100,000 steps, Adam
      without decay, 4,000 steps of warmup to 512^-0.5 * 4000^-0.5.
    Differs from the paper: clipped gradients, no label smoothing.
    """
    base = gpt2_124m()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(models.transformer_2017(), vocab_size=None),
        data=_own_text(37_000),
        optim=OptimConfig(
            AdamW(beta2=0.98, eps=1e-9),
            lr=7e-4,
            schedule="inverse-sqrt",
            warmup_steps=4000,
            weight_decay=0.0,
        ),
        train=dataclasses.replace(base.train, steps=100_000, batch_size=48, accumulate=1),
    )


def modern() -> RunConfig:
    """The block of the 2020s, as in Llama, on the file or folder `text`."""
    base = gpt2_124m()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(models.modern(), vocab_size=None),
        data=_own_text(32_000),
        train=dataclasses.replace(base.train, steps=100_000, batch_size=256, accumulate=16),
    )


def finetune(init_from: str, model: ModelConfig, base: RunConfig | None = None) -> RunConfig:
    """What a run begins with under `--init-from`: that model, its tokenizer, and gentle steps.

    Args:
      init_from: Folder or hub id of the weights.
      model: That of the weights; its context is cut to 512 tokens, for memory.
      base: A recipe for all but these; None: 200 steps at a tenth of a usual rate.
    """
    run = base or RunConfig(
        optim=OptimConfig(lr=1e-4, warmup_steps=20, weight_decay=0.01),
        train=TrainConfig(steps=200, batch_size=8, eval_every=50, save_every=100),
    )
    return dataclasses.replace(
        run,
        model=dataclasses.replace(model, context_length=min(model.context_length, 512)),
        data=dataclasses.replace(run.data, tokenizer=PRETRAINED),
        init_from=init_from,
    )


RUNS: dict[str, Callable[[], RunConfig]] = {
    "tiny": tiny,
    "shakespeare": shakespeare,
    "wikitext2-char": wikitext2_char,
    "gpt2-124m": gpt2_124m,
    "transformer-2017": transformer_2017,
    "modern": modern,
}
"""Every recipe by name."""
