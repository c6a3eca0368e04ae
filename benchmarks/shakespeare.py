# SPDX-License-Identifier: Apache-2.0
"""The preset `shakespeare` against nanoGPT's own CPU recipe, as whole processes on one machine.

    python benchmarks/shakespeare.py --text tinyshakespeare.txt \
        --nanogpt CHECKOUT --nanogpt-python PYTHON_WITH_TORCH --seeds 0 1 2

Runs alternate. Wall time is from the start of the process to its end, compilation and checkpoints
included. Both losses come from one evaluator: `jaxgpt.train.evaluate` over the last tenth of the
text, windows of 64 without overlap, every position scored. Without --nanogpt only ours runs.
"""

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from jaxgpt.data.corpus import read_corpus
from jaxgpt.data.tokenizer import train_tokenizer
from jaxgpt.train.evaluate import evaluate

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = 64

# nanoGPT's README, "I only have a macbook", but for the folder, the seed and the log interval.
NANOGPT = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 "
    "--log_interval=100 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 "
    "--max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
).split()

# Run by nanoGPT's Python inside its checkout: nats of given windows under its checkpoint.
THEIR_NATS = """
import sys, numpy as np, torch
from model import GPT, GPTConfig
saved = torch.load(sys.argv[1], map_location="cpu", weights_only=False)
model = GPT(GPTConfig(**saved["model_args"]))
model.load_state_dict(saved["model"]); model.eval()
windows = np.load(sys.argv[2]); nats = []
with torch.no_grad():
    for tokens, targets in zip(windows["tokens"], windows["targets"]):
        tokens, targets = (torch.from_numpy(x.astype(np.int64))[None] for x in (tokens, targets))
        logits, _ = model(tokens, targets)
        nats.append(torch.nn.functional.cross_entropy(logits[0], targets[0], reduction="none"))
np.save(sys.argv[3], torch.stack(nats).numpy())
"""


def timed(command, cwd):
    """Run a command to its end; wall seconds."""
    start = time.monotonic()
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.monotonic() - start


def ours(text, seed, work, flags):
    """(wall seconds, validation nats) of the preset."""
    run = work / f"ours-{seed}"
    command = [sys.executable, "train.py", "--preset", "shakespeare", "--run", run, *flags]
    wall = timed([*command, f"--data.path={text}", f"--train.seed={seed}"], ROOT)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The run's last record is this very evaluator's.
    return wall, [r["val_nats_per_token"] for r in records if "val_nats_per_token" in r][-1]


def theirs(text, seed, work, checkout, python):
    """(wall seconds, validation nats) of nanoGPT's recipe."""
    folder = checkout / "data" / "shakespeare_char"
    shutil.copy(text, folder / "input.txt")
    timed([python, "prepare.py"], folder)
    # Its seed is a constant in train.py; `exec` runs it with another one.
    train = (
        "import sys; source = open('train.py').read().replace('1337 + ', f'{sys.argv.pop(1)} + ')"
    )
    out = work / f"theirs-{seed}"
    command = [python, "-c", f"{train}; exec(source)", str(1337 + seed), *NANOGPT]
    wall = timed([*command, f"--out_dir={out}"], checkout)
    return wall, their_nats(text, out / "ckpt.pt", checkout, python)


def their_nats(text, checkpoint, checkout, python):
    """Our evaluator over the log-probabilities of their model."""
    corpus = read_corpus(text)
    tokenizer = train_tokenizer("char", corpus, 0)
    document = corpus.documents[0]
    tokens = tokenizer.encode(document[int(0.9 * len(document)) :])
    asked = []

    def remember(batch):
        asked.append(batch)
        return batch.weights_BT

    def score(nats_of):
        return evaluate(nats_of, tokens, tokenizer, context_length=CONTEXT, batch_size=1)

    score(remember)
    with tempfile.TemporaryDirectory() as folder:
        windows, nats = Path(folder, "windows.npz"), Path(folder, "nats.npy")
        np.savez(
            windows,
            tokens=np.concatenate([b.tokens_BT for b in asked]),
            targets=np.concatenate([b.targets_BT for b in asked]),
        )
        timed([python, "-c", THEIR_NATS, checkpoint, windows, nats], checkout)
        rows = iter(np.load(nats))
        return score(lambda batch: next(rows)[None] * batch.weights_BT).nats_per_token


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--text", type=Path, required=True, help="tinyshakespeare.txt")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of karpathy/nanoGPT")
    parser.add_argument("--nanogpt-python", default=sys.executable, help="a Python with torch")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--flags", nargs="*", default=[], help="further flags for ours, without --")
    args = parser.parse_args()
    text, flags = args.text.resolve(), [f"--{flag}" for flag in args.flags]
    results = {"ours": [], "nanoGPT": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            results["ours"].append(ours(text, seed, Path(folder), flags))
            if args.nanogpt:
                checkout = args.nanogpt.resolve()
                pair = theirs(text, seed, Path(folder), checkout, args.nanogpt_python)
                results["nanoGPT"].append(pair)
            print({name: pairs[-1] for name, pairs in results.items() if pairs}, flush=True)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    for name, pairs in results.items():
        if pairs:
            walls, losses = zip(*pairs, strict=True)
            print(
                f"{name:8} wall s: best {min(walls):.1f}, median {statistics.median(walls):.1f}; "
                f"validation nats/character: {', '.join(f'{x:.4f}' for x in sorted(losses))}, "
                f"median {statistics.median(losses):.4f}"
            )


if __name__ == "__main__":
    main()
