# SPDX-License-Identifier: Apache-2.0
"""A task, or a text of one's own, from its data to its numbers.

Left out: the data sets (`sets.py`), and what a terminal shows (the command line).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxgpt.data.base import Tokenizer, begin_ids
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig
from jaxgpt.sample.text import start_ids
from jaxgpt.shapes import Params
from jaxgpt.study.evaluation.questions import Answer, answer
from jaxgpt.study.evaluation.reading import first_lines, read_documents, set_rows, set_text
from jaxgpt.study.evaluation.sets import TASKS, QuestionTask
from jaxgpt.study.evaluation.statistics import Estimate
from jaxgpt.study.evaluation.texts import TextScore, evaluate_text, window_size

WHOLE_BYTES = 100_000_000  # of enwik8 and text8


@dataclasses.dataclass(frozen=True)
class Result:
    """What a task gave.

    Attributes:
      name: Of the task.
      metrics: By name.
      n: What was scored.
      unit: What n counts.
      data: What was scored: a file and its hash, or a repository and its commit; of texts how many
        documents, windows, characters and bytes, and tokens that nothing stood before.
      answers: Of each question; none of a text.
    """

    name: str
    metrics: Mapping[str, Estimate]
    n: int
    unit: str
    data: Mapping[str, Any]
    answers: tuple[Answer, ...] = ()


def run_task(
    name: str,
    cfg: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    *,
    file: str | Path | None = None,
    limit: int | None = None,
    context: int | None = None,
    stride: int | None = None,
    **options: Any,
) -> Result:
    """Run one task.

    Args:
      name: Of `TASKS`.
      cfg: The model.
      params: Its parameters.
      tokenizer: The tokenizer that it was trained with.
      file: Its data; None: those of the hub.
      limit: The first questions, or lines of a text; None: all.
      context: Of the windows of a text; see `evaluate_text`.
      stride: Of the windows of a text.
      **options: `batch_size`, `dtype` and `progress` of `evaluate_text` and `answer`.

    Raises:
      ConfigError: No such task, or data that cannot be read.
      ResourceError: The hub cannot be reached, or the system refused to read.
      DivergedError: The model's logits are not finite.
    """
    if name not in TASKS:
        raise ConfigError(f"no task {name!r}", fix=f"one of {', '.join(TASKS)}")
    task = TASKS[name]
    model = cfg, params, tokenizer
    if isinstance(task, QuestionTask):
        rows, facts = set_rows(name, task.hub, file, task.parse)
        questions = [task.read(*row) for row in rows[:limit]]
        answers = answer(*model, questions, **options)
        metrics = task.metrics(questions, answers)
        return Result(name, metrics, len(questions), task.unit, facts, answers=tuple(answers))
    text, facts = set_text(name, task.hub, file)
    text = first_lines(_last(text, task.last), limit)
    n_words = len(text.split()) + text.count("\n")
    made = task.undo(text)
    documents = made.splitlines(keepends=True) if task.lines else [made]
    prefix, size = () if begin_ids(tokenizer) else start_ids(tokenizer), window_size(cfg, context)
    if prefix and stride in (None, size):  # a window's first token is the last of the one before
        stride = size - 1
    score = evaluate_text(
        *model,
        [each for each in documents if each.strip()],
        context=size,
        stride=stride,
        prefix=prefix,
        n_words=n_words,
        **options,
    )
    found = score.metrics()
    metrics = {key: found[key] for key in task.metrics}
    return _result(name, score, metrics, facts | {"words": n_words})


def score_data(
    path: str | Path,
    cfg: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    *,
    limit: int | None = None,
    **options: Any,
) -> Result:
    """Score what a path names, document by document; see `read_documents`.

    Args:
      path: A file or a folder.
      cfg: The model.
      params: Its parameters.
      tokenizer: The tokenizer that it was trained with.
      limit: The first documents, or lines of a text that is one document; None: all.
      **options: Of `evaluate_text`.

    Raises:
      ConfigError: Nothing there, no text, or tokens that another tokenizer has made.
      ResourceError: The system refused to read.
      DivergedError: The model's logits are not finite.
    """
    documents, facts = read_documents(path, tokenizer, limit)
    score = evaluate_text(cfg, params, tokenizer, documents, **options)
    return _result(str(path), score, score.metrics(), facts)


def _result(
    name: str, score: TextScore, metrics: Mapping[str, Estimate], facts: Mapping[str, Any]
) -> Result:
    total = score.total
    counts = dict(documents=score.n_documents, windows=score.n_windows)
    counts |= dict(unscored_tokens=score.n_unscored, chars=total.n_chars, bytes=total.n_bytes)
    return Result(name, metrics, total.n_tokens, "tokens", {**facts, **counts})


def _last(text: str, n_bytes: int | None) -> str:
    """The test part of a set that has no other; a file that is not the whole is this part."""
    if n_bytes is None or len(content := text.encode()) < WHOLE_BYTES:
        return text
    return content[-n_bytes:].decode(errors="ignore")
