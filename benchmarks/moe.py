# SPDX-License-Identifier: Apache-2.0
"""What a mixture of experts costs as experts are added, each token choosing equally many.

    python benchmarks/moe.py

One MoE layer, forward and backward, milliseconds a call, best of several calls, in three ways: the
grouped product in blocks (jaxgpt's on CPU), `jax.lax.ragged_dot` (jaxgpt's on GPU and TPU), and
every expert for every token.
"""

import argparse
import functools
import platform
import time
from unittest import mock

import jax
import jax.numpy as jnp

from jaxgpt import GQA, GatedMLP, ModelConfig
from jaxgpt.boxes.moe import MoE
from jaxgpt.kernels import grouped


def dense(box, params, x_BTD):
    """The layer with every expert computed for every token."""
    scores_BTE = box.scores(x_BTD @ params["router"]["kernel"])
    choice_BTk = box.choose(scores_BTE)
    hot_BTkE = jax.nn.one_hot(choice_BTk, box.n_experts)
    weight_BTE = (hot_BTkE * box.weigh(scores_BTE, choice_BTk)[..., None]).sum(2)
    gate, up, down = (params["experts"][name]["kernel"] for name in ("gate", "up", "down"))
    h_EBTF = box.expert.hidden(
        jnp.einsum("btd,edf->ebtf", x_BTD, gate), jnp.einsum("btd,edf->ebtf", x_BTD, up)
    )
    return jnp.einsum("bte,ebtf,efd->btd", weight_BTE, h_EBTF, down)


def ways(box, dims, params, x_BTD):
    """The compiled forward and backward pass by name."""
    module, valid_BT = box.build(dims), jnp.ones(x_BTD.shape[:2], bool)

    def sparse(params, x_BTD):
        return module.apply({"params": params}, x_BTD, valid_BT)[0]

    def compiled(layer):
        def loss(params, x_BTD):
            return jnp.square(layer(params, x_BTD)).sum()

        return jax.jit(jax.grad(loss, (0, 1))).lower(params, x_BTD).compile()

    found = {"every expert": compiled(functools.partial(dense, box))}
    for method in ("blocks", "ragged"):
        with mock.patch.object(grouped, "default_method", lambda method=method: method):
            found[method] = compiled(sparse)
    return found


def best_ms(call, args, repeats):
    """Milliseconds of the fastest of some calls."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(call(*args))
        times.append(time.perf_counter() - start)
    return 1000 * min(times[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of each row")
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--d-ff", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    print(f"{args}; {jax.devices()[0].platform}, {platform.processor() or platform.machine()}")
    print("experts | every expert | ragged_dot | blocks | rows multiplied, of blocks, at most")
    x_BTD = jax.random.normal(jax.random.key(1), (args.rows, args.tokens, args.d_model))
    dims = ModelConfig(d_model=args.d_model, attention=GQA(1)).dims()
    for n_experts in (1, 2, 4, 8, 16, 32, 64):
        if n_experts < args.top_k:
            continue
        box = MoE(n_experts, args.top_k, GatedMLP(args.d_ff))
        init = jax.jit(box.build(dims).init)
        params = init(jax.random.key(0), x_BTD, jnp.ones(x_BTD.shape[:2], bool))["params"]
        calls = ways(box, dims, params, x_BTD)
        ms = {name: best_ms(call, (params, x_BTD), args.repeats) for name, call in calls.items()}
        rows = grouped.block_rows(args.rows * args.tokens * args.top_k, n_experts)
        columns = (ms["every expert"], ms["ragged"], ms["blocks"])
        print(n_experts, *(f"{value:.1f}" for value in columns), rows, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
