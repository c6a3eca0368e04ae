# SPDX-License-Identifier: Apache-2.0
"""How much faster a model decodes with a draft, and how many drafted tokens it accepts.

    python benchmarks/speculative.py --target MODEL --draft MODEL --draft-tokens 2 4 8

MODEL is a run or a public model, as of `sample.py --draft`. Without both, two runs are trained
first on the built-in corpus: `tiny` with three layers of 384, and with one layer of 96.

Greedy and sampled text is drawn by turns, without a draft and with each number of drafted tokens;
the prompt is not counted. Greedy texts are compared: they must be the same.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxgpt.cli.sources import draft_source, named_source
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.generate import stream
from jaxgpt.sample.speculative import Draft
from jaxgpt.study import machine
from jaxgpt.study.bench import alternate

ROOT = Path(__file__).resolve().parents[1]
SAMPLINGS = {"greedy": Sampling(temperature=0.0), "sampled": Sampling(temperature=0.8, top_p=0.95)}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--target", help="the large model")
    parser.add_argument("--draft", help="the small one")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batch", type=int, default=1, help="texts side by side")
    parser.add_argument("--prompt", default="The ")
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5, help="of turns")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--weights", help="how both are stored: bfloat16, int8, int4")
    parser.add_argument("--train-steps", type=int, default=600, help="of runs of one's own")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    return parser.parse_args()


def trained(folder: Path, steps: int) -> tuple[str, str]:
    """Two runs of one tokenizer, a large one and a small one."""
    sizes = {"large": (3, 384, 6), "small": (1, 96, 3)}
    for name, (layers, width, heads) in sizes.items():
        words = [f"--run={folder}/{name}", f"--train.steps={steps}", f"--model.d_model={width}"]
        words += [f"--model.n_layers={layers}", f"--model.attention.n_heads={heads}"]
        words += ["--model.context_length=256", "--show.pictures=false", "--show.sample_tokens=0"]
        command = [sys.executable, str(ROOT / "train.py"), "--preset=tiny", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return f"{folder}/large", f"{folder}/small"


class Text:
    """A text that is drawn again and again; a call returns seconds for each of its tokens."""

    def __init__(self, draw):
        self._draw, self.ids, self.accepted = draw, [], []

    def __call__(self) -> float:
        chunks, tokens, drafted, rounds = self._draw(), 0, 0, 0
        ids = next(chunks).ids_BC[0].tolist()  # behind the prompt
        began = time.perf_counter()
        for chunk in chunks:
            tokens += int(chunk.lengths_B.sum())
            ids += chunk.ids_BC[0, : chunk.lengths_B[0]].tolist()
            if chunk.rounds_B is not None:
                drafted += int(chunk.lengths_B.sum())
                rounds += int(chunk.rounds_B.sum())
        self.ids = ids
        self.accepted.append(drafted / rounds - 1 if rounds else None)
        return (time.perf_counter() - began) / tokens


def measure(given: argparse.Namespace, target: str, small: str) -> list[dict]:
    large = named_source(target, given.dtype)
    drafting = draft_source(small, given.dtype, 1, large)
    params, small_params = (each.stored(given.dtype, given.weights) for each in (large, drafting))
    prompts = [large.tokenizer.encode(given.prompt).tolist()] * given.batch
    rows = []
    for name, sampling in SAMPLINGS.items():
        draw = functools.partial(
            stream,
            large.model,
            params,
            prompts,
            max_new_tokens=given.new_tokens,
            sampling=sampling,
            dtype=given.dtype,
            until=lambda row, ids: False,  # as with stop strings: nothing is drawn ahead
        )
        texts = {"none": Text(draw)}
        for tokens in given.draft_tokens:
            draft = Draft(drafting.model, small_params, tokens)
            texts[str(tokens)] = Text(functools.partial(draw, draft=draft))
        for text in texts.values():
            text()  # compiles
        timings = alternate(texts, rounds=given.rounds)
        for drafted, text in texts.items():
            timing = timings[drafted]
            rows.append(
                {
                    "sampling": name,
                    "draft_tokens": drafted,
                    "tokens_per_s_best": 1 / timing.best,
                    "tokens_per_s_median": 1 / timing.median,
                    "accepted": text.accepted[-1],
                    "times_as_fast_best": timings["none"].best / timing.best,
                    "times_as_fast_median": timings["none"].median / timing.median,
                    "same_text": text.ids == texts["none"].ids,
                }
            )
    return rows


def main() -> None:
    given = options()
    with tempfile.TemporaryDirectory() as folder:
        pair = given.target, given.draft
        if None in pair:
            pair = trained(Path(folder), given.train_steps)
        rows = measure(given, *pair)
    print(f"\n{pair[0]} with {pair[1]}, batch {given.batch}, {given.new_tokens} new tokens\n")
    print("| sampling | drafted | tokens/s, best | median | accepted | times as fast | same text |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        accepted = "" if row["accepted"] is None else f"{row['accepted']:.2f}"
        speed = f"{row['tokens_per_s_best']:,.0f} | {row['tokens_per_s_median']:,.0f}"
        ratio = f"{row['times_as_fast_best']:.2f} ({row['times_as_fast_median']:.2f})"
        same = "yes" if row["same_text"] else "no"
        cells = row["sampling"], row["draft_tokens"], speed, accepted, ratio, same
        print(f"| {' | '.join(cells)} |")
    if given.out:
        record = {"machine": machine.describe(), "options": vars(given) | {"out": None}}
        given.out.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
