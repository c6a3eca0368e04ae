# SPDX-License-Identifier: Apache-2.0
"""Runs on rows with answers; what a run keeps of its text is tested in test_loop.py."""

import dataclasses
import os
import random
import shutil
import signal

import numpy as np
import pytest
from chatfolders import chat_folder, rows

from jaxgpt.boxes.attention import GQA
from jaxgpt.data.batches import Batches
from jaxgpt.data.config import DataConfig
from jaxgpt.data.tokenizer import load_tokenizer
from jaxgpt.data.tokens import open_tokens
from jaxgpt.errors import ConfigError, Interrupted
from jaxgpt.model import ModelConfig
from jaxgpt.train.config import OptimConfig, TrainConfig
from jaxgpt.train.files import read_metrics
from jaxgpt.train.loop import fit
from jaxgpt.train.runfolder import open_run
from jaxgpt.train.stepfolder import read_meta, step_folders

MODEL = ModelConfig(
    vocab_size=None, context_length=16, d_model=16, n_layers=1, dropout=0.1, attention=GQA(2)
)
TRAIN = TrainConfig(steps=8, batch_size=4, eval_every=4, save_every=4, log_every=1, keep=9)


@pytest.fixture
def data(tmp_path):
    """Conversations of random questions, with a tokenizer that has a template."""
    draw = random.Random(0)
    made = (
        {
            "messages": [
                {"role": "user", "content": "".join(draw.choices("abcd ", k=draw.randint(1, 20)))},
                {"role": "assistant", "content": "dab"},
            ]
        }
        for _ in range(60)
    )
    path = rows(tmp_path / "chat.jsonl", *made)
    tokenizer = chat_folder(tmp_path / "model")
    return DataConfig(path=str(path), tokenizer=str(tokenizer), format="chat")


def train(path, data, *, hooks=(), **changes):
    folder = open_run(path)
    with folder.lock():
        train = dataclasses.replace(TRAIN, **changes)
        fit(folder, MODEL, data, OptimConfig(lr=1e-2, warmup_steps=2), train, hooks=hooks)
    return folder


def digest(folder, step=8):
    return read_meta(step_folders(folder.checkpoints_path)[step], step)["digest"]


def stop(at, params, metrics):
    if at == 4:
        os.kill(os.getpid(), signal.SIGTERM)


def test_answers_alone_are_trained_and_scored(tmp_path, data):
    folder = train(tmp_path / "run", data)
    tokenizer = load_tokenizer(folder.tokenizer_path)
    tokens = open_tokens(folder.tokens_path / "tokens.bin", tokenizer=tokenizer)
    marked = tokens.val[tokens.val_weights == 1]
    n_rows = (marked == 262).sum()
    assert tokenizer.decode(marked) == "dab<|im_end|>" * n_rows and n_rows >= 2
    batches = Batches(tokens.train, 16, 4, TRAIN.seed, tokens.train_weights)
    records = read_metrics(folder.metrics_path)
    counted = [record["n_tokens"] for record in records if "n_tokens" in record]
    assert counted == [batches.batch(step).weights_BT.sum() for step in range(TRAIN.steps)]
    assert len(counted) == TRAIN.steps and 0 < counted[0] < 64
    losses = [r["val_nats_per_token"] for r in records if "val_nats_per_token" in r]
    assert losses[-1] < losses[0] < np.log(300)


def test_a_run_needs_no_folder_beside_it_and_resumes_to_the_same_bits(tmp_path, data):
    whole = train(tmp_path / "whole", data)
    with pytest.raises(Interrupted):
        train(tmp_path / "run", data, hooks=[stop])
    shutil.rmtree(data.tokenizer)
    (tmp_path / "run" / "tokens" / "tokens.bin").unlink()
    assert digest(train(tmp_path / "run", data)) == digest(whole)


def test_another_format_is_another_text(tmp_path, data):
    path = rows(
        tmp_path / "both.jsonl",
        *(
            {
                "messages": [
                    {"role": "user", "content": "a" * n},
                    {"role": "assistant", "content": "b" * n},
                ],
                "prompt": "c" * n,
                "completion": "d" * n,
            }
            for n in range(1, 30)
        ),
    )
    with pytest.raises(Interrupted):
        train(tmp_path / "run", dataclasses.replace(data, path=str(path)), hooks=[stop])
    other = dataclasses.replace(data, path=str(path), format="prompt-completion")
    with pytest.raises(ConfigError, match="the text has changed since this run began"):
        train(tmp_path / "run", other)
    assert digest(train(tmp_path / "other", other)) != ""


def test_conversations_without_a_template(tmp_path, data):
    with pytest.raises(ConfigError, match="this byte tokenizer has no chat template"):
        train(tmp_path / "run", dataclasses.replace(data, tokenizer="byte"))
