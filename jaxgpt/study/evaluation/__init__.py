# SPDX-License-Identifier: Apache-2.0
"""How good a model is: texts by perplexity and bits per byte, tasks by accuracy.

Left out: few-shot prompts, and tasks that are answered by free text (lm-evaluation-harness has
them; `harness.py` is the way there).
"""

from jaxgpt.study.evaluation.likelihood import Likelihoods, loglikelihoods
from jaxgpt.study.evaluation.pairs import encode_pair
from jaxgpt.study.evaluation.questions import Answer, Question, answer
from jaxgpt.study.evaluation.sets import TASKS
from jaxgpt.study.evaluation.statistics import Estimate
from jaxgpt.study.evaluation.tasks import Result, run_task, score_data
from jaxgpt.study.evaluation.texts import TextScore, evaluate_text

__all__ = [
    "TASKS",
    "Answer",
    "Estimate",
    "Likelihoods",
    "Question",
    "Result",
    "TextScore",
    "answer",
    "encode_pair",
    "evaluate_text",
    "loglikelihoods",
    "run_task",
    "score_data",
]
