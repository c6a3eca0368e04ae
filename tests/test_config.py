# SPDX-License-Identifier: Apache-2.0
import dataclasses
import re
import sys

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import PostNorm
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.init import Normal
from jaxgpt.boxes.norm import LayerNorm, RMSNorm
from jaxgpt.boxes.rope import RoPE
from jaxgpt.config import FREE, RunConfig, differences, from_yaml, resolve, said_in, to_yaml
from jaxgpt.data.config import DataConfig
from jaxgpt.errors import ConfigError
from jaxgpt.model import LayerEdit, ModelConfig
from jaxgpt.study.config import ShowConfig
from jaxgpt.train.config import MeshConfig, OptimConfig, TrainConfig

BASE = RunConfig(
    model=ModelConfig(
        vocab_size=None,
        d_model=64,
        n_layers=4,
        attention=GQA(n_heads=4, n_kv_heads=2, qk_norm=RMSNorm()),
        norm=LayerNorm(use_bias=False),
        position=RoPE(),
    )
)
MY_ATTENTION = """
import dataclasses
from jaxgpt.boxes.base import AttentionBox, NormBox
from jaxgpt.boxes.norm import RMSNorm

@dataclasses.dataclass(frozen=True)
class MeanPool(AttentionBox):
    scale: float = 1.0
    n_heads: int = 3  # a name that GQA has too
    norm: NormBox = RMSNorm()

@dataclasses.dataclass(frozen=True)
class Needs(AttentionBox):
    scale: float

class Plain(AttentionBox):
    pass
"""


def options(*words: str) -> RunConfig:
    return resolve(BASE, (), words, known=["preset"])


