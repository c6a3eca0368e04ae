# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/ name everything there is; that their code runs is `test_readme.py`'s."""

import dataclasses
import functools
import inspect
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxgpt import shapes
from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import Sandwich
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import ACTIVATIONS, GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.cli.export import HELP as EXPORT_HELP
from jaxgpt.cli.help import summary
from jaxgpt.cli.sample import HELP
from jaxgpt.configlib import our_boxes
from jaxgpt.flops import count_active_params
from jaxgpt.interop import FAMILIES
from jaxgpt.interop.hub import SHORT_NAMES
from jaxgpt.losses import Score
from jaxgpt.model import LayerEdit, forward, param_shapes
from jaxgpt.presets import MODELS as PRESETS
from jaxgpt.presets.runs import finetune
from jaxgpt.sample.filters import Sampling
from jaxgpt.testing import tiny
from jaxgpt.train.config import LoraConfig, OptimConfig, TrainConfig
from jaxgpt.train.digest import by_path
from jaxgpt.train.health import Speed
from jaxgpt.train.optimizers import OptimBox
from jaxgpt.train.runfolder import RunFolder

DOCS = Path(__file__).resolve().parents[1] / "docs"
MODELS = {
    "gpt2": tiny(),
    "gated": tiny(attention=GQA(4, qk_norm=RMSNorm()), ffn=GatedMLP(), head=Untied()),
    "sandwich": tiny(block=Sandwich(), attention=GQA(4, sinks=True), embed=Embed(width=8)),
    "experts": tiny(ffn=MoE(4, shared=GatedMLP(), balance_rate=0.1)),
    "latent": tiny(attention=MLA(4, kv_rank=6, q_rank=7, nope_dim=5, rope_dim=4, v_dim=3)),
}


def page(name):
    return (DOCS / f"{name}.md").read_text()


@pytest.mark.parametrize("name", our_boxes())
def test_every_box_and_knob_has_its_row(name):
    where = "training" if issubclass(our_boxes()[name], OptimBox) else "boxes"
    rows = [line for line in page(where).splitlines() if line.startswith(f"| `{name}` |")]
    assert len(rows) == 1, f"docs/{where}.md needs one row for {name}"
    knobs = rows[0].split("|")[2]
    for field in dataclasses.fields(our_boxes()[name]):
        value = field.default
        shown = json.dumps(value) if isinstance(value, str) else repr(value)
        assert f"`{field.name}={shown}`" in knobs
    assert len(re.findall(r"`\w+=", knobs)) == len(dataclasses.fields(our_boxes()[name]))


@pytest.mark.parametrize("name", our_boxes())
def test_the_readme_has_file_lines_and_source_of_every_box(name):
    table = (DOCS.parent / "README.md").read_text().split("## The boxes")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|") and f"`{name}`" in line]
    assert len(rows) == 1, f"the table of boxes in README.md needs one row for {name}"
    *_, cell, source, _ = rows[0].split("|")
    files = re.findall(r"\[\S+\]\((\S+)\), (\d+)", cell)
    assert Path(inspect.getfile(our_boxes()[name])) in [DOCS.parent / path for path, _ in files]
    for path, lines in files:
        now = len((DOCS.parent / path).read_text().splitlines())
        assert abs(int(lines) - now) <= 0.2 * now, f"{path} now has {now} lines"
    assert re.search(r"\d{4}", source)


def test_activations_and_edits_are_named():
    text = page("boxes")
    assert all(f"`{name}`" in text for name in ACTIVATIONS)
    assert all(f"`{field.name}`" in text for field in dataclasses.fields(LayerEdit))


def test_dimension_letters_are_those_of_the_code():
    def letters(text):
        cells = [line.strip("| ").split("|") for line in text.splitlines() if line.count("|") == 5]
        return {row[i].strip(): row[i + 1].strip() for row in cells for i in (0, 2)}

    want = {k: v for k, v in letters(shapes.__doc__ or "").items() if len(k) == 1}
    got = letters(page("dims"))
    assert len(want) == 14 and {k: got.get(k) for k in want} == want


