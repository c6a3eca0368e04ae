# SPDX-License-Identifier: Apache-2.0
"""Questions that a model answers by what it finds likely: the last word, or one of some choices.

Decisions are those of lm-evaluation-harness: a last word is right where each of its tokens is the
likeliest; of choices the one with the highest log-likelihood counts (`accuracy`), or with the
highest per character of the choice (`accuracy_norm`); the first of equals.

Left out: where questions come from (`reading.py`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxgpt.data.base import Tokenizer
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig
from jaxgpt.shapes import Params
from jaxgpt.study.evaluation.likelihood import loglikelihoods
from jaxgpt.study.evaluation.pairs import encode_pair
from jaxgpt.study.evaluation.statistics import Estimate, mean


@dataclasses.dataclass(frozen=True)
class Question:
    """Something to go on with.

    Attributes:
      context: The text so far.
      choices: What it may go on with.
      gold: The number of the right one.
      space: What stands before each choice, and is no part of it.
      ending: What stands behind each choice.
    """

    context: str
    choices: tuple[str, ...]
    gold: int = 0
    space: str = " "
    ending: str = ""

    @property
    def continuations(self) -> list[str]:
        """What is scored, for each choice."""
        return [f"{self.space}{choice}{self.ending}" for choice in self.choices]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model thinks of a question.

    Attributes:
      log_probs: Of each continuation, in nats.
      greedy: Whether the right continuation is the one that greedy decoding gives.
      best: The likeliest choice.
      best_norm: The likeliest one per character.
    """

    log_probs: tuple[float, ...]
    greedy: bool
    best: int
    best_norm: int


def answer(
    cfg: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> list[Answer]:
    """What a model thinks of questions.

    Args:
      cfg: The model.
      params: Its parameters.
      tokenizer: The tokenizer that it was trained with.
      questions: At least one.
      progress: Called with the choices done, and all there are.
      **options: Of `loglikelihoods`.

    Raises:
      ConfigError: No question, or one that cannot be encoded or is too long.
      DivergedError: The model's logits are not finite.
    """
    if not questions:
        raise ConfigError("no questions", fix="at least one")
    pairs = [encode_pair(tokenizer, q.context, end) for q in questions for end in q.continuations]
    found = loglikelihoods(
        cfg, params, pairs, progress=lambda done: progress(done, len(pairs)), **options
    )
    answers, start = [], 0
    for question in questions:
        n = len(question.choices)
        scores = found.log_probs[start : start + n]
        by_length = scores / [float(len(choice)) for choice in question.choices]
        greedy = bool(found.greedy[start + question.gold])
        best = int(scores.argmax()), int(by_length.argmax())
        answers.append(Answer(tuple(scores.tolist()), greedy, *best))
        start += n
    return answers


def last_word_metrics(
    questions: Sequence[Question], answers: Sequence[Answer]
) -> dict[str, Estimate]:
    """Of questions with one choice: how often it is guessed, and its perplexity."""
    nats = mean(np.array([-each.log_probs[0] for each in answers]))
    accuracy = mean(np.array([each.greedy for each in answers]))
    return {"accuracy": accuracy, "word_perplexity": nats.exponential()}


def choice_metrics(questions: Sequence[Question], answers: Sequence[Answer]) -> dict[str, Estimate]:
    """Of questions with several choices: how often the right one is the likeliest."""
    gold = np.array([question.gold for question in questions])
    best, best_norm = (
        np.array([getattr(a, name) for a in answers]) for name in ("best", "best_norm")
    )
    return {"accuracy": mean(best == gold), "accuracy_norm": mean(best_norm == gold)}
