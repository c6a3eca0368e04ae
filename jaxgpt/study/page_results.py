# SPDX-License-Identifier: Apache-2.0
"""What the page of a run says of the model that came of it: samples, attention, scores, origin.

See `page_parts.py`.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.study.page import (
    Html,
    cut,
    data_table,
    folded,
    missing,
    paragraph,
    picture,
    preformatted,
    table,
)
from jaxgpt.study.page_parts import Parts, Run
from jaxgpt.train.files import size

SAMPLES, SAMPLE_CHARS = 12, 3000
"""Samples that are shown, and characters of each."""
LARGEST_BYTES = 4_000_000
"""Of a file of results that is shown."""
SCORES = {
    "val_nats_per_token": "nats per token",
    "val_ema_nats_per_token": "of the moving average",
    "val_token_perplexity": "perplexity of tokens",
    "val_bits_per_char": "bits per character",
    "val_bits_per_byte": "bits per byte",
}


def samples(records: Sequence[Mapping[str, Any]]) -> Parts:
    """What the model wrote on the way: the newest open, some before it folded.

    Args:
      records: Of samples.jsonl.
    """
    texts = [r for r in records if isinstance(r.get("text"), str) and "step" in r]
    if not texts:
        return [missing("samples", "none was written; show.sample_tokens is their length")]
    n = len(texts)
    chosen = sorted({round(i * (n - 1) / max(SAMPLES - 1, 1)) for i in range(min(n, SAMPLES))})
    parts = []
    if n > len(chosen):
        parts.append(paragraph(f"{len(chosen)} of {n} samples, evenly over the run."))
    for i in reversed(chosen):
        record = texts[i]
        body = preformatted(cut(f"{record.get('prompt') or ''}{record['text']}", SAMPLE_CHARS))
        title = f"step {record['step']}"
        parts += [paragraph(title), body] if i == chosen[-1] else [folded(title, body)]
    return parts


@dataclasses.dataclass(frozen=True, eq=False)
class Seen:
    """A figure of attention, its layers, the tokens that it is of, and the checkpoint."""

    figure: Any
    layers: Sequence[int]
    tokens: Sequence[str]
    checkpoint: str


def attention(seen: Seen | str) -> Parts:
    """Who attends to whom; or why that is not known."""
    if isinstance(seen, str):
        return [missing("attention maps", seen)]
    layers = f"layer{'s' if len(seen.layers) > 1 else ''} {', '.join(map(str, seen.layers))}"
    alt = f"Attention of {layers} over {len(seen.tokens)} tokens, a triangle for each head."
    which = seen.checkpoint if seen.checkpoint in ("latest", "best") else f"step {seen.checkpoint}"
    said = f"Of {layers}, checkpoint: {which}. The text: {''.join(seen.tokens)!r}"
    return [picture(seen.figure, alt, said)]


def evaluation(run: Run, folder: Path) -> Parts:
    """The validation losses, and the results of `jaxgpt evaluate` that lie in the folder."""
    parts = []
    if scored := run.with_key("val_nats_per_token"):
        best = min(scored, key=lambda r: r["val_nats_per_token"])
        shown = {"last": scored[-1], "best": best} if best is not scored[-1] else {"last": best}
        head = ("", "step", *SCORES.values())
        rows = [(name, r["step"], *(r.get(key) for key in SCORES)) for name, r in shown.items()]
        kept = [i for i in range(len(head)) if i < 2 or any(r[i] is not None for r in rows)]
        rows = [[row[i] for i in kept] for row in rows]
        said = "On the validation text"
        parts.append(table(rows, [head[i] for i in kept], caption=said))
    else:
        parts.append(missing("validation loss", "the run was not evaluated yet"))
    files = sorted(folder.glob("evaluation*.json"))
    for file in files:
        parts.append(_results(file))
    if not files:
        parts.append(missing("further results", "no evaluation*.json is in the run's folder"))
    return parts


def _results(file: Path) -> Html:
    try:
        if file.stat().st_size > LARGEST_BYTES:
            return missing(f"table of {file.name}", f"it has more than {size(LARGEST_BYTES)}")
        return data_table(json.loads(file.read_bytes()), file.name)
    except (OSError, ValueError, RecursionError) as error:
        return missing(f"table of {file.name}", f"it cannot be read: {error}")


def environment(run: Run, command: str) -> Parts:
    """Versions and devices of each start, what text it read, and how to do it again."""
    sessions = run.facts.get("sessions") or []
    parts = []
    if sessions:
        starts = [
            {key: ", ".join(x) if isinstance(x, list) else x for key, x in session.items()}
            for session in sessions
        ]
        parts.append(data_table(starts, "Starts of the run"))
    else:
        parts.append(missing("versions", "the run has not begun"))
    if facts := {key: value for key, value in run.facts.items() if key != "sessions"}:
        parts.append(data_table(facts, "What it began with: fingerprints of text and tokenizer"))
    return [*parts, paragraph("The same run again, by this command:"), preformatted(command)]
