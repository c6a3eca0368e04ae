# SPDX-License-Identifier: Apache-2.0
"""Meshes of eight devices against one, and the table that says which parameter is split how."""

import dataclasses
import re
from typing import ClassVar

import flax.linen as nn
import jax
import meshes
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.base import FFNBox
from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.boxes.rope import RoPE
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig
from jaxgpt.presets.models import MODELS
from jaxgpt.train.config import MeshConfig
from jaxgpt.train.sharding import AXES, check_rows, make_mesh, param_specs

LOSS = 1e-5  # of a loss on a mesh against one device, over twenty steps
SHARE = 0.05  # of the bytes of parameters and moments on a device, relative

ONE = dict.fromkeys(AXES, 1)


def check(reports, *splits):
    """Every mesh trains like one device, and holds its share of the state on each of eight."""
    one, *others = reports
    assert one["losses"][-1] != pytest.approx(one["losses"][0], abs=1e-3)
    for split, mesh in zip(splits, others, strict=True):
        assert mesh["losses"] == pytest.approx(one["losses"], abs=LOSS)
        assert mesh["params"] == pytest.approx(one["params"], rel=1e-4, abs=1e-3)
        assert mesh["share"] == pytest.approx(1 / split, rel=SHARE)


def test_meshes_train_like_one_device():
    """Data, fsdp, fsdp x tensor, tensor; the vocabulary is never whole where tensor splits it."""
    layouts = [{"data": 8}, {"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"tensor": 8}]
    reports = meshes.run("gpt2", *layouts)
    check(reports, 1, 8, 8, 8)
    assert [r["created_whole"] for r in reports] == [True, True, False, False, False]
    assert f"16,{meshes.LENGTH},1024" in reports[0]["whole"], "else the search finds nothing"
    assert reports[3]["whole"] == reports[4]["whole"] == []


@pytest.mark.slow
def test_experts_on_a_mesh():
    check(meshes.run("moe", {"expert": 8}), 8)


@pytest.mark.slow
def test_tokens_of_a_sequence_on_several_devices():
    """Logits never stand together: each device has those of its tokens."""
    reports = meshes.run("gpt2", {"context": 8}, {"fsdp": 2, "tensor": 2, "context": 2})
    check(reports, 8, 8)
    together = {f"16,{meshes.LENGTH},1024", f"{16 * meshes.LENGTH},1024"}
    assert together & set(reports[0]["whole"]) and not together & set(reports[1]["whole"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "alibi", "moe", "slots", "biased", "mla"])
def test_other_boxes_on_meshes(kind):
    """Fewer key/value heads than devices, biases of heads, dropout, capacities, MLA."""
    layouts = [{"fsdp": 2, "tensor": 4}, {"fsdp": 2, "tensor": 2, "expert": 2}]
    one, *others = meshes.run(kind, *layouts)
    for mesh in others:
        assert mesh["losses"] == pytest.approx(one["losses"], abs=LOSS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [{"accumulate": 2}, {"remat": "full"}, {"scan": True}, {"loss_chunk": 5}, {"dispatch": 20}],
)
def test_ways_to_compute_on_meshes(way):
    one, *others = meshes.run("llama", {"fsdp": 8}, {"fsdp": 4, "tensor": 2}, **way)
    for mesh in others:
        assert mesh["losses"] == pytest.approx(one["losses"], abs=LOSS)


@pytest.mark.slow
def test_logits_in_chunks_on_meshes():
    """Tied to a split vocabulary, and with tokens on several devices."""
    layouts = [{"tensor": 8}, {"fsdp": 2, "tensor": 2, "context": 2}, {"context": 8}]
    one, *others = meshes.run("gpt2", *layouts, loss_chunk=6)
    for mesh in others:
        assert mesh["losses"] == pytest.approx(one["losses"], abs=LOSS)
    assert others[0]["whole"] == [], "the vocabulary is never whole"
    rows = {int(shape.split(",")[0]) for shape in others[2]["whole"] if shape.endswith(",1024")}
    assert max(rows) <= max(128, 16 * 6), "nor are there logits of all tokens"


@pytest.mark.slow
def test_parameters_are_sent_in_the_dtype_of_the_computation(tmp_path):
    """All matrices but the router's, which computes in float32; in and out of a scan's body."""
    one, _ = meshes.run("moe", {"fsdp": 8}, dump=tmp_path, dtype="bfloat16", remat="full")
    assert one["losses"][-1] < one["losses"][0]
    (file,) = tmp_path.glob("*after_spmd-partitioning*")
    sent = re.findall(r"= (\w+)\[([0-9,]+)\]\S* all-gather\(", file.read_text())
    wide = {shape for dtype, shape in sent if dtype == "f32"}
    narrow = {shape for dtype, shape in sent if dtype == "bf16"}
    matrices = {"128,128", "1024,128", "8,128,64", "8,64,128"}
    assert matrices <= narrow and not matrices & wide and "128,8" in wide - narrow


OFTEN = ["gpt2", "llama3.2-1b", "mixtral-8x7b", "deepseek-v2-lite", "gemma3-270m", "pythia-70m"]
SOME = [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]


@pytest.mark.parametrize("name", SOME)
def test_the_table_has_every_parameter_of_every_preset(name):
    model = MODELS[name]()
    model = dataclasses.replace(model, vocab_size=model.vocab_size or 256)
    stored, guessed = param_specs(model, ONE)
    assert not guessed and any("tensor" in str(spec) for spec in stored.values())


def test_what_does_not_split_is_refused():
    model = ModelConfig(vocab_size=97, d_model=96, attention=GQA(6), ffn=GatedMLP(d_ff=100))
    with pytest.raises(ConfigError, match=r"n_heads=6 .* tensor=4; fix: .* \[1, 2, 3, 6\]"):
        param_specs(dataclasses.replace(model, ffn=GatedMLP(d_ff=128)), ONE | {"tensor": 4})
    message = r"ffn/down/kernel .* 100, .* tensor=3; fix: --mesh.tensor one of \[1, 2\]"
    with pytest.raises(ConfigError, match=message):
        param_specs(dataclasses.replace(model, vocab_multiple=3), ONE | {"tensor": 3})
    with pytest.raises(ConfigError, match=r"of 96, .* fsdp=5; fix: --mesh.fsdp one of \[1, 2, 3"):
        param_specs(model, ONE | {"fsdp": 5})


def test_a_sequence_must_split():
    model = ModelConfig(vocab_size=64, context_length=10)
    with pytest.raises(ConfigError, match=r"context_length=10 .* context=4; fix: .* \[1, 2\]"):
        param_specs(model, ONE | {"context": 4})


def test_fewer_key_value_heads_than_devices():
    model = ModelConfig(d_model=64, attention=GQA(8, n_kv_heads=2), ffn=GatedMLP(d_ff=128))
    param_specs(model, ONE | {"tensor": 4})
    with pytest.raises(ConfigError, match=r"n_heads=6 with n_kv_heads=3 .* \[1, 3, 6\]"):
        model = dataclasses.replace(model, d_model=96, attention=GQA(6, n_kv_heads=3))
        param_specs(model, ONE | {"tensor": 2})


class _Mine(nn.Module):
    @nn.compact
    def __call__(self, x_BTD, valid_BT, dropout_key=None):
        odd = self.param("odd", nn.initializers.ones, (3, x_BTD.shape[-1]))
        return x_BTD * odd.sum(), {}


@dataclasses.dataclass(frozen=True)
class Mine(FFNBox):
    """Declares nothing."""

    def build(self, dims, name=None):
        return _Mine(name=name)


@dataclasses.dataclass(frozen=True)
class Declared(Mine):
    """Declares how it is split."""

    sharding: ClassVar = {"/odd": (None, "tensor")}


def test_a_box_of_ones_own():
    model = ModelConfig(vocab_size=64, d_model=64, n_layers=1, attention=GQA(4), ffn=Mine())
    stored, guessed = param_specs(model, ONE | {"fsdp": 8})
    assert guessed == ["block_0/ffn/odd"]
    assert stored[guessed[0]] == jax.sharding.PartitionSpec(None, ("fsdp", "expert", "context"))
    stored, guessed = param_specs(dataclasses.replace(model, ffn=Declared()), ONE | {"fsdp": 8})
    assert not guessed and stored["block_0/ffn/odd"] == jax.sharding.PartitionSpec(None, "tensor")


def test_rope_has_no_parameters_and_vectors_are_whole():
    model = ModelConfig(vocab_size=64, d_model=64, n_layers=1, position=RoPE(), attention=GQA(4))
    stored, _ = param_specs(model, ONE)
    whole = {path for path, spec in stored.items() if spec == jax.sharding.PartitionSpec()}
    assert whole == {path for path in stored if path.endswith(("scale", "bias"))}


def test_a_mesh_must_have_as_many_devices():
    assert dict(make_mesh(MeshConfig()).shape) == ONE
    with pytest.raises(ConfigError, match=r"data=64 .* 64 devices, .* are 1; fix: --mesh.data=1"):
        make_mesh(MeshConfig(data=64))
    with pytest.raises(ConfigError, match=r"fsdp=8 .* for 8 devices, and there are 1; fix: the"):
        make_mesh(MeshConfig(fsdp=8))
    with pytest.raises(ConfigError, match=r"mesh.fsdp=0 must be at least 1"):
        MeshConfig(fsdp=0)


def test_rows_must_split_evenly():
    eight = ONE | {"data": 2, "expert": 4}
    check_rows(16, 2, eight)
    with pytest.raises(ConfigError, match=r"batch_size=6 .* 8 devices; fix: --train.batch_size=8"):
        check_rows(6, 1, eight)
    with pytest.raises(ConfigError, match=r"in 2 micro-batches; fix: --train.batch_size=16 or 32"):
        check_rows(24, 2, eight)
