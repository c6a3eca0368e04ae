# SPDX-License-Identifier: Apache-2.0
"""What a step of decoding takes as the cache of a token shrinks: multi-head to multi-query.

    python benchmarks/caches.py

One model with four kinds of attention, 16 query heads each; caches that are full but for the last
16 tokens, which are written in one dispatch, by turns. Milliseconds a step, best of all rounds,
beside the bytes and FLOPs of `jaxgpt.costs`. Float32.
"""

import argparse
import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
from harness import ready_device

from jaxgpt import GQA, MLA, ModelConfig, RoPE, forward, init_params
from jaxgpt.costs import decode_costs, kv_bytes_per_token, total
from jaxgpt.study.bench import alternate

NEW = 16  # tokens of a dispatch
BOXES = {
    "multi-head": GQA(16),
    "grouped, 4 of 16": GQA(16, 4),
    "latent": MLA(16, kv_rank=64, nope_dim=32, rope_dim=32, v_dim=32),
    "multi-query": GQA(16, 1),
}


class Decoder:
    """Writes the last tokens of rows whose other ones are there."""

    def __init__(self, cfg, rows):
        self.cfg, self.params = cfg, init_params(cfg, jax.random.key(0))
        slots = jnp.broadcast_to(jnp.arange(cfg.context_length), (rows, cfg.context_length))
        caches = (cache.replace(pos_BS=slots) for cache in cfg.init_caches(rows, slots.shape[1]))
        self.caches = jax.tree.map(jnp.copy, tuple(caches))  # keys and values may share zeros
        self._write = jax.jit(functools.partial(self._all, rows), donate_argnums=1)
        self.seconds_a_step()

    def seconds_a_step(self):
        began = time.perf_counter()
        self.caches, ids_B1 = self._write(self.params, self.caches)
        ids_B1.block_until_ready()
        return (time.perf_counter() - began) / NEW

    def _all(self, rows, params, caches):
        first = self.cfg.context_length - NEW

        def step(state, pos):
            caches, id_B1 = state
            pos_B1 = jnp.broadcast_to(pos, (rows, 1))
            call = dict(pos_BT=pos_B1, caches=caches, last_only=True)
            out = forward(self.cfg, params, id_B1, **call)
            return (out.caches, out.logits_BTV.argmax(-1)), None

        caches = tuple(cache.rewound(first) for cache in caches)
        state = caches, jnp.zeros((rows, 1), jnp.int32)
        return jax.lax.scan(step, state, first + jnp.arange(NEW))[0]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024, help="of each row")
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args(argv)
    ready_device()
    base = ModelConfig(
        4096, args.tokens, args.d_model, args.layers, position=RoPE(), attention=GQA(16)
    )
    models = {name: dataclasses.replace(base, attention=box) for name, box in BOXES.items()}
    turns = {name: Decoder(cfg, args.rows).seconds_a_step for name, cfg in models.items()}
    timings = alternate(turns, rounds=args.rounds)
    print("attention | bytes a token | MB of caches | MB of weights | MFLOP | ms a step")
    for name, cfg in models.items():
        cost = total(decode_costs(cfg, args.rows, args.tokens - NEW // 2))
        moved = (cost.cache_bytes / 1e6, cost.weight_bytes / 1e6, cost.flops / 1e6)
        columns = [f"{kv_bytes_per_token(cfg, 'float32'):,.0f}", *(f"{x:.1f}" for x in moved)]
        print(name, *columns, f"{1e3 * timings[name].best:.2f}", sep=" | ")


if __name__ == "__main__":
    main()
