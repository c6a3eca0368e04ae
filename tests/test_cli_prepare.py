# SPDX-License-Identifier: Apache-2.0
"""The prepare command: options, exit codes, signals, and a text that is one long line."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxgpt.cli import main
from jaxgpt.cli.prepare import HELP
from jaxgpt.data import prepare as module
from jaxgpt.data.shards import open_token_folder
from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.train.runfolder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "import sys; from jaxgpt.cli import main; sys.exit(main())"


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYON_NUM_THREADS", "2")  # is set by the command where it is not
    texts = [f"row {i}\nof a text" for i in range(50)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    return ["out", "--data.path=rows.jsonl", "--data.rows=documents", "--data.tokenizer=byte"]


def run(capsys, *argv):
    code = main(["prepare", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_folder_is_made_and_then_left_as_it_is(rows, capsys):
    code, out, err = run(capsys, *rows, "--shard-tokens=200", "--workers", 2)
    n_tokens = len(open_token_folder("out").train) + len(open_token_folder("out").val)
    assert (code, err) == (0, "") and out.startswith(f"out: {n_tokens:,} tokens of ")
    before = {file.name: file.stat().st_mtime_ns for file in Path("out").iterdir()}
    code, out, err = run(capsys, *rows, "--shard_tokens=2_00")
    assert (code, err) == (0, "") and out.endswith("(nothing left to do)\n")
    after = {file.name: file.stat().st_mtime_ns for file in Path("out").iterdir()}
    assert before.keys() == after.keys()
    assert {k for k in before if before[k] != after[k]} <= {".lock"}


def test_help_names_all_options(capsys):
    for word in ("--help", "-h"):
        assert run(capsys, word) == (0, HELP, "")
    assert {"--shard-tokens", "--workers", "--bpe-sample"} < set(re.findall(r"--[a-z-]+", HELP))


@pytest.mark.parametrize(
    ("words", "message"),
    (
        ([], "the folder to make is missing; fix: jaxgpt prepare OUT"),
        (["out", "more"], "unexpected argument 'more'"),
        (["out", "--shard-tokens=x"], "invalid int value: 'x'"),
        (["out", "--shard-tokens=0"], "shard_tokens=0 must be at least 1"),
        (["out", "--workers=-1"], "workers=-1 must be at least 1"),
        (["out", "--worker=1"], "did you mean --workers"),
        (["out", "--model.n_layers=1"], "--model.n_layers"),
        (["out", "--data.pth=x"], "data.path"),
        (["out", "--data.path=nowhere"], "no text at nowhere"),
        (["out", "--data.format=chat"], "weights"),
        (["out", "--data.tokenizer=pretrained"], "pretrained"),
        (["rows.jsonl"], "no folder can be at rows.jsonl"),
    ),
)
def test_mistakes_are_one_line(rows, capsys, words, message):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "") and message in err
    assert err.startswith("error: ") and err.count("\n") == 1


def test_a_folder_of_others_is_not_touched(rows, capsys):
    Path("mine").mkdir()
    Path("mine/a").write_text("a")
    code, _, err = run(capsys, "mine", *rows[1:])
    assert code == 2 and "mine is not empty" in err and os.listdir("mine") == ["a"]


def test_two_at_once_are_refused(rows, capsys):
    Path("out").mkdir()
    with RunFolder(Path("out")).lock():
        code, _, err = run(capsys, *rows)
    assert code == 5 and f"out is in use by pid {os.getpid()}" in err
    assert "another folder" in err and "--run" not in err
    assert run(capsys, *rows)[0] == 0


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_a_signal_stops_it_and_the_same_command_goes_on(rows, capsys, monkeypatch, number):
    assert run(capsys, "whole", *rows[1:])[0] == 0
    left = [30]

    def interrupted(front):  # between two pieces
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), number)
        return concatenate(front)

    concatenate = module.np.concatenate
    with monkeypatch.context() as patch:
        patch.setattr(module.np, "concatenate", interrupted)
        code, out, err = run(capsys, *rows)
    name = signal.Signals(number).name
    assert (code, out) == (128 + number, "")
    assert err == (
        f"error: stopped by {name} while out was prepared, which keeps what was done; "
        "fix: the same command goes on from there\n"
    )
    noted = json.loads(Path("out/.progress.json").read_bytes())
    assert 20 <= noted["piece"] <= 30
    assert run(capsys, *rows)[0] == 0
    for file in Path("whole").glob("*.*"):
        assert file.name == ".lock" or file.read_bytes() == Path("out", file.name).read_bytes()


LIMIT = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
"""


def test_a_full_disk_is_one_line_and_what_was_done_is_kept(rows):
    Path("a.txt").write_text("some words of a text\n" * 100_000)
    words = ["prepare", "out", "--data.path=a.txt", "--data.tokenizer=byte", "--shard-tokens=1000"]
    done = subprocess.run(
        [sys.executable, "-c", LIMIT + COMMAND, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 5 and done.stdout == ""
    assert done.stderr.startswith("error: cannot write ") and done.stderr.count("\n") == 1
    assert "File too large" in done.stderr and "Traceback" not in done.stderr
    assert not Path("out/tokens.json").exists()
    assert main(["prepare", *words[1:]]) == 0


# VmHWM, not ru_maxrss: that one begins with the peak of the process that started this one.
ONE_LINE = r"""
import re, sys
from pathlib import Path
from jaxgpt.cli import main
code = main(sys.argv[1:])
peak_kb = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]
print(int(peak_kb) // 1024, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("ascii", "deep unicode", "no space"))
def test_one_line_of_200_mb_needs_little_memory(tmp_path, kind):  # D13
    unit = {"ascii": "word ", "deep unicode": "\u0065\u0301\u0323\U0001f3fd\u200d", "no space": "x"}
    block = unit[kind].encode() * (1_000_000 // len(unit[kind].encode()))
    with open(tmp_path / "a.txt", "wb") as file:
        for _ in range(200):
            file.write(block)
    out = tmp_path / "out"
    words = ["prepare", str(out), f"--data.path={tmp_path / 'a.txt'}", "--data.tokenizer=byte"]
    done = subprocess.run(
        [sys.executable, "-c", ONE_LINE, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.splitlines()[-1]) < 500
    found = open_token_folder(out)
    assert len(found.train) + len(found.val) >= 200 * len(block)
    start = ByteTokenizer().decode(found.train[:1000])
    assert start.replace("\ufffd", "") in unit[kind] * 1000