@pytest.fixture
def my_attention(tmp_path, monkeypatch):
    (tmp_path / "my_attention.py").write_text(MY_ATTENTION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_attention", None)


def test_one_field_of_the_base_box_changes_and_the_others_stay():
    run = options("--model.attention.n_kv_heads=4", "--model.n_layers", "6", "--optim.lr=3e-4")
    attention = dataclasses.replace(BASE.model.attention, n_kv_heads=4)
    assert run.model == dataclasses.replace(BASE.model, n_layers=6, attention=attention)
    assert run.optim == dataclasses.replace(BASE.optim, lr=3e-4)
    assert (run.data, run.train) == (BASE.data, BASE.train)


@pytest.mark.parametrize("order", [1, -1])
def test_naming_a_class_resets_its_fields(order):
    words = ["--model.attention=GQA", "--model.attention.n_heads=2"][::order]
    assert options(*words).model.attention == GQA(n_heads=2)
    assert options("--model.norm=LayerNorm").model.norm == LayerNorm()
    assert options("--model.norm=RMSNorm", "--model.norm.eps=1e-6").model.norm == RMSNorm(1e-6)


def test_a_box_inside_a_box():
    run = options("--model.attention.qk_norm.eps=1e-3")
    assert run.model.attention == GQA(n_heads=4, n_kv_heads=2, qk_norm=RMSNorm(1e-3))
    run = options("--model.attention.qk_norm=LayerNorm", "--model.attention.qk_norm.use_bias=false")
    assert run.model.attention.qk_norm == LayerNorm(use_bias=False)
    assert options("--model.attention.qk_norm=null").model.attention.qk_norm is None


def test_a_box_of_ones_own(my_attention):
    run = options("--model.attention=my_attention.MeanPool", "--model.attention.scale=0.5")
    attention = run.model.attention
    assert type(attention).__name__ == "MeanPool" and attention.scale == 0.5
    assert attention.n_heads == 3, "a field of the same name in the old box must not carry over"
    assert "class_path: my_attention.MeanPool" in to_yaml(run)
    assert from_yaml(to_yaml(run)) == run
    run = options("--model.attention=my_attention.MeanPool", "--model.attention.norm.eps=0.1")
    assert run.model.attention.norm == RMSNorm(0.1)
    run = options("--model.attention=my_attention.Needs", "--model.attention.scale=2")
    assert run.model.attention.scale == 2
    with pytest.raises(ConfigError, match=r"model\.attention.*scale"):
        options("--model.attention=my_attention.Needs")
    with pytest.raises(ConfigError, match="is no AttentionBox"):
        options("--model.attention=my_attention.Plain")
    with pytest.raises(ConfigError, match=r"cannot be imported: .*no attribute 'Mean'"):
        options("--model.attention=my_attention.Mean")


EDITS = "[{every: 2, start: 1, set: {attention.window: 4, position.theta: 1e6}}, {ffn: GatedMLP}]"
EDITED = (
    LayerEdit(every=2, start=1, set={"attention.window": 4, "position.theta": 1e6}),
    LayerEdit(ffn=GatedMLP()),
)


def test_layer_edits_on_the_command_line_and_in_yaml(tmp_path):
    run = options(f"--model.edits={EDITS}")
    assert run.model.edits == EDITED
    assert [layer.attention.window for layer in run.model.layers] == [None, 4, None, 4]
    file = tmp_path / "run.yaml"
    file.write_text(f"model:\n  edits: {EDITS}\n")
    assert resolve(BASE, [file]).model.edits == EDITED
    assert from_yaml(to_yaml(run)) == run


def test_boxes_inside_edits_round_trip():
    sets = {"attention.qk_norm": RMSNorm(1e-3), "attention.window": None}
    run = dataclasses.replace(
        BASE, model=dataclasses.replace(BASE.model, edits=(LayerEdit(set=sets),))
    )
    assert from_yaml(to_yaml(run)) == run
    word = (
        "--model.edits=[{set: {attention.qk_norm: {class_path: RMSNorm, init_args: {eps: 1e-3}}}}]"
    )
    assert options(word).model.edits[0].set == {"attention.qk_norm": RMSNorm(1e-3)}


def test_layers_base_then_files_then_options(tmp_path):
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("model: {attention: {n_heads: 2}, n_layers: 3}\ntrain: {steps: 500}\n")
    second.write_text("model: {n_layers: 5, ffn: {class_path: MLP, init_args: {d_ff: 7}}}\n")
    run = resolve(BASE, [first, second], ["--train.steps=600", "--model.ffn.activation=relu"])
    assert run.model.attention == dataclasses.replace(BASE.model.attention, n_heads=2)
    assert (run.model.n_layers, run.train.steps) == (5, 600)
    assert run.model.ffn == MLP(d_ff=7, activation="relu")
    first.write_text("model: {attention: {class_path: GQA, init_args: {n_heads: 2}}}")
    assert resolve(BASE, [first]).model.attention == GQA(n_heads=2), "a class in a file resets too"


def test_none_and_odd_strings_survive_yaml():
    run = RunConfig(
        model=ModelConfig(vocab_size=None, init=Normal(std=None), block=PostNorm()),
        data=DataConfig(path="1e3", encoding="null"),
        optim=OptimConfig(clip=None, final_lr=0.0),
    )
    assert from_yaml(to_yaml(run)) == run
    assert from_yaml("") == from_yaml("{}") == RunConfig()


words = st.text() | st.from_regex(r"[+.0-9e-]{1,5}", fullmatch=True)
texts = words.filter(lambda text: text.strip() not in ("~", "null", "---"))
finite = st.floats(1e-30, 1e30, allow_nan=False)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    texts,
    finite,
    finite,
    st.none() | finite,
    st.booleans(),
    st.integers(1, 2**40),
)
@example("a\x85b\u2028c\u2029", 1.0, 1.0, None, False, 1)
@example("1\x85", 1.0, 1.0, None, False, 1)
def test_round_trip_is_exact(path, lr, eps, clip, bias, steps):
    run = RunConfig(
        model=ModelConfig(norm=LayerNorm(eps=eps, use_bias=bias)),
        data=DataConfig(path=path),
        optim=OptimConfig(lr=lr, clip=clip, warmup_steps=0),
        train=TrainConfig(steps=steps),
    )
    assert from_yaml(to_yaml(run)) == run


