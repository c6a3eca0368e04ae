# SPDX-License-Identifier: Apache-2.0
"""Runs on folders of prepared tokens: in place, mixed, packed, in steps of changing size."""

import dataclasses
import json
import os
import random
import re
import signal

import datasets
import numpy as np
import pytest
from micro import MODEL, OPTIM
from test_shards import write

from jaxgpt.config import FREE, RunConfig, from_yaml, resolve, to_yaml
from jaxgpt.data.bpe import BPETokenizer, train_bpe
from jaxgpt.data.config import DataConfig
from jaxgpt.data.order import Sizes
from jaxgpt.data.prepare import prepare
from jaxgpt.data.tokenizer import ByteTokenizer, CharTokenizer, load_tokenizer
from jaxgpt.errors import ConfigError, Interrupted
from jaxgpt.train.config import TrainConfig
from jaxgpt.train.files import read_metrics
from jaxgpt.train.loop import fit
from jaxgpt.train.runfolder import Signals, open_run
from jaxgpt.train.stepfolder import read_meta, step_folders
from jaxgpt.train.texts import first_ids, open_texts

TRAIN = TrainConfig(
    steps=6, batch_size=4, accumulate=2, eval_every=2, save_every=2, log_every=1, keep=9
)
DRAW = random.Random(0)
TEXT = "".join(DRAW.choices("abcdefgh", k=330))


def train(path, data, *, hooks=(), **changes):
    folder = open_run(path)
    with folder.lock():
        fit(folder, MODEL, data, OPTIM, dataclasses.replace(TRAIN, **changes), hooks=hooks)
    return folder


def digest(folder, step=6):
    return read_meta(step_folders(folder.checkpoints_path)[step], step)["digest"]


def stop_at(step):
    def hook(at, params, metrics):
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return hook


def resumed(path, data, stops, **changes):
    for step in stops:
        with pytest.raises(Interrupted):
            train(path, data, hooks=[stop_at(step)], **changes)
    return train(path, data, **changes)


def kept(folder):
    """What was logged for each step, without the clock."""
    return [
        {k: v for k, v in record.items() if not re.search("wall_s|_per_s|mfu|_bytes", k)}
        for record in read_metrics(folder.metrics_path)
    ]


def rows():
    draw = random.Random(2)
    for _ in range(34):
        yield {"text": "".join(draw.choices("abcdefgh", k=draw.randint(5, 18)))}


def test_a_stream_is_prepared_and_resumed_to_the_same_bits(tmp_path):
    """Case T07, row B12: 2 + 2 + 2 steps are 6: dropout, accumulation, across an epoch's end.

    The rows come from a shuffled iterable set, which cannot be resumed exactly; its tokens can.
    """
    stream = datasets.IterableDataset.from_generator(rows).shuffle(seed=0, buffer_size=9)
    lines = [json.dumps(row) for row in stream]
    assert len(lines) == 34 and lines != [json.dumps(row) for row in rows()]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    text = DataConfig(str(tmp_path / "rows.jsonl"), rows="documents", tokenizer="byte")
    prepare(tmp_path / "ready", text, workers=1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "ready").iterdir()}

    data = DataConfig(str(tmp_path / "ready"))
    whole = train(tmp_path / "whole", data)
    assert not whole.tokens_path.exists(), "nothing is copied"
    assert load_tokenizer(whole.tokenizer_path).kind == "byte"
    again = resumed(tmp_path / "run", data, (2, 4))
    assert digest(again) == digest(whole)
    assert kept(again) == kept(whole)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "ready").iterdir()} == before
    texts, _ = opened(tmp_path / "other", data)
    windows = texts.batches(16, Sizes(4), TRAIN.seed).windows
    assert windows(0)[:, 1].max() == 0 and windows(TRAIN.steps - 1)[:, 1].max() == 1, "two epochs"


def opened(run, data, facts=None):
    with Signals() as signals:
        return open_texts(open_run(run), data, {} if facts is None else facts, signals)


def test_another_folder_in_its_place_is_refused(tmp_path):
    """Row B7, case D11: other tokens, or tokens of another tokenizer."""
    data = DataConfig(path=str(write(tmp_path / "ready", texts=(TEXT,))))
    facts = {}
    opened(tmp_path / "run", data, facts)
    assert facts == {"source": "0" * 64, "tokenizer": CharTokenizer("abcdefgh").fingerprint}
    opened(tmp_path / "run", data, facts)
    changes = [
        (dict(source="1" * 64), "the text has changed since this run began: 000000000000 -> 1111"),
        (dict(tokenizer=CharTokenizer("abcdefgx")), r"was made with the char tokenizer .* not the"),
        (dict(tokenizer=ByteTokenizer()), "was made with the byte tokenizer .* not the char"),
    ]
    for number, (change, message) in enumerate(changes):
        (tmp_path / "ready").rename(tmp_path / f"old{number}")
        write(tmp_path / "ready", **{"texts": ("abc" * 90,), "val_texts": ("ab",)} | change)
        with pytest.raises(ConfigError, match=message) as caught:
            opened(tmp_path / "run", data, facts)
        assert caught.value.exit_code == 2


