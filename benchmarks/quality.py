# SPDX-License-Identifier: Apache-2.0
"""What smaller weights cost in quality: perplexity of a real model for each form of `--weights`.

    python benchmarks/quality.py --texts FOLDER_OF_TEXTS FOLDER

FOLDER holds a pretrained model; the texts are `wikitext2-test.txt` and `tinyshakespeare.txt`, of
which the first 20,000 characters count, in windows of 512 tokens without overlap. Exits with 1
where bfloat16 or int8 changes a perplexity by 1% or more.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from pretrained import CHARS, perplexity

from jaxgpt import forward, token_nats
from jaxgpt.data.base import begin_ids
from jaxgpt.interop import load
from jaxgpt.sample.weights import for_decoding

TEXTS = ("wikitext2-test", "tinyshakespeare")
WINDOW = 512  # tokens
BAR = 0.01  # change of a perplexity, relative
FORMS = {
    "float32": {"dtype": jnp.float32},
    "bfloat16": {"dtype": jnp.bfloat16},
    "bfloat16, computed in float32": {"dtype": jnp.bfloat16},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--texts", type=Path, required=True)
    options = parser.parse_args()
    cfg, params, tokenizer = load(options.folder)
    begin, plain, missed = begin_ids(tokenizer), {}, False
    ids = {
        name: tokenizer.encode_controls(
            (options.texts / f"{name}.txt").read_text(encoding="utf-8")[:CHARS]
        ).tolist()
        for name in TEXTS
    }
    print(f"| weights | bytes | {' | '.join(f'{name} | change' for name in TEXTS)} |")
    print("| --- | --- " + "| --- | --- " * len(TEXTS) + "|")
    for form, how in FORMS.items():
        stored = for_decoding(cfg, params, **how)
        compute = jnp.float32 if form.endswith("in float32") else None

        @jax.jit
        def nats(params, ids_BT, compute=compute):
            out = forward(cfg, params, ids_BT[:, :-1], dtype=compute)
            return token_nats(out.logits_BTV, ids_BT[:, 1:])

        cells = []
        for name in TEXTS:
            found = perplexity(nats, stored, ids[name], begin, WINDOW)
            change = found / plain.setdefault(name, found) - 1
            missed |= form != "int4" and abs(change) >= BAR
            cells.append(f"{found:.3f} | {change:+.2%}")
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(stored)) / 1e6
        print(f"| {form} | {size:.1f} MB | {' | '.join(cells)} |", flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
