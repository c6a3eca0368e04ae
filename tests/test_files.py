# SPDX-License-Identifier: Apache-2.0
import json
import math
import os
import signal
import time

import pytest
from checkpointing import names, start_python

from jaxgpt.errors import ResourceError
from jaxgpt.train import files
from jaxgpt.train.files import MetricsWriter, read_metrics, refusal, size, write_atomic


def test_write_atomic_replaces_whole_files(tmp_path):
    path = tmp_path / "config.yaml"
    for text in ("a: 1\r\n", "é\0" * 1000, ""):
        write_atomic(path, text)
        assert path.read_bytes() == text.encode()
    assert names(tmp_path) == ["config.yaml"]


def test_write_atomic_replaces_links_and_spares_their_target(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "config.yaml").symlink_to(tmp_path / "victim")
    write_atomic(tmp_path / "config.yaml", "new")
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "config.yaml").read_text() == "new"


def test_a_refused_write_leaves_the_old_file(tmp_path, monkeypatch):
    write_atomic(tmp_path / "a", "old")

    def full(path, data):
        path.write_bytes(data[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_synced", full)
    with pytest.raises(ResourceError, match="a cannot be written: No space left") as error:
        write_atomic(tmp_path / "a", "new")
    assert error.value.exit_code == 5
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


def test_killed_writers_leave_whole_files(tmp_path):
    code = f"""
    from pathlib import Path
    from jaxgpt.train.files import MetricsWriter, write_atomic
    writer = MetricsWriter(Path({str(tmp_path)!r}) / "metrics.jsonl")
    print("ready", flush=True)
    n = 0
    while True:
        n += 1
        write_atomic(Path({str(tmp_path)!r}) / "run.json", str(n) * 20000)
        writer.write({{"step": n, "text": "x" * 5000}})
    """
    for pause_s in (0.02, 0.05, 0.1):
        with start_python(code) as process:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            time.sleep(pause_s)
            process.send_signal(signal.SIGKILL)
        text = (tmp_path / "run.json").read_text()
        assert text == text[: len(text) // 20000] * 20000
        steps = [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")]
        assert steps == list(range(1, len(steps) + 1))
        (tmp_path / "metrics.jsonl").unlink()


def test_metrics_round_trip(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    with MetricsWriter(path) as writer:
        writer.write({"step": 1, "loss_nats": 2.5, "note": "é\n"})
        assert read_metrics(path) == [{"step": 1, "loss_nats": 2.5, "note": "é\n"}]  # at once
        writer.write({"step": 2, "loss_nats": math.nan, "grad_norm": math.inf})
    writer.close()
    assert read_metrics(path)[1] == {"step": 2, "loss_nats": None, "grad_norm": None}
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "torn", ['{"step": 9, "lo', '{"step": 9', "\x00\x00", '{"step": 9}\n["x"]\n7']
)
def test_resume_drops_torn_lines_and_later_steps(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    kept = [{"began": "now"}, {"step": 3}, {"step": 5, "val_loss": 1.0}]
    path.write_text("".join(json.dumps(r) + "\n" for r in [*kept, {"step": 6}]) + torn)
    assert read_metrics(path)[:4] == [*kept, {"step": 6}]
    with MetricsWriter(path, resume_step=5) as writer:
        writer.write({"step": 6, "again": True})
    assert read_metrics(path) == [*kept, {"step": 6, "again": True}]
    assert path.read_bytes().endswith(b"}\n") and path.read_bytes().count(b"\n") == 4


def test_a_fresh_run_starts_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    MetricsWriter(path).close()
    assert path.read_bytes() == b""


def test_a_refused_line_leaves_no_part(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write = os.write
    with MetricsWriter(path) as writer:
        writer.write({"step": 1})
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:4]))
        with pytest.raises(ResourceError, match="No space left on device"):
            writer.write({"step": 2})
        monkeypatch.undo()
        writer.write({"step": 3})
    assert [r["step"] for r in read_metrics(path)] == [1, 3]


def test_refusals_are_recognised_through_their_wrappers():
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise ValueError("page long") from error
    except ValueError as error:
        assert refusal(error) == "No space left on device"
    assert refusal(ValueError('Error writing "x": File too large [27]')) == "File too large"
    assert refusal(ValueError("RESOURCE_EXHAUSTED: Error writing")) == "RESOURCE_EXHAUSTED"
    assert refusal(ValueError("tree structures do not match")) is None


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (149 * 10**7, "1.49 GB"),
        (3 * 10**15, "3e+03 TB"),
    ],
)
def test_size(n_bytes, text):
    assert size(n_bytes) == text
