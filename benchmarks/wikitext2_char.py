# SPDX-License-Identifier: Apache-2.0
"""The preset `wikitext2-char` beside the notebook that it repeats, and beside `tiny`.

    python benchmarks/wikitext2_char.py --text wikitext2-valid.txt \
        --torch-python PYTHON_WITH_TORCH --tiny-steps 700

The notebook is `decoder-only-transformer-on-wikitext-2.ipynb`, in PyTorch; its model and loop are
written anew below. Times are those of whole processes, with a cold compilation cache. All
validation losses are of one kind: every character of the last tenth but the first, scored once.
Without --text the text is WikiText-2's from the Hugging Face hub, whose losses can be compared with
those that the notebook printed. Without --torch-python no PyTorch runs.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxgpt.data.source import read_source
from jaxgpt.presets import RUNS

ROOT = Path(__file__).resolve().parents[1]
PRINTED = {
    0: 5.2090,
    100: 2.8399,
    200: 2.6231,
    300: 2.5646,
}  # step -> training nats, 154 characters

THEIRS = """
import json, sys, torch, torch.nn as nn, torch.nn.functional as F
text = open(sys.argv[1], encoding="utf-8", newline="").read()
torch.manual_seed(int(sys.argv[2]))
chars = sorted(set(text))
ids = torch.tensor([chars.index(c) for c in text])
train, val, T, D, N = ids[:int(0.9 * len(ids))], ids[int(0.9 * len(ids)):], 96, 128, 4

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
    def forward(self, x):
        qkv = self.qkv(self.ln1(x)).chunk(3, -1)
        q, k, v = (h.unflatten(-1, (N, -1)).transpose(1, 2) for h in qkv)
        scores = q @ k.transpose(-2, -1) / (D // N) ** 0.5
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        probs = scores.masked_fill(future, float("-inf")).softmax(-1)
        x = x + self.proj((probs @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln2(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.pos = nn.Embedding(len(chars), D), nn.Embedding(T, D)
        self.blocks, self.ln = nn.Sequential(*[Block() for _ in range(3)]), nn.LayerNorm(D)
        self.head = nn.Linear(D, len(chars))
    def forward(self, x):
        return self.head(self.ln(self.blocks(self.token(x) + self.pos.weight[: x.shape[1]])))

def nats(x, y, reduction="mean"):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)

model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=1e-2)
losses = []
for step in range(400):
    window = torch.randint(0, len(train) - T - 1, (32, 1)) + torch.arange(T + 1)
    loss = nats(train[window[:, :-1]], train[window[:, 1:]])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    losses.append(loss.item())
with torch.no_grad():
    parts = [val[i : i + T + 1] for i in range(0, len(val) - 1, T)]
    total = sum(nats(p[None, :-1], p[None, 1:], "sum").item() for p in parts)
n = sum(p.numel() for p in model.parameters())
found = {"losses": losses, "val": total / (len(val) - 1), "params": n, "torch": torch.__version__}
print(json.dumps(found))
"""


def timed(command, **environ):
    """Run a command to its end; what it took, and its output."""
    start, before = time.monotonic(), os.times()
    command = [str(word) for word in command]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environ, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    after = os.times()
    cpu = sum(after[2:4]) - sum(before[2:4])  # of children, user and system
    return f"{time.monotonic() - start:.1f} s wall, {cpu:.0f} s CPU", done.stdout


def ours(preset, run, *flags):
    """Prints what it took; training nats by step from 0."""
    flags = (*flags, "--train.log_every=1", "--show.sample_tokens=0", "--show.pictures=false")
    cache = {"JAX_COMPILATION_CACHE_DIR": f"{run}-cache"}
    took, _ = timed([sys.executable, "train.py", "--preset", preset, "--run", run, *flags], **cache)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [r["loss_nats"] for r in records if "loss_nats" in r]
    val = [r["val_nats_per_token"] for r in records if "val_nats_per_token" in r][-1]
    tokens = records[-1]["tokens"]
    print(f"{preset}: {val:.4f} validation nats, {tokens:,} characters, {took}", flush=True)
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--text", help="a file; its first 300,000 characters are used")
    parser.add_argument("--torch-python", help="a Python with torch")
    parser.add_argument("--tiny-steps", type=int, help="of `tiny`, so that it takes as long")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    data = RUNS["wikitext2-char"]().data
    path = data.path if args.text is None else str(Path(args.text).resolve())
    corpus, _ = read_source(type(data)(path=path, max_chars=data.max_chars))
    text = corpus.documents[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    jax = importlib.metadata.version("jax")
    print(f"jax {jax}; {len(text):,} characters, {len(set(text))} different ones")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "text.txt")
        file.write_text(text, encoding="utf-8", newline="")
        flags = (f"--data.path={file}", f"--train.seed={args.seed}")
        columns = {"notebook": PRINTED, "ours": ours("wikitext2-char", Path(folder, "run"), *flags)}
        if args.torch_python:
            took, out = timed([args.torch_python, "-c", THEIRS, file, args.seed])
            theirs = json.loads(out)
            columns["PyTorch here"] = theirs["losses"]
            print(
                f"PyTorch {theirs['torch']}: {theirs['val']:.4f} validation nats, {took}, "
                f"{theirs['params']:,} parameters",
                flush=True,
            )
        if args.tiny_steps:
            ours("tiny", Path(folder, "tiny"), *flags, f"--train.steps={args.tiny_steps}")
    print("training nats per character before update n, from 0:")
    for step in PRINTED:
        print(f"{step:5}", *(f"{name} {losses[step]:.4f}" for name, losses in columns.items()))


if __name__ == "__main__":
    main()
