# SPDX-License-Identifier: Apache-2.0
"""Wrong and odd input to the commands: rows B, C9, D, E, F and H1 of the faults.

Each ends in one line and the right exit code, or does what its row says; what each part answers is
tested beside it (test_config.py, test_corpus.py, test_tokens.py, test_filters.py, ...).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from checkpointing import run_python
from commandline import ROOT, error_line
from commands import ENV, LIMIT_S, TEXT, checkpoints, digest, steps, train, tree

from jaxgpt import cli
from jaxgpt.cli import sources
from jaxgpt.data.tokens import HEADER_BYTES


@pytest.fixture
def inside(finished, monkeypatch):
    """The folder of the finished run itself, which nothing may change."""
    before = tree(finished)
    monkeypatch.chdir(finished)
    yield finished
    assert tree(finished) == before


# --- B: what a run was begun with -----------------------------------------------------------------


def test_a_finished_run_and_another_configuration(inside, capsys):
    """Rows B9, B10: the same command does nothing; another is refused with what differs."""
    assert train() == 0
    assert "is finished at step 20; nothing is done" in capsys.readouterr().out
    assert train("--optim.lr=0.02", "--train.batch_size=8", "--model.norm=LayerNorm") == 2
    line = error_line(capsys)
    for change in ("optim.lr: 0.01 -> 0.02", "train.batch_size: 4 -> 8", "model.norm: RMSNorm("):
        assert change in line
    assert line.endswith("fix: --run=ANOTHER_NAME\n")


def test_a_changed_text_is_refused(copy, capsys):
    """Row B7."""
    before = tree(copy / "runs")
    (copy / "text.txt").write_text(TEXT + "a")
    assert train("--train.steps=25") == 2
    assert "the text has changed since this run began" in error_line(capsys)
    assert tree(copy / "runs") == before


@pytest.mark.parametrize("chars", ["\n tuvwxyz", "\n abcdefghijk", "\n ab"])
def test_another_tokenizer_is_refused(copy, capsys, chars):
    """Rows B7, B11: also one of the same size, whose text would only look right."""
    words = json.dumps({"jaxgpt_tokenizer": "char", "chars": chars})
    (copy / "runs/micro/tokenizer.json").write_text(words)
    before = tree(copy / "runs")
    for command in (lambda: train("--train.steps=25"), lambda: cli.sample_main(["--prompt=ab"])):
        assert command() == 2
        wanted = rf"not the one it .*: \w{{12}} -> \w{{12}}, {len(chars)} tokens"
        assert re.search(wanted, error_line(capsys))
    assert tree(copy / "runs") == before


def test_a_damaged_file_of_facts(copy, capsys):
    (copy / "runs/micro/run.json").write_text('{"source": "50f')
    for command in (lambda: train("--train.steps=25"), lambda: cli.sample_main([])):
        assert command() == 2
        assert "run.json is damaged" in error_line(capsys)


def test_a_text_that_is_put_right_after_a_failed_start(fresh, finished, capsys):
    """What the failed start made of the other text is made anew."""
    (fresh / "text.txt").write_text("zu kurz")
    assert train() == 2
    assert "the training text has 6 tokens" in error_line(capsys)
    (fresh / "text.txt").write_text(TEXT)
    assert train() == 0 and digest(fresh) == digest(finished)


# --- C9, D, E: options and texts ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--optim.lr=0", "lr=0.0 must be positive"),
        ("--optim.lr=-1", "lr=-1.0 must be positive"),
        ("--optim.lr=.nan", "lr=nan"),
        ("--optim.lr=.inf", "lr=inf must be finite"),
        ("--optim.warmup_steps=30", "warmup_steps=30 exceeds train.steps=20"),
        ("--train.accumulate=3", "batch_size=4 is not divisible by accumulate=3"),
        ("--train.steps=0", "steps=0 is too small"),
        ("--train.seed=4294967296", "seed=4294967296 must be below 2**32"),
        ("--run=", "--run '' is no run name"),
        ("--version", "unknown name --version"),  # not that it has no value
        ("--config=text.txt", "is not names with values (text.txt)"),
    ],
)
def test_wrong_options(fresh, capsys, option, message):
    """Row C9: before a folder is made."""
    assert train(option) == 2
    line = error_line(capsys)
    assert message in line and len(line) < 200
    assert [p.name for p in fresh.iterdir()] == ["text.txt"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt is empty"),  # D1
        ("a.txt", b"ten chars.", "9 tokens, but a window of context_length=16 needs 17"),  # D2
        ("a.txt", b"abc\xff" * 99, "not utf-8: byte 0xff at offset 3; fix: --data.encoding"),  # D3
        ("a.txt", b"\x1f\x8b" * 99, "a.txt is gzip data, not text"),  # D12
        ("a.txt", b"\0\1\2" * 99, "a.txt is binary, not text"),
        ("b.txt", b"x", "fix: --data.path=b.txt"),
        ("a.txt/.hidden", b"x", "a.txt is empty: no file in this folder"),
        ("", b"", "the path of the text is empty"),
    ],
)
def test_wrong_texts(fresh, capsys, name, content, message):
    """Rows D1, D2, D3, D12."""
    if name:
        (fresh / name).parent.mkdir(exist_ok=True)
        (fresh / name).write_bytes(content)
    assert train(f"--data.path={'a.txt' if name else ''}") == 2
    assert message in error_line(capsys)
    assert not (fresh / "runs/micro/checkpoints").exists() or steps(fresh) == []


@pytest.mark.parametrize("damage", ["id", "short"])
def test_a_damaged_token_file_is_made_again(copy, finished, damage):
    """Rows D8, D11: an id outside the vocabulary is never trained on."""
    shutil.rmtree(checkpoints(copy) / "step_00000020")
    path = copy / "runs/micro/tokens/tokens.bin"
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + 7] = 200
    path.write_bytes(content if damage == "id" else content[:-9])
    assert train() == 0
    assert digest(copy) == digest(finished)


WRONG = {  # words -> a part of the line
    "--train.batch_size=6": "batch_size=6 does not split over 8 devices",
    "--mesh.data=64": "is for 64 devices, and there are 8; fix: --mesh.data=8",
    "--mesh.fsdp=3": "is for 6 devices, and there are 8",
    "--model.d_model=18 --model.attention.n_heads=4": "d_model=18 is not divisible by n_heads=4",
    "--model.attention.n_heads=3": "fix: n_heads of [1, 2, 4, 8, 16]",
    "--model.attention.n_heads=4 --model.attention.n_kv_heads=3": "fix: n_kv_heads of [1, 2, 4]",
    "--model.attention.head_dim=5": "head_dim=5 is 5 channels; it must be an even number",
    "--model.dropout=1": "dropout=1.0 must be in [0, 1)",
    "--model.n_layers=0": "n_layers=0 must be positive",
    "--model.context_length=-1": "context_length=-1 must be positive",
    "--presett=tiny": "did you mean --preset?",
    "--preset=tinny": "did you mean --preset=tiny?",
    "--model.n_layer=2": "did you mean --model.n_layers?",
    "--train.dtype=float16": "train.dtype=float16 is not one of float32, bfloat16",
    "--device=gpu": "no gpu for JAX, only cpu",
}
CHECKS = """
import contextlib, io, sys
from jaxgpt import cli
from commands import MICRO
from test_reliability_input import WRONG
assert not sys.flags.optimize, "asserts are on"
for words, message in WRONG.items():
    with contextlib.redirect_stderr(io.StringIO()) as err:
        code = cli.train_main([*MICRO, *words.split()])
    lines = err.getvalue().splitlines()
    if code != 2 or len(lines) != 1 or message not in lines[0]:
        raise SystemExit(f"{words}: {code} {lines}")
