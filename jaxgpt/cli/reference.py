# SPDX-License-Identifier: Apache-2.0
"""`train.py --compare`: a run beside the reference curve of its recipe, which must be its own."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxgpt.presets
from jaxgpt.config import FREE, RunConfig, differences, from_yaml
from jaxgpt.errors import ConfigError
from jaxgpt.study.curveplots import plot_reference
from jaxgpt.study.curves import Reference, Watch, losses_of, read_reference
from jaxgpt.train.files import read_metrics
from jaxgpt.train.rundata import read_facts
from jaxgpt.train.runfolder import RunFolder

CURVES = Path(jaxgpt.presets.__file__).parent / "curves"
ROUNDING = ("dispatch", "scan", "remat", "kernel", "accumulate", "loss_chunk")
FREELY = (FREE - {"train.steps"}) | {"train.seed", "train.batch_seed", "data.path"}
FREELY |= {f"train.{name}" for name in ROUNDING}
"""Keys in which a run may differ from the recipe of its curve: they change rounding at most, or are
what seeds are for; of the text, its hash counts and not where it is."""


def find_reference(name: str) -> Reference:
    """A curve by the name of its preset, or by its file.

    Raises:
      ConfigError: There is none.
    """
    if "/" in name or name.endswith(".json"):
        return read_reference(Path(name))
    path = CURVES / f"{name}.json"
    if not path.exists():
        known = sorted(each.stem for each in CURVES.glob("*.json"))
        fix = f"one of {', '.join(known)}, or a JSON file" if known else "a JSON file"
        raise ConfigError(f"there is no reference curve {name!r}", fix=fix)
    return read_reference(path)


def check_recipe(reference: Reference, run: RunConfig) -> None:
    """See that a run follows the recipe of a curve, and logs where it has points.

    Raises:
      ConfigError: It does not; the keys that differ are listed.
    """
    where = f"the reference curve of {reference.name}"
    known = from_yaml(json.dumps(reference.recipe), where=where)
    changed = [d for d in differences(known, run) if d.partition(":")[0] not in FREELY]
    if changed:
        what = f"the run follows another recipe than the curve: {', '.join(changed)}"
        raise ConfigError(what, where=where, fix="no --compare, or the recipe as it is")
    if known.train.log_every % run.train.log_every:
        every = known.train.log_every
        what = f"train.log_every={run.train.log_every} leaves out points of the curve"
        raise ConfigError(what, where=where, fix=f"--train.log_every={every}, or a divisor of it")


class Comparing:
    """A listener of records that says where a run leaves the reference curve.

    Args:
      reference: The curve; the recipe was checked.
      folder: The run's; records that it has already are looked at first.
      say: Takes a line.
    """

    def __init__(self, reference: Reference, folder: RunFolder, say: Callable[[str], None]):
        self._reference, self._folder, self._say = reference, folder, say
        self._watches: dict[str, Watch] | None = None

    def __call__(self, record: dict[str, Any]) -> None:
        """Look at a record.

        Raises:
          ConfigError: Text or tokenizer are others than the curve's.
        """
        if self._watches is None:
            self._check()
            self._watches = self._begun(record["step"])
        for key, watch in self._watches.items():
            line = watch.look(record["step"], record[key]) if key in record else None
            if line:
                self._say(f"warning: {line}")

    def _begun(self, now: int) -> dict[str, Watch]:
        """By name of a loss, with what is on record; what there was to say of that was said."""
        known = self._reference
        watches = {
            "loss_nats": Watch(known.training),
            "val_nats_per_token": Watch.validation(known.validation),
        }
        records = read_metrics(self._folder.metrics_path)
        for key, watch in watches.items():
            old = losses_of(records, key)
            for step in sorted(step for step in old if step < now):
                watch.look(step, old[step])
        return watches

    def _check(self) -> None:
        found, known = read_facts(self._folder), self._reference.facts
        for key, what in (("source", "text"), ("tokenizer", "tokenizer")):
            if found.get(key) != known[key]:
                raise ConfigError(
                    f"the {what} is another one than the curve's: {str(known[key])[:12]} -> "
                    f"{str(found.get(key))[:12]}",
                    where=f"the reference curve of {self._reference.name}, made with Python "
                    f"{known['python']}",
                    fix="no --compare, or the same text",
                )


def draw_compared(folder: RunFolder, reference: Reference) -> str:
    """Draw `reference.png` in a run folder; returns a line on how the run ended.

    Raises:
      ConfigError: matplotlib is missing.
      ResourceError: The file cannot be written.
    """
    records, path = read_metrics(folder.metrics_path), folder.path / "reference.png"
    plot_reference(records, reference, path, name=folder.path.name)
    ends, scores = losses_of(records, "val_nats_per_token"), reference.validation
    known = {s: (m, sd) for s, m, sd in zip(scores.steps, scores.mean, scores.sd, strict=True)}
    both = sorted(set(ends) & set(known))
    if not both:
        return f"drew {path}"
    mean, sd = known[both[-1]]
    return (
        f"drew {path}: validation {ends[both[-1]]:.4f} at step {both[-1]}, the curve "
        f"{mean:.4f} +- {sd:.4f} (sd of {scores.n} seeds)"
    )


def recipe_of(run: RunConfig, preset: RunConfig) -> RunConfig:
    """What a curve keeps of a run: all but where its text is, which is as in the preset."""
    return dataclasses.replace(run, data=dataclasses.replace(run.data, path=preset.data.path))
