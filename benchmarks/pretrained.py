# SPDX-License-Identifier: Apache-2.0
"""Real models against transformers: logits, greedy texts, perplexities.

    python benchmarks/pretrained.py --texts FOLDER_OF_TEXTS FOLDER...

Each FOLDER holds a model of `REFERENCES`, which is known by its number of parameters, in float32
files; the texts are `wikitext2-test.txt` and `tinyshakespeare.txt`. The references are those of
transformers 5.24.0 with torch 2.13.0 in float32. Exits with 1 where a bar is missed: logits to 1e-3
relative, greedy texts exact, perplexities to 0.1%.
"""

import argparse
import dataclasses
import math
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt import Sampling, forward, generate, token_nats
from jaxgpt.data.base import begin_ids, end_ids
from jaxgpt.flops import count_params
from jaxgpt.interop import load

CHARS = 20_000  # of a text
WINDOWS = (512, 2048)
LOGITS, PERPLEXITY = 1e-3, 1e-3  # relative bars


@dataclasses.dataclass(frozen=True)
class Reference:
    """What transformers gives.

    Attributes:
      name: Of the model.
      statistics: Of the logits of the ids (i * 7919 + 13) mod V, i < 64: mean, standard deviation,
        largest magnitude, sum of log-sum-exp.
      last_row: The first logits behind the last of these ids.
      texts: Greedy continuations of prompts.
      perplexities: By text: number of tokens, then at each of `WINDOWS`.
    """

    name: str
    statistics: tuple[float, ...]
    last_row: tuple[float, ...]
    texts: dict[str, str]
    perplexities: dict[str, tuple[int, float, float]]


REFERENCES = {
    134_515_008: Reference(
        name="SmolLM2-135M-Instruct",
        statistics=(13.860466, 4.760945, 32.980953, 1810.31544),
        last_row=(16.05654, 10.5421, 13.83128, 7.81163, 8.21342, 8.34152, 8.39733, 8.35033),
        texts={
            "The capital of France is": " Paris.\n\nThe answer is: 2018-01-22 12:12:53.<|im_end|>",
            "Once upon a time, there was a little girl who": " loved to play with her toys. She "
            "had a big imagination and loved to create her own stories. One day, she decided to "
            "create a story about a brave",
        },
        perplexities={
            "wikitext2-test": (4871, 30.061, 19.787),
            "tinyshakespeare": (6087, 41.808, 34.374),
        },
    ),
    268_098_176: Reference(
        name="Gemma 3 270M",
        statistics=(-30.512530, 23.735015, 138.067993, -790.92600),
        last_row=(
            *(-13.37856, 1.63163, -5.64334, -13.3919),
            *(-11.09305, -14.89404, -17.0435, -15.44736),
        ),
        texts={
            "The capital of France is": " the capital of the country of France. It is the largest "
            "city in France and the second largest city in Europe. It is located in the middle of "
            "the country",
        },
        perplexities={
            "wikitext2-test": (4647, 62.203, 40.377),
            "tinyshakespeare": (5700, 51.774, 41.839),
        },
    ),
}


class Checks:
    """A table of checks; `missed` counts those beyond their bar."""

    def __init__(self):
        self.missed = 0

    def row(self, what, want, got, passed):
        """One check, in words."""
        self.missed += not passed
        print(f"| {what} | {want} | {got} | {'yes' if passed else 'NO'} |", flush=True)

    def number(self, what, want, got, bar):
        """One check of a number against a relative bar."""
        off = abs(got / want - 1)
        self.row(what, f"{want:.6g}", f"{got:.6g} ({off:.1e} off)", off <= bar)


def check_logits(cfg, params, reference, checks):
    ids = (np.arange(64) * 7919 + 13) % cfg.vocab_size
    out = jax.jit(forward, static_argnums=0)(cfg, params, jnp.asarray(ids)[None])
    logits_TV = np.asarray(out.logits_BTV, np.float64)[0, :, : cfg.vocab_size]
    largest_T1 = logits_TV.max(1, keepdims=True)
    lse_T = np.log(np.exp(logits_TV - largest_T1).sum(1)) + largest_T1[:, 0]
    found = (logits_TV.mean(), logits_TV.std(), np.abs(logits_TV).max(), lse_T.sum())
    names = ("mean logit", "standard deviation", "largest magnitude", "sum of log-sum-exp")
    for name, want, got in zip(names, reference.statistics, found, strict=True):
        checks.number(name, want, got, LOGITS)
    row = np.array(reference.last_row)
    off = np.abs(logits_TV[-1, : len(row)] / row - 1).max()
    checks.row("last row, first 8", f"{row[0]} ...", f"{off:.1e} off", off <= LOGITS)


def check_texts(cfg, params, tokenizer, reference, checks):
    greedy = Sampling(temperature=0.0)
    for prompt, want in reference.texts.items():
        ids = [*begin_ids(tokenizer), *map(int, tokenizer.encode(prompt))]
        length = len(tokenizer.encode_controls(want))
        found = generate(
            *(cfg, params, [ids]),
            max_new_tokens=length,
            sampling=greedy,
            stop_ids=end_ids(tokenizer),
        )
        got = tokenizer.decode(found.ids[0])
        checks.row(f"greedy, {length} tokens", repr(want[:20]), repr(got[:20]), got == want)


def perplexity(nats, params, ids, begin, window):
    """In windows without overlap; a window's first token is unscored, or stands behind BOS."""
    total, counted = 0.0, 0
    for start in range(0, len(ids), window):
        tokens = np.array([*begin, *ids[start : start + window]])
        scored = len(tokens) - 1
        if scored < 1:
            continue
        padded = np.zeros(window + len(begin), np.int32)
        padded[: len(tokens)] = tokens
        total += float(np.asarray(nats(params, padded[None]), np.float64)[0, :scored].sum())
        counted += scored
    return math.exp(total / counted)


def check_perplexities(cfg, params, tokenizer, texts, reference, checks):
    @jax.jit
    def nats(params, ids_BT):
        out = forward(cfg, params, ids_BT[:, :-1])
        return token_nats(out.logits_BTV, ids_BT[:, 1:])

    for name, (count, *wanted) in reference.perplexities.items():
        text = (texts / f"{name}.txt").read_text(encoding="utf-8")[:CHARS]
        ids = tokenizer.encode_controls(text).tolist()  # WikiText's <unk> is one of Gemma's
        checks.row(f"tokens of {name}", count, len(ids), count == len(ids))
        for window, want in zip(WINDOWS, wanted, strict=True):
            got = perplexity(nats, params, ids, begin_ids(tokenizer), window)
            checks.number(f"perplexity of {name}, window {window}", want, got, PERPLEXITY)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--texts", type=Path, required=True)
    options = parser.parse_args()
    checks = Checks()
    for folder in options.folders:
        began = time.monotonic()
        cfg, params, tokenizer = load(folder)
        n_params = sum(count_params(cfg).values())
        if n_params not in REFERENCES:
            sys.exit(f"{folder}: no reference for a model of {n_params:,} parameters")
        reference = REFERENCES[n_params]
        print(f"\n{reference.name}, read in {time.monotonic() - began:.1f} s\n")
        print("| check | transformers | jaxgpt | within the bar |\n| --- | --- | --- | --- |")
        check_logits(cfg, params, reference, checks)
        check_texts(cfg, params, tokenizer, reference, checks)
        check_perplexities(cfg, params, tokenizer, options.texts, reference, checks)
        print(f"\n{time.monotonic() - began:.0f} s in all")
    sys.exit(checks.missed > 0)


if __name__ == "__main__":
    main()
