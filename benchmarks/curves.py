# SPDX-License-Identifier: Apache-2.0
"""The reference curve of a preset, of seeds that train in one step, for `train.py --compare`.

    python benchmarks/curves.py tiny
    python benchmarks/curves.py shakespeare --data.path=tinyshakespeare.txt

Trains into runs/curve-PRESET (interrupted, the same command goes on) and writes
jaxgpt/presets/curves/PRESET.json. Prints how many of the seeds would have left the band of the
others, and where runs that are a bit wrong would have been noticed.
"""

import argparse
import json
import platform
import sys
from pathlib import Path

import jax

from jaxgpt import __version__
from jaxgpt.cli import train_main
from jaxgpt.cli.reference import CURVES, recipe_of
from jaxgpt.cli.train import stored_run
from jaxgpt.config import RunConfig
from jaxgpt.configlib import short_name, to_data
from jaxgpt.presets import RUNS
from jaxgpt.study.curves import Watch, limit, losses_of, reference_of
from jaxgpt.study.lanes import read_lanes
from jaxgpt.train.rundata import read_facts
from jaxgpt.train.runfolder import RunFolder


def noticed(reference, runs, shift):
    """When runs whose losses are higher by some nats leave the curves, and by which loss."""
    found = []
    for run in runs:
        watches = {
            "loss_nats": Watch(reference.training),
            "val_nats_per_token": Watch.validation(reference.validation),
        }
        for key, watch in watches.items():
            curve = losses_of(run.records, key)
            for step in sorted(curve):
                watch.look(step, curve[step] + shift)
        found.append([watch.left for watch in watches.values()])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("preset", choices=RUNS)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=CURVES)
    options, rest = parser.parse_known_args()
    name = f"curve-{options.preset}"
    lanes = [f"--preset={options.preset}", f"--seeds={options.seeds}", f"--run={name}"]
    if code := train_main([*lanes, *rest]):
        sys.exit(code)
    folder = Path("runs", name)
    runs = read_lanes(folder)
    if any(run.diverged for run in runs):
        sys.exit("a seed diverged: no curve")
    first = RunFolder(folder / runs[0].name)
    facts, known = read_facts(first), stored_run(first) or RunConfig()
    recipe = to_data(recipe_of(known, RUNS[options.preset]()), short_name)
    about = {
        "source": facts["source"],
        "tokenizer": facts["tokenizer"],
        "seeds": [run.values["train.seed"] for run in runs],
        "command": f"python benchmarks/curves.py {options.preset} --seeds {options.seeds}",
        "devices": facts["sessions"][-1]["devices"],
        "jaxgpt": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
    reference = reference_of(options.preset, recipe, about, [run.records for run in runs])
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.preset}.json"
    reference.write(path)
    last = reference.validation
    print(f"{path}: {path.stat().st_size:,} bytes, {len(reference.training.steps)} points")
    print(f"validation at step {last.steps[-1]}: {last.mean[-1]:.4f}, sd {last.sd[-1]:.4f}")
    print(f"{reference.alarms} of {len(runs)} seeds leave the curves of the others")
    known = reference.training
    off = [limit(known) * sd for sd in known.sd]
    print(f"outside: {min(off):.3f} to {max(off):.3f} nats, {limit(known):.2f} sd")
    print(f"validation, outside: {limit(last, 1) * last.sd[-1]:.4f} nats, {limit(last, 1):.2f} sd")
    print("of each seed, where its training and its validation loss would leave the curve")
    for shift in (0.02, 0.05, 0.1, 0.2):
        print(f"if higher by {shift} nats: {json.dumps(noticed(reference, runs, shift))}")


if __name__ == "__main__":
    main()