def test_options_of_texts_are_refused_by_name(tmp_path):
    path = str(write(tmp_path / "ready", texts=(TEXT,)))
    for changes, message in (
        (dict(val_fraction=0.2), r"val_fraction=0.2: of no use .*fix: --data.val_fraction=0.1$"),
        (dict(max_chars=5, rows="documents"), r"max_chars=5, rows=documents: .*max_chars=null"),
        (dict(tokenizer="bpe"), "tokenizer=bpe: of no use"),
        (dict(tokenizer="byte"), "was made with the char tokenizer"),
        (dict(tokenizer=str(tmp_path / "no")), "no tokenizer at"),
        (dict(mask_documents=True), "the char tokenizer has neither an end of text nor a BOS"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(tmp_path / "run", DataConfig(path, **changes))
    with pytest.raises(ConfigError, match="mask_documents is for format=text"):
        DataConfig(mask_documents=True, format="chat")


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Two of nanoGPT's folders of documents with an end each, and the tokenizer of both."""
    folder, draw = tmp_path_factory.mktemp("documents"), random.Random(1)
    tokenizer = BPETokenizer(train_bpe(("abcdefgh " * 9,), 260))
    tokenizer.save(folder / "bpe.json")
    for name, letters, n in (("a", "abcd", 60), ("b", "efgh ", 150)):
        texts = ["".join(draw.choices(letters, k=draw.randint(3, 14))) for _ in range(n)]
        ids = np.concatenate([[*tokenizer.encode(text), tokenizer.eot_id] for text in texts])
        (folder / name).mkdir()
        ids[:-60].astype("<u2").tofile(folder / name / "train.bin")
        ids[-60:].astype("<u2").tofile(folder / name / "val.bin")
    return folder


def mixture(documents, weights=(0.7, 0.3), **changes) -> DataConfig:
    names = [str(documents / name) for name in "ab"]
    return DataConfig(
        mixture=dict(zip(names, weights, strict=True)),
        tokenizer=str(documents / "bpe.json"),
        mask_documents=True,
        **changes,
    )


GROWING = {"steps": 4, "batch_sizes": {2: 8}}


@pytest.mark.slow
def test_a_packed_mixture_in_growing_steps_resumes_to_the_same_bits(tmp_path, documents, capsys):
    data = mixture(documents)
    whole = train(tmp_path / "whole", data, **GROWING)
    said = capsys.readouterr().out
    assert "69.9951% of the samples" in said and "30.0049% of the samples" in said
    again = resumed(tmp_path / "run", data, (2,), **GROWING)
    assert digest(again, 4) == digest(whole, 4)
    assert kept(again) == kept(whole)

    records = read_metrics(whole.metrics_path)
    steps = [record for record in records if "loss_nats" in record]
    assert [r["tokens"] for r in steps] == [16 * n for n in (4, 8, 16, 24)]
    trained = [r["n_tokens"] for r in steps]
    for n, rows in zip(trained, (4, 4, 8, 8), strict=True):
        assert 0.7 * 16 * rows < n < 16 * rows, "the pairs between documents do not count"
    both = [r for r in records if "val_nats_per_token" in r][-1]["val_nats_per_token"]
    lines = [line for line in said.splitlines() if "nats/token" in line and "step" not in line]
    each = [float(line.split()[-2]) for line in lines[-2:]]
    assert len(lines) == 4 and min(each) < both < max(each)


def test_a_mixture_that_does_not_fit(tmp_path, documents):
    run = tmp_path / "run"
    turn = dict(reversed((mixture(documents).mixture or {}).items()))
    bytes_ = write(tmp_path / "bytes", ByteTokenizer(), texts=(TEXT,))
    chars = write(tmp_path / "chars", texts=(TEXT,))
    with pytest.raises(ConfigError) as caught:
        opened(run, DataConfig(mixture={str(bytes_): 1.0, str(chars): 1.0}))
    assert all(str(folder) in str(caught.value) for folder in (bytes_, chars))
    assert caught.value.exit_code == 2
    with pytest.raises(ConfigError, match="no is no folder of prepared tokens"):
        opened(run, DataConfig(mixture={"no": 1.0}))
    texts, _ = opened(run, mixture(documents))
    turned, _ = opened(run, dataclasses.replace(mixture(documents), mixture=turn))
    for one, other in zip(texts.texts, turned.texts, strict=True):
        assert one.name == other.name, "the order in which they are given means nothing"
    assert texts.pattern == turned.pattern
    tokenizer = load_tokenizer(documents / "bpe.json")
    first = first_ids(open_run(run), mixture(documents), tokenizer, 7)
    assert first == np.fromfile(documents / "a" / "val.bin", "<u2")[:7].tolist()
    with pytest.raises(ConfigError, match=r"has \d+ tokens, but a window .*documents.*/a"):
        texts.batches(1000, Sizes(4), 0)
    facts = {"source": dict.fromkeys((str(documents / name) for name in "ab"), "0")}
    with pytest.raises(ConfigError, match=r"the text has changed .*: 0 -> \w+ \(.*/a\)"):
        opened(run, mixture(documents), facts)


def test_sizes_and_mixtures_are_values_of_the_configuration():
    sizes, mix = "--train.batch_sizes={0: 12, 1000: 480}", "--data.mixture={a/b: 0.7, c: 3}"
    run = resolve(RunConfig(), (), [sizes, mix, "--train.batch_size=24", "--train.accumulate=2"])
    assert run.train.batch_sizes == {0: 12, 1000: 480} and run.data.mixture == {"a/b": 0.7, "c": 3}
    assert from_yaml(to_yaml(run)) == run
    assert {"train.batch_sizes", "data.mixture", "data.mask_documents"} & FREE == set()
    # The fewest micro-batches of at most 12 rows, and evenly.
    want = {6: 1, 12: 1, 18: 2, 24: 2, 480: 40}
    assert {rows: run.train.micro_batches(rows) for rows in want} == want
    assert run.train.at_rows(480) == dataclasses.replace(
        run.train, batch_size=480, batch_sizes=None, accumulate=40
    )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--train.batch_sizes={5: 33}", "33 rows do not split into 2 .* fix: 32 or 64 rows"),
        ("--train.batch_sizes={-1: 32}", "steps count from 0, rows from 1"),
        ("--train.batch_sizes=3", "is not dict"),
        ("--data.mixture={a: 0}", "must give each folder a weight above 0"),
        ("--data.mixture={}", "must give each folder a weight above 0"),
        ("--data.mixture={a: x}", "is not dict"),
    ],
)
def test_sizes_and_mixtures_that_cannot_be(word, message):
    with pytest.raises(ConfigError, match=message):
        resolve(RunConfig(), (), [word])
    with pytest.raises(ConfigError, match=r"data.path=b and data.mixture exclude each other"):
        resolve(RunConfig(), (), ["--data.mixture={a: 1}", "--data.path=b"])