def test_differences_name_keys_and_values():
    new = options(
        "--model.n_layers=5",
        "--model.attention.n_heads=2",
        "--model.norm=RMSNorm",
        "--train.steps=7",
        "--optim.warmup_steps=0",
    )
    assert differences(BASE, BASE) == []
    assert differences(BASE, new) == [
        "model.n_layers: 4 -> 5",
        "model.norm: LayerNorm(eps=1e-05, use_bias=False) -> RMSNorm(eps=1e-05, one_plus=False)",
        "model.attention.n_heads: 4 -> 2",
        "optim.warmup_steps: 100 -> 0",
        "train.steps: 1000 -> 7",
    ]
    names = {f"train.{field.name}" for field in dataclasses.fields(TrainConfig)}
    names |= {f"show.{field.name}" for field in dataclasses.fields(ShowConfig)}
    names |= {f"mesh.{field.name}" for field in dataclasses.fields(MeshConfig)}
    names |= {"data.hub_timeout"}
    assert names > FREE and "train.batch_size" not in FREE and "train.seed" not in FREE


@pytest.mark.parametrize(
    "word, message",
    [
        ("--model.n_layer=3", r"--model\.n_layer; fix: did you mean --model\.n_layers\?"),
        ("--n_layers=3", r"did you mean --model\.n_layers\?"),
        ("--lr=3", r"did you mean --optim\.lr\?"),
        ("--presett=tiny", r"did you mean --preset\?"),
        ("--model.attention.n_kv_head=2", r"did you mean --model\.attention\.n_kv_heads\?"),
        ("--model.attention=GQB", r"did you mean model\.attention=GQA\?"),
        ("--model.norm=GQA", "model.norm=GQA is no NormBox; fix: one of LayerNorm, "),
        ("--model.attention=no_such_module.X", "cannot be imported: No module named"),
        ("--model.attention=os.path", "is no AttentionBox"),
        ("--model.attention=null", "not the name of a class"),
        ("--model.n_layers.x=3", r"unknown name --model\.n_layers\.x"),
        ("--model.n_layers=x", r"model\.n_layers=x is not int"),
        ("--model.n_layers=1.5", r"model\.n_layers=1\.5 is not int"),
        ("--model.vocab_size=x", r"model\.vocab_size=x is not int or null"),
        ("--train.dtype=float16", r"train\.dtype=float16 is not one of float32, bfloat16"),
        ("--model.ffn.activation=swish", "is not one of gelu_tanh"),
        ("--model.attention.qk_norm.eps=-1", r"^eps=-1\.0 must be positive$"),
        ("--model.edits=3", "is not a list"),
        ("--model.edits=[{evry: 2}]", r"did you mean model\.edits\[0\]\.every"),
        ("--model.edits=[{every: x}]", "=x is not int"),
        ("--model.edits=[{every: 0}]", "every=0 must be positive"),
        ("--model.edits=[{set: 3}]", "not names with values"),
        ("--model.edits=[{set: {attention.window: no}}]", r"window=False is not int or null"),
        ("--model.edits=[{set: {attention.widow: 3}}]", "layer edit sets 'attention.widow'"),
        ("--model.edits=[{ffn: {class_path: MLP, init_args: {d_ff: -1}}}]", "^d_ff=-1 must be"),
        ("--model.edits=[{", "not YAML"),
        ("--model=3", "not names with values"),
        ("--train.remat", "--train.remat has no value"),
        ("--train.remat=true", r"train\.remat=true is not one of none, dots, full"),
        ("--train.loss_chunk=0", "loss_chunk=0 is too small"),
        ("--train.dispatch=0", "dispatch=0 is too small"),
        ("stray", "unexpected argument 'stray'"),
        ("-x", "unexpected argument '-x'"),
        # Values that cannot be, reported by the dataclasses themselves.
        ("--model.attention.n_heads=3", "n_heads=3 is not divisible by n_kv_heads=2"),
        ("--model.d_model=66", "d_model=66 is not divisible by n_heads=4 .*fix: n_heads of"),
        ("--model.attention.head_dim=5", "RoPE rotates pairs"),
        ("--model.dropout=1", r"dropout=1\.0 must be in \[0, 1\)"),
        ("--model.n_layers=0", "n_layers=0 must be positive"),
        ("--model.context_length=-1", "context_length=-1 must be positive"),
        ("--optim.lr=0", "lr=0.0 must be positive"),
        ("--optim.lr=-1", "lr=-1.0 must be positive"),
        ("--optim.lr=.nan", "lr=nan must be"),
        ("--optim.warmup_steps=1001", r"warmup_steps=1001 exceeds train\.steps=1000"),
        ("--train.accumulate=5", "batch_size=32 is not divisible by accumulate=5"),
    ],
)
def test_mistakes_are_one_line_with_the_name(word, message):
    with pytest.raises(ConfigError, match=message) as caught:
        options(word)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_box_that_is_not_there():
    with pytest.raises(ConfigError, match=r"no box at model\.attention\.qk_norm; fix: --model"):
        options("--model.attention=GQA", "--model.attention.qk_norm.eps=1")


