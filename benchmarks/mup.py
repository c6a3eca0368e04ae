# SPDX-License-Identifier: Apache-2.0
"""muP beside the standard parametrisation: a coordinate check, and whether a rate carries over.

    python benchmarks/mup.py --text wikitext2-valid.txt --out mup.json \
        --coordinates coordinates.png --transfer transfer.png

The model and the recipe are those of `wikitext2-char`, made shallower: PyTorch's initialisation, 4
heads that grow with the model, AdamW at a constant rate without warmup or clipping. Both
parametrisations are one and the same at the base, the smallest width.

The coordinate check is the mean of |x_t - x_0| over the entries of activations at a held-out batch,
after t steps, against width: flat lines mean that a step changes activations alike at every width.
Transfer is the training loss, averaged over the last steps, against the rate: the best rate should
be the same at every width. All runs of a seed see the same batches in the same order.

Runs that are already in the --out file are not repeated, so that a grid can grow.

Source: Yang et al. 2022, appendix D.1 and figure 1, https://arxiv.org/abs/2203.03466
"""

import argparse
import dataclasses
import functools
import itertools
import json
import time
from pathlib import Path

import jax
import numpy as np
import optax
from harness import Report, ready_device
from mup_figures import (
    NAMES,
    SITES,
    best,
    draw_coordinates,
    draw_transfer,
    transfer_table,
)

from jaxgpt.boxes.attention import GQA
from jaxgpt.data.batches import Batches
from jaxgpt.model import ModelConfig, forward
from jaxgpt.presets import RUNS
from jaxgpt.train.config import TrainConfig
from jaxgpt.train.optim import optimizer
from jaxgpt.train.step import init_state, train_step

