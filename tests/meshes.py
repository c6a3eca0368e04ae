# SPDX-License-Identifier: Apache-2.0
"""Twenty training steps on one device and on meshes of eight, in a process of its own.

Called with JSON: {"kind": a name of KINDS, "meshes": [{"fsdp": 8}, ...], "train": {...}}. Prints
for each mesh, after the single device: losses, parameters, the share of the state's bytes that one
device holds, the shapes of arrays in the compiled step that hold the whole vocabulary, and whether
one device ever holds the whole embedding while the state is created.
"""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

VOCAB, LENGTH = 997, 16  # padded to 1024: nothing else of the model has that size


def run(kind, *meshes, dump=None, **train):
    """The reports of `report`, from a process with eight devices.

    Into a folder `dump` XLA writes the steps as the partitioner makes them. The compiled ones do
    not show which dtype is sent: on a CPU all that is bfloat16 is sent as float32.
    """
    flags = "--xla_force_host_platform_device_count=8"
    if dump is not None:
        flags += f" --xla_dump_to={dump} --xla_dump_hlo_pass_re=spmd-partitioning"
        flags += " --xla_dump_hlo_module_re=jit_traced"
    env = os.environ | {"XLA_FLAGS": flags}
    if dump is not None:  # what is read from the cache is not compiled, and so not written
        env["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    words = json.dumps({"kind": kind, "meshes": meshes, "train": train})
    out = subprocess.run(
        [sys.executable, __file__, words], env=env, capture_output=True, text=True, timeout=600
    )
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])


def kinds():
    from jaxgpt.boxes.alibi import ALiBi
    from jaxgpt.boxes.attention import GQA
    from jaxgpt.boxes.ffn import MLP, GatedMLP
    from jaxgpt.boxes.head import Untied
    from jaxgpt.boxes.mla import MLA
    from jaxgpt.boxes.moe import MoE
    from jaxgpt.boxes.norm import RMSNorm
    from jaxgpt.boxes.rope import RoPE
    from jaxgpt.model import ModelConfig

    gpt2 = ModelConfig(
        vocab_size=VOCAB, context_length=LENGTH, d_model=128, n_layers=2, attention=GQA(8)
    )
    expert = GatedMLP(d_ff=64)
    moe = MoE(
        n_experts=8, top_k=2, expert=expert, shared=expert, balance_coef=0.01, balance_rate=0.01
    )
    modern = dataclasses.replace(
        gpt2, position=RoPE(), norm=RMSNorm(), final_norm=RMSNorm(), ffn=GatedMLP(d_ff=256)
    )
    few = GQA(8, n_kv_heads=2, use_bias=False, sinks=True, qk_norm=RMSNorm())
    biased = MoE(n_experts=8, top_k=2, expert=MLP(d_ff=64))
    return {
        "gpt2": gpt2,
        "llama": dataclasses.replace(modern, attention=few, head=Untied()),
        "alibi": dataclasses.replace(gpt2, position=ALiBi(), dropout=0.1),
        "moe": dataclasses.replace(modern, n_layers=1, ffn=moe),
        "slots": dataclasses.replace(modern, ffn=dataclasses.replace(moe, capacity_factor=1.0)),
        "biased": dataclasses.replace(gpt2, ffn=biased),
        "mla": dataclasses.replace(
            modern, attention=MLA(n_heads=8, kv_rank=32, nope_dim=16, rope_dim=8, v_dim=16)
        ),
    }


def report(cfg, mesh_sizes, train):
    import jax
    import numpy as np

    from jaxgpt.data.batches import Batches
    from jaxgpt.train import sharding
    from jaxgpt.train.config import MeshConfig, OptimConfig, TrainConfig
    from jaxgpt.train.manysteps import Steps
    from jaxgpt.train.optim import optimizer
    from jaxgpt.train.processes import put_rows
    from jaxgpt.train.step import init_state, train_step

    # Half the usual rate: what rounding does to the parameters grows with it from step to step.
    tx = optimizer(OptimConfig(lr=5e-4, warmup_steps=0), 100)
    train = TrainConfig(**{"batch_size": 16, **train})
    init = functools.partial(init_state, cfg, tx, 0)
    step = functools.partial(train_step, cfg=cfg, tx=tx, train=train)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 9999).astype(np.uint16)
    batches, put = Batches(tokens, LENGTH, 16, 0), lambda batch: batch
    if mesh_sizes is None:
        init, step = jax.jit(init), jax.jit(step)
    else:
        mesh = sharding.make_mesh(MeshConfig(**mesh_sizes))
        specs = sharding.param_specs(cfg, mesh.shape)[0]
        layout = sharding.make_layout(mesh, specs, sharding.narrow_paths(cfg))
        abstract = sharding.state_shardings(layout, jax.eval_shape(init))
        pieces = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        rows = sharding.batch_sharding(mesh)
        put = functools.partial(put_rows, rows=rows, n=16)
        init = jax.jit(init, out_shardings=pieces)
        step = sharding.placed(step, layout)
        if train.dispatch > 1:
            return {
                "losses": dispatched(Steps({16: step}, pieces, rows, 20), init, pieces, batches)
            }
        step = jax.jit(step, in_shardings=(pieces, rows), out_shardings=(pieces, None))
    init = init.lower().compile()
    state = init()
    compiled = step.lower(state, put(batches.batch(0))).compile()
    losses = []
    for s in range(20):
        state, metrics = compiled(state, put(batches.batch(s)))
        losses.append(float(metrics["loss_nats"]))
    leaves = [x for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim]
    first = jax.devices()[0]
    here = [s.data.nbytes for x in leaves for s in x.addressable_shards if s.device == first]
    shapes = set(re.findall(r"\w+\[([0-9,]+)\]", compiled.as_text()))
    return {
        "losses": losses,
        "params": [float(abs(x).sum()) for x in jax.tree.leaves(state.params)],
        "share": sum(here) / sum(x.nbytes for x in leaves),
        "created_whole": "[1024,128]" in init.as_text(),
        "whole": sorted(s for s in shapes if "1024" in s.split(",") and s.count(",") > 0),
    }


def dispatched(steps, init, pieces, batches):
    """The losses of twenty steps in two dispatches."""
    import jax

    state, losses = jax.jit(init, out_shardings=pieces)(), []
    for begin, end in ((0, 7), (7, 20)):
        state, metrics = steps(state, [batches.batch(s) for s in range(begin, end)], 16)
        losses += [float(x) for x in metrics["loss_nats"][: end - begin]]
    return losses


def main():
    import jax

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    jax.config.update("jax_default_matmul_precision", "highest")
    asked = json.loads(sys.argv[1])
    cfg = kinds()[asked["kind"]]
    reports = [report(cfg, mesh, asked["train"]) for mesh in (None, *asked["meshes"])]
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