@pytest.mark.parametrize("name", MODELS)
def test_parameter_paths_and_sites_are_named(name):
    text, cfg = page("dims"), MODELS[name]
    params = param_shapes(cfg)
    for path in by_path(params):
        if not path.endswith("/bias"):
            assert f"`{re.sub('block_[0-9]+', 'block_i', path)}`" in text
    look = functools.partial(forward, cfg, capture=["*"])
    sites = jax.eval_shape(look, params, jnp.zeros((1, 4), jnp.int32)).captured
    assert sites
    for site in sites:
        short = re.sub("block_[0-9]+", "block_i", site)
        assert f"`{short}`" in text or f"`{short.rpartition('/')[2]}`" in text


def test_presets_have_their_rows():
    lines = [line for line in page("presets").splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [name.strip("`") for name, *_ in rows] == list(PRESETS)
    for (_, total, active, source), made in zip(rows, PRESETS.values(), strict=True):
        said = summary(made)  # test_presets.py holds it to the count
        assert f" {total} parameters" in said
        if checkpoint := re.search(r"as ([\w.-]+/[\w.-]*\w)", said):
            assert source == f"[{checkpoint[1]}](https://huggingface.co/{checkpoint[1]})"
        else:
            assert "/" not in said and "huggingface" not in source and source
        if active:
            assert active == f"{count_active_params(made()):,}"


def test_options_of_sampling_are_named():
    text = page("sampling")
    for option in set(re.findall(r"--[a-z-]+", HELP)) - {"--help"}:
        assert option in text, option
    order = ["Repetition penalty", "Temperature", "Top-k", "Top-p", "Min-p", "Filters of your own"]
    names = {name.lower().replace(" ", "_").replace("-", "_") for name in order[:-1]}
    assert names == {field.name for field in dataclasses.fields(Sampling)}
    assert re.findall(r"^\d\. \*\*(.*?)\*\*", text, re.MULTILINE) == order


def test_families_names_and_knobs_of_weights_are_named():
    text = page("weights")
    for name in (*FAMILIES, *SHORT_NAMES):
        assert f"`{name}`" in text, name
    for field in dataclasses.fields(LoraConfig):
        assert f"| `lora.{field.name}` |" in text
    run = finetune("x", tiny(context_length=4096))
    for group, name in (("train", "steps"), ("optim", "lr"), ("model", "context_length")):
        assert f"`{group}.{name}`" in text
    knobs = run.train.steps, run.train.batch_size, run.model.context_length
    assert knobs == (200, 8, 512) and "| 200, 8 |" in text and "512" in text
    assert f"1e-4, {run.optim.warmup_steps}, {run.optim.weight_decay}" in text
    assert run.optim.lr == 1e-4


def test_options_of_export_are_named():
    text = page("weights")
    for option in set(re.findall(r"--[a-z-]+", EXPORT_HELP)) - {"--help", "--lora"}:
        assert f"| `{option}` |" in text, option


def test_knobs_files_and_metrics_of_training_are_named(tmp_path):
    text = page("training")
    for group, cls in (("optim", OptimConfig), ("train", TrainConfig)):
        for field in dataclasses.fields(cls):
            assert f"`{group}.{field.name}" in text, field.name
    folder = RunFolder(tmp_path)
    for path in (folder.config_path, folder.tokenizer_path, folder.facts_path, folder.metrics_path):
        assert f"`{path.name}`" in text
    training = ("loss_nats", "grad_norm", "n_tokens", "lr", "tokens_per_s", "param_norm")
    training += ("update_ratio", "skipped_steps", "max_attention_logit", "val_ema_nats_per_token")
    training += ("peak_host_bytes", "peak_device_bytes")
    for name in (*training, *Score(1.0, 1, 1, 1).metrics(), *Speed(1.0, 1.0, 1.0).metrics(1.0)):
        assert f"`{name}`" in text
    for code in (0, 2, 3, 4, 5):
        assert f"\n| {code} | " in text


def test_tolerances_stand_in_the_files_that_the_table_names():
    rows = re.findall(r"\| (\d\S*)[^|]*\| \[\S+\]\((\S+)\) \|$", page("numerics"), re.MULTILINE)
    assert len(rows) > 10
    for tolerance, file in rows:
        assert re.search(rf"(?<![\w.]){re.escape(tolerance)}\b", (DOCS / file).read_text()), file
