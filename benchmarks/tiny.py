# SPDX-License-Identifier: Apache-2.0
"""The preset `tiny` as a newcomer meets it: time, loss against a trigram model, words, sampling.

    python benchmarks/tiny.py

Every command is a whole process; the compilation cache is cold for the first training (a folder of
its own) and warm for what follows.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trigram import trigram_nats

from jaxgpt.data.corpus import read_corpus
from jaxgpt.data.tokenizer import load_tokenizer
from jaxgpt.data.tokens import open_tokens

ROOT = Path(__file__).resolve().parents[1]


def timed(*words, env):
    """Run a command; its wall seconds, and its output lines with the second each came at."""
    start, lines = time.monotonic(), []
    command = [sys.executable, *map(str, words)]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            lines.append((time.monotonic() - start, line.rstrip("\n")))
    if process.returncode:
        sys.exit(f"{words}: exit code {process.returncode}")
    return time.monotonic() - start, lines


def first_step_s(lines):
    """When the first step was logged."""
    return next(at for at, line in lines if line.startswith("step "))


def main():
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "tiny")
        env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(Path(folder, "cache"))}
        train = ("train.py", "--preset", "tiny")
        wall, _ = timed(*train, "--run", run, env=env)
        one = ("--train.steps=1", "--train.log_every=1", "--optim.warmup_steps=1")
        _, warm = timed(*train, *one, "--run", Path(folder, "warm"), env=env)
        cold_env = env | {"JAX_COMPILATION_CACHE_DIR": str(Path(folder, "other-cache"))}
        _, cold = timed(*train, *one, "--run", Path(folder, "cold"), env=cold_env)

        tokenizer = load_tokenizer(run / "tokenizer.json")
        tokens = open_tokens(run / "tokens" / "tokens.bin", tokenizer=tokenizer)
        baseline = trigram_nats(tokens.train, tokens.val, tokenizer.vocab_size)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        ours = [r["val_nats_per_token"] for r in records if "val_nats_per_token" in r][-1]

        def sample(n, seed):
            wall, lines = timed(
                *("sample.py", "--run", run, "--prompt", "The ", "--temperature", "0.8"),
                *("--max-new-tokens", n, "--seed", seed),
                env=env,
            )
            return wall, "\n".join(line for _, line in lines)

        cold_sample, _ = sample(200, 0)
        walls = {n: min(sample(n, s)[0] for s in (1, 2, 3)) for n in (200, 1000)}
        known = set(re.findall(r"[A-Za-z]{3,}", read_corpus(None).documents[0]))
        shares = []
        for seed in range(4, 9):
            words = re.findall(r"[A-Za-z]{3,}", sample(1000, seed)[1])
            shares.append(sum(word in known for word in words) / len(words))

    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"train, from python to the end: {wall:.1f} s")
    print(f"first step: {first_step_s(cold):.1f} s, with a warm cache {first_step_s(warm):.1f} s")
    print(f"validation nats/character: {ours:.4f}, trigram {baseline:.4f}")
    print(f"words that occur in the text, of 1,000 characters at 0.8: {sorted(shares)}")
    rate = 800 / (walls[1000] - walls[200])
    print(f"200 characters: {cold_sample:.1f} s cold, {walls[200]:.1f} s warm; {rate:.0f} more/s")


if __name__ == "__main__":
    main()