"""


@pytest.mark.parametrize("flags", [(), pytest.param(("-O",), marks=pytest.mark.slow)])
def test_wrong_sizes_on_eight_devices(fresh, flags):
    """Rows E1 to E6, and E7: the same without asserts."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-B", *flags, "-c", CHECKS],
        env={**os.environ, **ENV, "PYTHONPATH": path, **devices},
        cwd=fresh,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("flags", ["--xla_no_such_flag=1", "--xla_cpu_max_isa", "nonsense"])
def test_flags_that_xla_does_not_know(fresh, capfd, monkeypatch, flags):
    """Row E8: XLA itself would end the process, with pages of its own."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert train() == 2
    line = error_line(capfd)
    assert f"XLA refuses XLA_FLAGS={flags}: " in line and len(line) < 500
    assert not checkpoints(fresh).exists()


def test_a_text_too_short_to_hold_out_a_part(fresh, capsys):
    """Row C13: there is nothing to evaluate, and the run is finished all the same."""
    for _ in range(2):
        assert train("--data.val_fraction=0.001") == 0
    out, err = capsys.readouterr()
    assert err == "" and " 1 validation tokens" in out and "nats/token" not in out
    assert "nothing is done" in out and steps(fresh) == [5, 10, 15, 20]


@pytest.mark.parametrize("worker", ["exit 9", "read line", "head -c 9 >&0; kill -9 $$"])
def test_a_worker_that_dies(fresh, capfd, monkeypatch, worker):
    """Row C12: the process that asks the hub ends before, after or while it is told what to ask."""
    (fresh / "worker").write_text(f"#!/bin/sh\n{worker}\n")
    (fresh / "worker").chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(fresh / "worker"))
        assert train("--data.path=hf://owner/name") == 5
    line = error_line(capfd)
    assert "the process that reads owner/name ended early" in line and "--data.path" in line


@pytest.mark.slow
def test_one_line_of_200_million_characters(tmp_path):
    """Row D13: memory is a small multiple of the text."""
    code = r"""
    import re
    from pathlib import Path
    from jaxgpt.data.config import DataConfig
    from jaxgpt.data.source import read_source
    from jaxgpt.data.tokenizer import train_tokenizer
    from jaxgpt.data.tokens import prepare_tokens
    Path("line.txt").write_text("the quick brown fox " * 10_000_000)
    def peak_kb():  # ru_maxrss would begin with the peak of the process that started this one
        return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])
    before = peak_kb()
    corpus, _ = read_source(DataConfig(path="line.txt"))
    tokenizer = train_tokenizer("char", corpus, None)
    tokens = prepare_tokens(corpus, tokenizer, Path("tokens.bin"), val_fraction=0.1)
    assert len(tokens.train) == 180_000_000
    print(peak_kb() - before)
    """
    code, out, err = run_python(f"import os; os.chdir({str(tmp_path)!r})\n" + textwrap.dedent(code))
    assert code == 0, err
    assert int(out) < 1_200_000  # kB; bytes as read, as text, and as ids are 0.6 million


# --- F: sampling ----------------------------------------------------------------------------------


def sample(capsys, *words) -> str:
    capsys.readouterr()
    assert cli.sample_main(["--run=micro", "--prompt=abc", "--max-new-tokens=20", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize(
    ("words", "like"),
    [
        (["--temperature=0"], ["--greedy"]),  # F1
        (["--temperature=1e-8"], ["--greedy"]),
        (["--top-p=0"], ["--greedy"]),  # F5
        (["--top-k=1"], ["--greedy"]),
        (["--top-k=0"], []),  # F4
        (["--top-k=1000"], []),
        (["--top-p=1"], []),
        (["--seed=0"], []),  # F10
    ],
)
def test_limits_of_the_filters(inside, capsys, words, like):
    """Rows F1, F4, F5, F10."""
    assert sample(capsys, *words) == sample(capsys, *like)


def test_lengths(inside, capsys):
    """Rows D7, F6, F7, F8, F10: none, past the context, a prompt longer than the context."""
    assert sample(capsys, "--max-new-tokens=0") == "abc\n"
    long = sample(capsys, "--max-new-tokens=60")
    assert len(long) == 64 and long.startswith(sample(capsys)[:-1])
    prompt = "abc fed\n" * 10
    text = sample(capsys, f"--prompt={prompt}")
    assert text.startswith(prompt) and len(text) == 101
    assert text[80:] == sample(capsys, f"--prompt={prompt[-16:]}")[16:], "its last 16 characters"
    assert len(sample(capsys, "--prompt=")) == 21
    assert sample(capsys, "--num-samples=3").startswith(sample(capsys))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--temperature=-1"], 2, "temperature=-1.0"),  # F2
        (["--temperature=nan"], 2, "temperature=nan"),
        (["--temperature=inf"], 2, "temperature=inf"),
        (["--top-k=-1"], 2, "top_k=-1 is negative"),  # F4
        (["--top-p=1.5"], 2, "top_p=1.5 must be in [0, 1]"),  # F5
        (["--max-new-tokens=-1"], 2, "max_new_tokens=-1 is negative"),  # F8
        (["--past-context=error"], 2, "exceed context_length=16; fix: at most 13 new tokens"),  # F7
        (["--past-context=error", "--prompt=" + "a" * 500], 2, "a prompt of 500 and"),  # F6
        (["--prompt=abé"], 2, "'é' (U+00E9)"),  # D6
        (["--prompt=a\udcffb"], 2, "the prompt is not valid UTF-8"),  # D5
        (["Once upon"], 2, "unexpected argument 'Once'"),
        (["--run=absent"], 4, "no run there: no config.yaml"),  # F9
        (["--run="], 2, "is no run name"),
        (["--num-samples=1000000000"], 2, "more than 65536 side by side; fix: fewer at a time"),
        (["--checkpoint=7"], 4, "there is no step 7, only [5, 10, 15, 20]"),
    ],
)
def test_wrong_samples(inside, capsys, words, code, message):
    """Rows D5, D6, F2 to F9; nothing is printed but the line, nothing is created."""
    assert cli.sample_main(["--run=micro", "--prompt=abc", "--max-new-tokens=20", *words]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_a_run_without_a_checkpoint(copy, capsys):
    """Row F9."""
    shutil.rmtree(checkpoints(copy))
    before = tree(copy)
    assert cli.sample_main(["--run=micro"]) == 4
    assert "there are no checkpoints" in error_line(capsys)
    assert cli.sample_main([]) == 4
    assert "there is no run with a checkpoint" in error_line(capsys)
    assert tree(copy) == before and not checkpoints(copy).exists()


def test_parameters_that_are_not_finite(inside, capsys, monkeypatch):
    """Row F12: such a checkpoint is never written, so it is poisoned as it is read."""
    load = sources.load_params

    def poisoned(*args):
        return jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), load(*args))

    monkeypatch.setattr(sources, "load_params", poisoned)
    assert cli.sample_main(["--run=micro", "--max-new-tokens=3"]) == 3
    assert "the model's logits are not finite" in capsys.readouterr().err


# --- H --------------------------------------------------------------------------------------------


def test_nothing_in_the_package_runs_what_it_reads():
    """Row H1."""
    pickle = r"(import|from) +\w*(pickle|dill|marshal)|pickle\.\w|torch\.load|allow_pickle=True"
    forbidden = re.compile(pickle + r"|yaml\.(unsafe_)?load\(|\b(eval|exec)\(")
    files = [*Path(cli.__file__).parents[1].rglob("*.py"), ROOT / "train.py", ROOT / "sample.py"]
    assert len(files) > 50
    for file in files:
        assert not (found := forbidden.search(file.read_text())), (file, found)