@pytest.mark.parametrize(
    "text, message",
    [
        ("modell: {}", "unknown name modell .*run.yaml.*did you mean model"),
        ("model: {n_layer: 3}", r"unknown name model\.n_layer .*did you mean model\.n_layers"),
        ("model: {attention: {class_path: GQA, n_heads: 2}}", "beside class_path"),
        ("[1, 2]", "not names with values"),
        ("a: [", "not YAML"),
        ("train: !!python/object/apply:os.system ['false']", "not YAML"),
        ("train: {steps: many}", r"train\.steps=many is not int"),
    ],
)
def test_mistakes_in_a_file_name_the_file(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        resolve(BASE, [file])
    with pytest.raises(ConfigError, match=message):
        from_yaml(text, where="run.yaml")


@pytest.mark.parametrize(("old", "new"), [("true", "full"), ("false", "none"), ("dots", "dots")])
def test_remat_of_runs_from_before_there_was_a_choice(old, new):
    assert from_yaml(f"train: {{remat: {old}}}").train.remat == new


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*no\.yaml: No such file"):
        resolve(BASE, [tmp_path / "no.yaml"])


def test_yaml_is_plain():
    data = yaml.safe_load(to_yaml(BASE))
    assert data["model"]["attention"]["class_path"] == "GQA", "ours are named by class alone"
    assert data["model"]["attention"]["init_args"]["n_kv_heads"] == 2
    assert list(data) == [*("model", "data", "optim", "train", "lora", "mesh", "show", "init_from")]


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("attention/*", ("attention/*",)),
        ("*", ("*",)),
        ("[attention/*, ffn/*]", ("attention/*", "ffn/*")),
        ("['attention/[qv]']", ("attention/[qv]",)),
    ],
)
def test_a_text_stands_for_a_list_of_it(text, targets, tmp_path):
    run = resolve(BASE, (), ["--lora.rank=8", f"--lora.targets={text}"])
    assert run.lora.targets == targets and from_yaml(to_yaml(run)) == run
    file = tmp_path / "run.yaml"
    file.write_text(f"lora: {{targets: '{targets[0]}'}}\ninit_from: a/b\n")
    assert resolve(BASE, [file]).lora.targets == targets[:1]
    assert said_in([file], "init_from") == "a/b" and said_in([], "init_from") is None


def test_lists_that_are_none():
    for text, words in (("[1]", "lora.targets=1 is not list of str"), ("[]", "is empty")):
        with pytest.raises(ConfigError, match=re.escape(words)):
            resolve(BASE, (), [f"--lora.targets={text}"])
