# SPDX-License-Identifier: Apache-2.0
import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxgpt.placing import Layout, active, place, placing, use
from jaxgpt.train.config import MeshConfig
from jaxgpt.train.sharding import make_layout, make_mesh

X = jnp.ones((2, 3, 4))


def layout(**stored):
    """A mesh of one device, which counts as none unless `many` says otherwise."""
    return make_layout(make_mesh(MeshConfig()), stored)


def traced(function, mesh):
    def f(x):
        with placing(mesh):
            return function(x)

    return str(jax.make_jaxpr(f)(X))


def test_one_device_traces_nothing_more():
    plain = str(jax.make_jaxpr(lambda x: x + 1)(X))
    for mesh in (None, layout(w=PartitionSpec())):
        assert traced(lambda x: place(x, "BTD") + 1, mesh) == plain
        assert traced(lambda x: use({"w": x})["w"] + 1, mesh) == plain


def test_the_layout_ends_with_its_context(monkeypatch):
    monkeypatch.setattr(Layout, "many", property(lambda self: True))
    mesh = layout()
    with placing(mesh):
        assert active() is mesh
        with placing(None):
            assert active() is None
        assert active() is mesh
    assert active() is None


def test_letters_become_axes(monkeypatch):
    """Seen in the text of a traced function: a constraint that is lost would pass quietly."""
    monkeypatch.setattr(Layout, "many", property(lambda self: True))
    text = traced(lambda x: place(x, "BTV"), layout())
    assert "sharding_constraint" in text
    assert "P(('data', 'fsdp', 'expert'), 'context', 'tensor')" in text


def test_parameters_are_gathered_and_their_gradients_are_not(monkeypatch):
    monkeypatch.setattr(Layout, "many", property(lambda self: True))
    mesh = layout(**{"block_1/w": PartitionSpec(None, ("fsdp", "expert"), "tensor")})
    assert mesh.used["block_1/w"] == PartitionSpec(None, None, "tensor")

    def loss(x):
        return use({"w": x}, "block_1/")["w"].sum()

    def loss_narrow(x):
        return use({"w": x}, "block_1/", jnp.bfloat16)["w"].sum()

    text = traced(jax.grad(loss), mesh)
    assert traced(jax.grad(loss_narrow), mesh) == text, "nobody says that its box casts it"
    assert "P(None, None, 'tensor')" in text, "gathered over fsdp, not over tensor"
    assert "P(None, ('fsdp', 'expert'), 'tensor')" in text, "a gradient in pieces"
    narrow = traced(
        jax.grad(loss_narrow), dataclasses.replace(mesh, narrow=frozenset(["block_1/w"]))
    )
    lines = [line for line in narrow.splitlines() if "sharding_constraint" in line]
    assert [line.split(":")[1].split("[")[0] for line in lines] == ["bf16", "bf16", "f32"]
    assert "P(None, None, 'tensor')" in narrow.split("sharding_constraint")[2], "gathered so"
    assert "sharding_constraint" not in traced(lambda x: use({"w": x}, "block_2/")["w"], mesh)
