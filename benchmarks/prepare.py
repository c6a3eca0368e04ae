# SPDX-License-Identifier: Apache-2.0
"""How fast `jaxgpt prepare` writes tokens, in how much memory, and the same after kills.

    python benchmarks/prepare.py --text FILE [FILE ...] [--byte-mb 1000] [--bpe-mb 100]

The files are repeated up to the sizes asked for. Whole processes, one and two workers in turn, the
start of Python included; each line is the best of the repeats.
"""

import argparse
import filecmp
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MAIN = "from jaxgpt.cli import main; raise SystemExit(main())"
ROOT = Path(__file__).resolve().parents[1]


def prepare(out: Path, text: Path, tokenizer: str, workers: int, *words: str, limit_s=None):
    """Wall and CPU seconds of one process; None where it was killed at its limit."""
    command = [sys.executable, "-c", MAIN, "prepare", str(out), f"--data.path={text}"]
    command += [f"--data.tokenizer={tokenizer}", f"--workers={workers}", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    used, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    try:
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired:  # killed
        return None
    wall_s, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def main() -> None:
    """Print one line for each tokenizer and number of workers, and how a killed run ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--byte-mb", type=int, default=1000)
    parser.add_argument("--bpe-mb", type=int, default=100)
    parser.add_argument("--vocab-size", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--kills", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        base = b"".join(file.read_bytes() for file in options.text)
        (place / "base.txt").write_bytes(base)
        vocabulary = f"--data.vocab_size={options.vocab_size}"
        prepare(place / "bpe", place / "base.txt", "bpe", 2, vocabulary)
        bpe = str(place / "bpe" / "tokenizer.json")
        for name, tokenizer, mb in (
            ("byte", "byte", options.byte_mb),
            ("bpe", bpe, options.bpe_mb),
        ):
            text = place / f"{name}.txt"
            with open(text, "wb") as file:
                while file.tell() < mb * 10**6:
                    file.write(base[: mb * 10**6 - file.tell()])
            best = {}
            for turn in range(options.repeats):
                for workers in (1, 2):
                    times = prepare(place / f"{name}-{workers}-{turn}", text, tokenizer, workers)
                    best[workers] = min(best.get(workers, times), times)
            for workers, (wall_s, cpu_s) in best.items():
                print(f"{name}, {workers} workers: {mb / wall_s:.1f} MB/s, {cpu_s:.1f} CPU s")
            print(f"{name}, 2 workers against 1: {best[1][0] / best[2][0]:.2f}", flush=True)
        peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(f"peak memory of any process: {peak_mb:.0f} MiB")
        killed, whole = place / "killed", place / "byte-1-0"
        for _ in range(options.kills):
            prepare(killed, place / "byte.txt", "byte", 2, limit_s=best[2][0] / 8)
        prepare(killed, place / "byte.txt", "byte", 1)
        names = [file.name for file in whole.iterdir() if not file.name.startswith(".")]
        same = not any(filecmp.cmpfiles(whole, killed, names, shallow=False)[1:])
        print(f"killed {options.kills} times and gone on with: {len(names)} files, same: {same}")


if __name__ == "__main__":
    main()