LOOKS = (1, 2, 4, 8)
"""After how many steps activations are looked at."""
HELD_OUT = 1 << 20
"""Number of the batch that they are looked at with."""
COMPILER_OPTIONS: dict[str, int] | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all runs have in common.

    Attributes:
      base: The width at which muP changes nothing.
      layers: Blocks.
      context: Characters of a row.
      batch: Rows of a step.
      vocab: Characters that there are.
    """

    base: int
    layers: int
    context: int
    batch: int
    vocab: int

    def model(self, width: int, mup: bool) -> ModelConfig:
        return dataclasses.replace(
            RUNS["wikitext2-char"]().model,
            vocab_size=self.vocab,
            context_length=self.context,
            d_model=width,
            n_layers=self.layers,
            attention=GQA(4),
            vocab_multiple=1,
            mup_base=self.base if mup else None,
        )


class Runs:
    """Training runs of one model, compiled once for all rates."""

    def __init__(self, setting: Setting, width: int, mup: bool):
        self.cfg = cfg = setting.model(width, mup)
        self.sites = [site.format(last=cfg.n_layers - 1) for site in SITES]
        self._tx = optimizer(
            # Steps and decay are proportional to a constant rate, which is a factor below.
            dataclasses.replace(RUNS["wikitext2-char"]().optim, lr=1.0),
            1,
            cfg.dims().width_ratio,
        )
        self._train = TrainConfig(batch_size=setting.batch)
        jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
        self._start = jit(self._fresh)
        self._step = jit(self._one_step, donate_argnums=0)
        self._look = jit(self._sites)

    def losses(self, batches: Batches, rate: float, seed: int, steps: int) -> list[float]:
        """The loss of each step; it ends early where one is not finite."""
        state, found = self._start(seed), []
        for step in range(steps):
            state, loss = self._step(state, batches.batch(step), rate)
            found.append(loss)
            if step % 10 == 9 and not np.isfinite(float(loss)):
                break
        return [round(float(loss), 5) for loss in found]

    def changes(self, batches: Batches, rate: float, seed: int, looks=LOOKS) -> list[list[float]]:
        """For each site, how far its entries are from where they began, after some steps."""
        tokens_BT = batches.batch(HELD_OUT).tokens_BT
        state = self._start(seed)
        before = self._look(state.params, tokens_BT)
        found = []
        for step in range(max(looks)):
            state, _ = self._step(state, batches.batch(step), rate)
            if step + 1 in looks:
                after = self._look(state.params, tokens_BT)
                found.append([float(abs(x - y).mean()) for x, y in zip(after, before, strict=True)])
        return np.transpose(found).tolist()

    def _fresh(self, seed):
        return init_state(self.cfg, optax.chain(self._tx, optax.scale(1.0)), seed)

    def _one_step(self, state, batch, rate):
        tx = optax.chain(self._tx, optax.scale(rate))
        state, metrics = train_step(state, batch, cfg=self.cfg, tx=tx, train=self._train)
        return state, metrics["loss_nats"]

    def _sites(self, params, tokens_BT):
        captured = forward(self.cfg, params, tokens_BT, capture=self.sites).captured
        return [captured[site] for site in self.sites]


made_for = functools.cache(Runs)  # both checks take the same compiled programs


def read(path: Path, characters: int) -> tuple[np.ndarray, int]:
    """The ids of the first nine tenths, and how many characters there are in all of the text."""
    text = path.read_text(encoding="utf-8")[:characters]
    known = sorted(set(text))
    index = {character: i for i, character in enumerate(known)}
    ids_T = np.array([index[character] for character in text], np.int32)
    return ids_T[: len(ids_T) * 9 // 10], len(known)


def check_coordinates(setting, batches, options) -> dict:
    """The record of the coordinate check."""
    rate, rows = 2.0**options.check_log2_rate, []
    for width, mup in pairs(options.widths, setting.base):
        runs = made_for(setting, width, mup)
        for seed in range(options.check_seeds):
            changes = runs.changes(batches(seed), rate, seed)
            rows.append({"width": width, "mup": mup, "seed": seed, "changes": changes})
    return {"log2_rate": options.check_log2_rate, "looks": list(LOOKS), "rows": rows}


def check_transfer(setting, batches, options, report) -> None:
    """Runs over rates that are not on record yet; each is written down when it is done."""
    known = {tuple(run[k] for k in ("width", "mup", "log2_rate", "seed")): run for run in report}
    for width, mup in pairs(options.widths, setting.base):
        if options.only not in (None, NAMES[mup]):
            continue
        for rate, seed in itertools.product(options.log2_rates, range(options.seeds)):
            if (width, mup, rate, seed) in known:
                continue
            runs = made_for(setting, width, mup)
            began = time.perf_counter()
            losses = runs.losses(batches(seed), 2.0**rate, seed, options.steps)
            run = {"width": width, "mup": mup, "log2_rate": rate, "seed": seed, "losses": losses}
            report.append(run | {"wall_s": round(time.perf_counter() - began, 1)})
            yield f"d={width} {NAMES[mup]} 2^{rate:g} seed {seed}: {losses[-1]:.4f}"


def pairs(widths, base: int):
    """Widths and parametrisations; one of them at the base."""
    return [(w, mup) for w in sorted(widths) for mup in ((False, True) if w != base else (False,))]


def parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").splitlines()
    made = argparse.ArgumentParser(
        description=lines[0],
        epilog="\n".join(lines[1:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--text", type=Path, required=True)
    made.add_argument("--characters", type=int, default=300_000, help="of the text, from the start")
    made.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    made.add_argument("--base", type=int, help="width where muP begins (default: the smallest)")
    made.add_argument("--layers", type=int, default=2)
    made.add_argument("--context", type=int, default=64)
    made.add_argument("--batch", type=int, default=8)
    made.add_argument("--steps", type=int, default=100, help="of a run over rates")
    made.add_argument("--log2-rates", type=float, nargs="+", default=range(-11, -3))
    made.add_argument("--only", choices=NAMES.values(), help="runs over rates of this kind alone")
    made.add_argument("--seeds", type=int, default=1, help="of the runs over rates")
    made.add_argument("--check-seeds", type=int, default=2, help="of the coordinate check")
    made.add_argument("--check-log2-rate", type=float, default=-10.0)
    made.add_argument(
        "--coordinates", type=Path, help="figure of the coordinate check, which is run"
    )
    made.add_argument("--transfer", type=Path, help="figure of the loss by rate, which is run")
    made.add_argument("--out", type=Path, help="the JSON file to write, and to go on with")
    return made


def main(argv=None):
    options = parser().parse_args(argv)
    ready_device()
    ids_T, vocab = read(options.text, options.characters)
    base = options.base or min(options.widths)
    setting = Setting(base, options.layers, options.context, options.batch, vocab)
    old = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    report = Report(
        "muP: do activations and the best rate keep their size with width?", options.out
    )
    same = {"setting": dataclasses.asdict(setting), "steps": options.steps}
    if old and {key: old[key] for key in same} != same:
        raise SystemExit(f"{options.out} is of another setting: {old['setting']}")
    report.record |= same | {"coordinates": old.get("coordinates"), "runs": old.get("runs", [])}

    def batches(seed):
        return Batches(ids_T, options.context, options.batch, seed)

    if options.coordinates:
        if report.record["coordinates"] is None:
            report.record["coordinates"] = check_coordinates(setting, batches, options)
            report.write()
        draw_coordinates(report.record["coordinates"], base, options.coordinates)
    if options.transfer:
        for line in check_transfer(setting, batches, options, report.record["runs"]):
            print(line, flush=True)
            report.write()
        table = transfer_table(report.record["runs"], options.steps, base)
        for (mup, width), row in table.items():
            cells = "  ".join(f"2^{rate:g}: {loss:.3f}" for rate, loss in row.items())
            print(f"{NAMES[mup]:8} d={width:4}  best 2^{best(row):.2f}  {cells}")
        draw_transfer(table, options.steps, options.transfer)
    return report.record


if __name__ == "__main__":
    main()
