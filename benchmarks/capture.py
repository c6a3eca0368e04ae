# SPDX-License-Identifier: Apache-2.0
"""What it costs to capture the residual stream of a 12-layer model: before, between, behind all.

    python benchmarks/capture.py --rounds=20 --out=capture.json

A forward pass and a training step's loss and gradients, by turns without and with
`capture=["block_*/in", "block_*/mid", "block_*/out"]`: 36 arrays, which are returned. Without a
capture the program is that of a model without sites, which is a test's affair, not a clock's.
"""

import functools
import time

import jax
import jax.numpy as jnp
from harness import Competitor, Report, compete, in_turns, limits_of, parser, ready_device

from jaxgpt import GQA, ModelConfig, forward, init_params, next_token_loss
from jaxgpt.costs import prefill_costs, total, train_costs

STREAM = ("block_*/in", "block_*/mid", "block_*/out")
SHAPES = {"tiny": (16, 2, 2, 8), "small": (256, 12, 4, 256)}  # width, layers, rows, tokens


def model(width, n_layers, tokens):
    """GPT-2's, smaller."""
    sizes = dict(vocab_size=4096, context_length=tokens, d_model=width, n_layers=n_layers)
    return ModelConfig(**sizes, attention=GQA(n_heads=max(2, width // 64)))


def passes(cfg):
    """Functions of parameters, tokens and what to capture, with what they cost."""

    def whole(params, tokens_BT, capture):
        out = forward(cfg, params, tokens_BT, capture=capture)
        return out.logits_BTV, out.captured

    def loss(params, tokens_BT, capture):
        logits_BTV, captured = whole(params, tokens_BT, capture)
        return next_token_loss(logits_BTV[:, :-1], tokens_BT[:, 1:]), captured

    yield "forward pass", whole, prefill_costs
    yield "loss and gradients", jax.grad(loss, has_aux=True), train_costs


def turns(run, params, tokens_BT, capture, turn_s):
    """A turn of many calls, each waited for; what it captured is let go with the next one."""
    call = jax.jit(functools.partial(run, capture=capture))
    jax.block_until_ready(call(params, tokens_BT))

    def seconds(n):
        start = time.perf_counter()
        for _ in range(n):
            jax.block_until_ready(call(params, tokens_BT))
        return (time.perf_counter() - start) / n

    return in_turns(seconds, turn_s)


def main(argv=None):
    made = parser(__doc__)
    made.add_argument("--shape", choices=SHAPES, default="small")
    options = made.parse_args(argv)
    ready_device()
    width, n_layers, rows, tokens = SHAPES[options.shape]
    cfg = model(width, n_layers, tokens)
    params = jax.jit(functools.partial(init_params, cfg))(jax.random.key(0))
    tokens_BT = jax.random.randint(jax.random.key(1), (rows, tokens), 0, 4096, jnp.int32)
    report = Report("Capture: the residual stream of all layers", options.out)
    for name, run, costs in passes(cfg):
        cost, ways = total(costs(cfg, rows, tokens)), {"without": (), "with capture": STREAM}
        found = [
            Competitor(
                way,
                turns(run, params, tokens_BT, capture, options.turn_seconds),
                cost,
                rows * tokens,
                ours=bool(capture),
            )
            for way, capture in ways.items()
        ]
        title = f"{name}: {n_layers} layers of width {width}, {rows} x {tokens} tokens, float32"
        report.add(compete(title, found, limits_of(options, "float32"), options.rounds))


if __name__ == "__main__":
    main()
