# SPDX-License-Identifier: Apache-2.0
"""`jaxgpt report`: one page of a run in any state, shown by a browser, taken over by no text."""

import json
import re
import shutil
import subprocess

import jax
import pytest
import runpages
from commandline import ROOT, error_line
from test_page import Reader

from jaxgpt import cli
from jaxgpt.cli import report
from jaxgpt.cli.report import Look, nearest, write_report
from jaxgpt.cli.show import shown
from jaxgpt.config import RunConfig
from jaxgpt.errors import ResourceError
from jaxgpt.model import init_params
from jaxgpt.presets import RUNS
from jaxgpt.presets.runs import finetune
from jaxgpt.study.config import ShowConfig
from jaxgpt.train.runfolder import RunFolder

PARTS = ["The model", "Configuration", "Curves", "Evaluation", "Samples", "Attention", "Speed"]
PARTS += ["Memory", "Events", "Environment"]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A run folder without checkpoints, named so that it must be escaped."""
    monkeypatch.chdir(tmp_path)
    return runpages.folder(tmp_path / "runs" / "<b>mine")


def page_of(folder, **options):
    run = runpages.small()
    path = write_report(RunFolder(folder), run, options.pop("params", None), **options)
    text = path.read_text(encoding="utf-8")
    return text, Reader(text)


def headings(text):
    return re.findall("<h2 [^>]*>(.*?)</h2>", text)


def test_a_page_of_all_parts(mine):
    def params(model):
        return init_params(model, jax.random.key(0))

    look = Look(text="the quick", heads=[0])
    text, read = page_of(mine, params=params, look=look)
    assert headings(text) == PARTS and len(text) < 2_000_000
    said = "|".join(read.text)
    for words in (
        "Run <b>mine",
        "closest preset|tiny, but for",
        "model.d_model|16|128|",
        "vocab_multiple: 128",
        "The text: 'the quick'",
        "validation loss 1.6458 nats per token",
        "skipped|not finite",
        "5eed5eed",
    ):
        assert words in said, words
    assert sum(name == "src" for name, _ in read.attributes) == 4, "three curves, one map"


def test_nothing_of_a_run_becomes_markup(mine):
    (mine / "evaluation.json").write_text(json.dumps({runpages.EVIL: runpages.EVIL}))
    text, read = page_of(mine)
    assert not {"script", "b", "link", "iframe"} & set(read.tags)
    assert all(
        value.startswith("data:image/svg+xml") for name, value in read.attributes if name == "src"
    )
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    assert "default-src 'none'" in text and "\x00" not in text and "\x1b" not in text


def test_a_run_that_has_only_begun(tmp_path):
    folder = tmp_path / "new"
    folder.mkdir()
    text, read = page_of(folder)
    assert headings(text) == PARTS
    said = "".join(read.text)
    with pytest.raises(ResourceError, match=r"where\.html cannot be written"):
        page_of(folder, out=tmp_path / "no" / "where.html")
    for words in ("trained for 0 of 400 steps", "No curves", "No samples", "No attention maps"):
        assert words in said, words
    assert "No validation loss" in said and "No speed" in said and "the run has not begun" in said


def test_attention_of_a_checkpoint_that_is_not_there(mine, capsys, tmp_path):
    name, out = "./runs/<b>mine", tmp_path / "out.html"
    assert cli.main(["report", name, f"--out={out}"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert "No attention maps: " in out.read_text()
    assert cli.main(["report", name, "--checkpoint=7"]) == 4, "it was asked for"
    assert "error: " in error_line(capsys)


@pytest.mark.slow
def test_a_finished_run(copy, capsys):
    assert cli.main(["report"]) == 0, "the newest"
    path = copy / "runs" / "micro" / "report.html"
    assert capsys.readouterr().out == f"{path}\n"
    text = path.read_text()
    assert "checkpoint: latest" in text and "all of its 20 steps" in text
    assert 'alt="Attention of layer 0 over' in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nope"], 4, "no run there"),
        (["--layers", "5"], 2, "no layer 5"),
        (["--heads", "9"], 2, "no map of layer 0, head 9"),
        (["--no-attention", "--out=no/where.html"], 5, "where.html cannot be written"),
        (["--checkpoint=some"], 2, "fix: latest, best or the number of a step"),
        (["--output=x"], 2, "unknown name --output"),
    ],
)
def test_mistakes(copy, capsys, words, code, message):
    assert cli.main(["report", *words]) == code
    assert message in error_line(capsys)


def test_the_nearest_recipe():
    assert nearest(RUNS["shakespeare"]()) == ("shakespeare", [])
    name, changes = nearest(runpages.small())
    assert name == "tiny" and "model.d_model: 128 -> 16" in changes
    tuned = finetune("some/model", runpages.small().model)
    assert nearest(tuned)[0] == "finetune" and isinstance(tuned, RunConfig)


def test_help(capsys):
    assert cli.main(["report", "--help"]) == 0
    assert capsys.readouterr().out == report.HELP
    options = {word for word in re.findall(r"--[a-z-]+", report.HELP)}
    assert options == set(report._parser()._option_string_actions) - {"-h"}
    page = (ROOT / "docs" / "report.md").read_text()
    assert all(f"`{option}" in page for option in options - {"--help"})
    assert all(f"| {part}" in page for part in PARTS)


def test_a_run_may_end_with_it(mine):
    show = ShowConfig(sample_tokens=0, pictures=False, report=True)
    with shown(RunFolder(mine), runpages.small(show=show)) as shows:
        (ending,) = shows["endings"]
        line = ending(init_params(runpages.shown().model, jax.random.key(0)))
    assert line == f"wrote {mine / 'report.html'}"
    with shown(RunFolder(mine), runpages.small()) as shows:
        assert len(shows["endings"]) == 2, "not unless it is asked for"


# --- as a person sees it --------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--enable-logging=stderr", "--disable-dev-shm-usage"),
)


@pytest.fixture
def browse(tmp_path):
    """Runs Chromium on a file; returns what it printed."""
    found = [path for name in BROWSERS if (path := shutil.which(name))]
    if not found:
        pytest.skip("no Chromium or Chrome on this machine")

    def run(file, *words):
        command = [found[0], *CHROMIUM, f"--user-data-dir={tmp_path / 'profile'}", *words]
        done = subprocess.run(
            [*command, file.as_uri()], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return run


@pytest.mark.slow
@pytest.mark.parametrize("width", [1100, 390])
def test_a_browser_shows_it(mine, browse, width, tmp_path):
    from matplotlib.image import imread

    page_of(mine)
    shot = tmp_path / "shot.png"
    words = [f"--screenshot={shot}", f"--window-size={width},2600"]
    _, err = browse(mine / "report.html", *words)
    assert "CONSOLE" not in err, err
    pixels = imread(shot)[..., :3]
    assert pixels.shape[1] == width
    ink = (pixels.min(-1) < 0.5).mean()
    assert 0.005 < ink < 0.5, f"{ink:.2%} of the page is dark"
    third = len(pixels) // 3
    for part in (pixels[:third], pixels[third : 2 * third]):
        assert (part.min(-1) < 0.5).any(), "not blank"


@pytest.mark.slow
def test_no_script_of_a_sample_runs_in_a_browser(mine, browse):
    text, _ = page_of(mine)
    (mine / "taken.html").write_text("<title>a</title><script>document.title = 'taken'</script>")
    assert "<title>taken</title>" in browse(mine / "taken.html", "--dump-dom")[0], "scripts do run"
    dom, _ = browse(mine / "report.html", "--dump-dom")
    assert "<title>Run &lt;b&gt;mine</title>" in dom and "<script" not in dom
    with_script = mine / "unescaped.html"
    with_script.write_text(
        text.replace("</main>", "<script>document.title = 'taken'</script></main>")
    )
    assert "<title>taken</title>" not in browse(with_script, "--dump-dom")[0], "the policy holds"
