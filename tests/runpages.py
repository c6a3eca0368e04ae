# SPDX-License-Identifier: Apache-2.0
"""A run folder as training leaves it, made of numbers and without any training."""

import dataclasses
import json
import math
from pathlib import Path

from jaxgpt.boxes.attention import GQA
from jaxgpt.config import RunConfig, to_yaml
from jaxgpt.data.corpus import read_corpus
from jaxgpt.data.tokenizer import train_tokenizer
from jaxgpt.model import ModelConfig
from jaxgpt.presets import RUNS
from jaxgpt.study.page_parts import Run

EVIL = "<script>document.title = 'taken'</script><img src=x onerror=alert(1)> & \x00\x1b[31m \ud800"
STEPS = 400


def small(**changes) -> RunConfig:
    """`tiny` with one narrow layer."""
    base = RUNS["tiny"]()
    model = ModelConfig(None, context_length=16, d_model=16, n_layers=1, attention=GQA(2))
    train = dataclasses.replace(base.train, steps=STEPS)
    return dataclasses.replace(base, model=model, train=train, **changes)


def records(n=STEPS, every=10):
    """Of metrics.jsonl: one start at 0, one at the middle; a skipped step, a jump, evaluations."""
    for step in range(every, n + 1, every):
        loss = 1.5 + 2.5 * math.exp(-4 * step / n)
        record = {"step": step, "tokens": 64 * step, "wall_s": (step - 1) % (n // 2) / 4}
        record |= {"loss_nats": loss, "lr": 1e-3, "grad_norm": 1 + 9 / step, "update_ratio": 1e-2}
        record |= {
            "n_tokens": 64.0,
            "tokens_per_s": 1000.0 + step,
            "skipped_steps": int(step > 100),
        }
        if step % (n // 2) == every:
            record |= {"first_step_wall_s": 4.5, "compile_wall_s": 2.5}
        if step == 100:
            record |= {"skipped": True, "loss_nats": None, "grad_norm": None, "skipped_steps": 1}
        if step == 300:
            record |= {"spike": True}
        yield record
        if step % (n // 4) == 0:
            nats = loss + 0.1 * (step > n // 2)
            scores = {"val_nats_per_token": nats, "val_token_perplexity": math.exp(nats)}
            scores |= {"val_bits_per_char": nats / math.log(2), "max_attention_logit": 2.0}
            yield {"step": step, "tokens": 64 * step, "wall_s": record["wall_s"], **scores}


def samples(n=20):
    """Of samples.jsonl; the last one would take over a page that does not escape it."""
    for i in range(1, n):
        yield {"step": i, "prompt": "Th", "text": f"e sample {i}"}
    yield {"step": n, "prompt": "", "text": EVIL}


FACTS = {
    "source": "5eed" * 16,
    "tokenizer": "beef" * 16,
    "horizon": STEPS,
    "sessions": [
        {"from_step": 0, "began": "2026-01-02T03:04:05+00:00", "jax": "0.10.2", "devices": ["cpu"]}
    ],
}


def shown(run=None, **changes) -> Run:
    """What the parts of a page are given."""
    run = run or small()
    model = dataclasses.replace(run.model, vocab_size=30)
    made = Run("mine", model, run.optim, run.train, run.lora, list(records()), FACTS)
    return dataclasses.replace(made, **changes)


def folder(path: Path, run: RunConfig | None = None) -> Path:
    """A run folder without checkpoints."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(run or small()))
    (path / "run.json").write_text(json.dumps({k: v for k, v in FACTS.items() if k != "tokenizer"}))
    for name, lines in (("metrics", records()), ("samples", samples())):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    text = path / "text.txt"
    text.write_text("the quick brown fox\n" * 9)
    train_tokenizer("char", read_corpus(text), 0).save(path / "tokenizer.json")
    return path