def test_batches_of_one_text_are_those_of_its_folder(tmp_path):
    path = write(tmp_path / "ready", texts=(TEXT[:100], TEXT[100:]))
    with Signals() as signals:
        texts, tokenizer = open_texts(
            open_run(tmp_path / "run"), DataConfig(str(path)), {}, signals
        )
    batch = texts.batches(16, Sizes(4), seed=3).batch(7)
    assert all(tokenizer.decode(row) in TEXT for row in batch.tokens_BT)
    assert batch.segment_BT is None and texts.pattern is None


def test_more_than_two_billion_tokens(tmp_path):
    """Row D10: a sparse file of 4.5e9 bytes; the window at its end is the one that is read."""
    size, length = 4_500_000_000, 2**20
    (tmp_path / "train.bin").touch()
    os.truncate(tmp_path / "train.bin", size)
    ByteTokenizer().save(tmp_path / "byte.json")
    data = DataConfig(str(tmp_path), tokenizer=str(tmp_path / "byte.json"))
    texts, _ = opened(tmp_path / "run", data)
    batches = texts.batches(length, Sizes(1), seed=0)
    windows = np.array([batches.windows(step)[0, 2] for step in range(batches.n_windows)])
    step, first = int(windows.argmax()), int(windows.max())
    assert first > 2**31 and first + length < len(texts.texts[0].train) == size // 2
    with open(tmp_path / "train.bin", "r+b") as file:
        file.seek(2 * (first + length - 3))
        file.write(np.array([1, 2, 3, 4], "<u2").tobytes())
    batch = batches.batch(step)
    assert batch.tokens_BT[0, -4:].tolist() == [0, 1, 2, 3]
    assert batch.targets_BT[0, -4:].tolist() == [1, 2, 3, 4]
