# SPDX-License-Identifier: Apache-2.0
import io
import os
import sys
from pathlib import Path

import jax
import pytest
from commandline import MICRO, TEXT, error_line

from jaxgpt import cli
from jaxgpt.cli.sample import escape_controls, in_order
from jaxgpt.sample.text import Piece


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with one finished micro run, `runs/tiny`, of real training."""
    path = tmp_path_factory.mktemp("trained")
    (path / "text.txt").write_text(TEXT)
    before = os.getcwd()
    os.chdir(path)
    try:
        assert cli.train_main(["--preset=tiny", *MICRO]) == 0
    finally:
        os.chdir(before)
    return path


def sample(capsys, *words, code=0) -> str:
    capsys.readouterr()
    assert cli.sample_main(["--max-new-tokens=20", *words]) == code
    return capsys.readouterr().out if code == 0 else error_line(capsys)


@pytest.fixture
def in_trained(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return trained


def test_sample_from_the_newest_run(in_trained, capsys):
    text = sample(capsys, "--prompt=the ")
    assert text.startswith("the ") and len(text) == 4 + 20 + 1
    assert set(text) <= set(TEXT)
    assert sample(capsys, "--prompt=the ") == text, "the same seed"
    assert sample(capsys, "--prompt=the ", "--run=tiny", "--checkpoint=4") == text
    assert sample(capsys, "--prompt=the ", f"--run={in_trained}/runs/tiny") == text
    assert sample(capsys, "--prompt=the ", "--seed=1") != text
    assert len(sample(capsys)) == 21, "an empty prompt"
    greedy = sample(capsys, "--greedy", "--checkpoint=best", "--dtype=float32")
    assert sample(capsys, "--temperature=0", "--checkpoint=best", "--seed=9") == greedy
    assert sample(capsys, "--checkpoint=2", "--seed=1") != sample(capsys, "--seed=1")


@pytest.mark.parametrize("weights, kind", [("bfloat16", "bfloat16"), ("int8", "int8")])
def test_weights_are_stored_as_asked_for(in_trained, capsys, monkeypatch, weights, kind):
    from jaxgpt.sample import text

    found = []

    def look(cfg, params, *_, dtype, **__):
        found.append((str(dtype), {str(x.dtype) for x in jax.tree.leaves(params) if x.ndim > 1}))
        return iter([Piece(0, "x", True)])

    monkeypatch.setattr(text, "stream_text", look)
    assert sample(capsys, f"--weights={weights}") == "x\n"
    sample(capsys, "--dtype=bfloat16")
    (asked, stored), (dtype, plain) = found
    assert asked == "float32" and kind in stored
    assert dtype == "bfloat16" and plain == {"bfloat16"}


def test_several_samples_and_stop_strings(in_trained, capsys):
    text = sample(capsys, "--prompt=fox", "--num-samples=3")
    first, *others = text.split("\n" + "-" * 40 + "\n")
    assert len(others) == 2 and all(each.startswith("fox") for each in (first, *others))
    assert sample(capsys, "--prompt=fox") == first + "\n"
    stop = first[10:12]
    cut = sample(capsys, "--prompt=fox", f"--stop={stop}", "--stop=@@")
    assert cut == "fox" + first[3 : 3 + first[3:].index(stop)] + "\n"


def test_prompts_from_files_are_taken_exactly(in_trained, capsys, monkeypatch):
    Path("prompt.txt").write_bytes(b"fox\n\n")
    assert sample(capsys, "--prompt-file=prompt.txt").startswith("fox\n\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"dog \n")))
    assert sample(capsys, "--prompt-file=-").startswith("dog \n")
    Path("prompt.txt").write_bytes(b"fox\xff")
    line = sample(capsys, "--prompt-file=prompt.txt", code=2)
    assert "not valid UTF-8: byte 3 (prompt.txt)" in line


@pytest.mark.parametrize(
    "words, code, message",
    [
        (["--prompt=a\udcffb"], 2, "the prompt is not valid UTF-8"),
        (["--prompt=né"], 2, "'é' (U+00E9)"),
        (["--prompt=a", "--prompt-file=b"], 2, "exclude each other"),
        (["--prompt-file=nope"], 2, "cannot read the prompt: No such file"),
        (["--temperature=-1"], 2, "temperature=-1.0"),
        (["--temperatur=1"], 2, "did you mean --temperature?"),
        (["--temp=1"], 2, "unknown name --temp"),
        (["--top-k=x"], 2, "invalid int value: 'x'"),
        (["--num-samples=0"], 2, "num_samples=0"),
        (["--stop="], 2, "empty stop string"),
        (["--past-context=error"], 2, "exceed context_length=16"),
        (["--checkpoint=3"], 4, "no step 3"),
        (["--checkpoint=first"], 2, "latest, best or the number of a step"),
        (["--run=nope"], 4, "fix: --run with one of tiny"),
        (["--run=../up"], 4, "no run there"),
    ],
)
def test_sample_mistakes(in_trained, capsys, words, code, message):
    assert message in sample(capsys, *words, code=code)


def test_control_characters_are_spelled_out_on_a_terminal_only(in_trained, capsys, monkeypatch):
    assert escape_controls("a\x1b[31m\r\tb\n\x9bé") == "a\\x1b[31m\\r\tb\n\\x9bé"
    from jaxgpt.sample import text

    pieces = [Piece(0, "\x1b[2J", True)]
    monkeypatch.setattr(text, "stream_text", lambda *a, **k: iter(pieces))
    assert sample(capsys, "--prompt=x") == "x\x1b[2J\n"
    capsys.readouterr()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert sample(capsys, "--prompt=x") == "x\\x1b[2J\n"
    assert sample(capsys, "--prompt=x", "--raw") == "x\x1b[2J\n"


def test_texts_come_one_after_the_other_as_soon_as_they_can():
    pieces = [
        (Piece(0, "a", False), "a"),
        (Piece(1, "B", False), ""),
        (Piece(0, "b", True), "b\n----\np>B"),
        (Piece(2, "z", True), ""),
        (Piece(1, "C", True), "C\n----\np>z\n"),
    ]
    shown = []

    def source():
        for piece, _ in pieces:
            shown.append("")
            yield piece

    texts = in_order(source(), "p>", 3)
    assert next(texts) == "p>"
    for text in texts:
        shown[-1] += text.replace("-" * 40, "----")
    assert shown == [expected for _, expected in pieces]
