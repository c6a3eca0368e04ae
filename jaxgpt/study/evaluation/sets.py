# SPDX-License-Identifier: Apache-2.0
"""The data sets of the tasks: where they are, and how their rows become questions.

They are those of the GPT-2 paper's table of zero-shot results, and HellaSwag.

Left out: scoring (`tasks.py`).

Source: Radford et al. 2019, Language Models are Unsupervised Multitask Learners, table 3.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from jaxgpt.errors import ConfigError
from jaxgpt.study.evaluation import detokenise
from jaxgpt.study.evaluation.questions import Question, choice_metrics, last_word_metrics
from jaxgpt.study.evaluation.reading import HubSet, field
from jaxgpt.study.evaluation.statistics import Estimate

LAST_BYTES = 5_000_000  # of the 10^8 of enwik8 and text8: their test part
BLANK = "XXXXX"  # of the Children's Book Test, where a word is left out


@dataclasses.dataclass(frozen=True)
class TextTask:
    """A text, perhaps in words of its own, of which each token is scored.

    Attributes:
      title: For people.
      hub: Where the hub has it; None: a file is needed.
      metrics: The ones that are told.
      undo: The detokeniser.
      lines: Whether each line is a document.
      last: Bytes that are taken from the end of the whole set.
    """

    title: str
    hub: HubSet | None
    metrics: tuple[str, ...] = ("word_perplexity", "token_perplexity", "bits_per_byte")
    undo: Callable[[str], str] = str
    lines: bool = False
    last: int | None = None


@dataclasses.dataclass(frozen=True)
class QuestionTask:
    """Questions.

    Attributes:
      title: For people.
      hub: Where the hub has them.
      read: Makes a question of a row.
      metrics: Of questions and answers.
      unit: What there are several of.
      parse: Makes rows of a text file.
    """

    title: str
    hub: HubSet
    read: Callable[[str, dict[str, Any]], Question]
    metrics: Callable[..., dict[str, Estimate]] = choice_metrics
    unit: str = "questions"
    parse: Callable[[str], list[dict[str, Any]]] | None = None


def _last_word(where: str, row: dict[str, Any]) -> Question:
    """LAMBADA: the last word of a passage."""
    context, _, word = field(where, row, "text", str).rpartition(" ")
    if not context or not word:
        raise ConfigError(f"{where} has no last word", fix="passages of two words or more")
    return Question(context, (word,))


def _hellaswag(where: str, row: dict[str, Any]) -> Question:
    """HellaSwag: rows of the set itself, or ready ones (`query`, `choices`, `gold`)."""
    if "query" in row:
        query, choices = field(where, row, "query", str), field(where, row, "choices", list)
        gold = field(where, row, "gold", int)
    else:
        text = {key: field(where, row, key, str) for key in ("activity_label", "ctx_a", "ctx_b")}
        query = f"{text['activity_label']}: {text['ctx_a']} {text['ctx_b'].capitalize()}"
        query, choices = _wikihow(query), [_wikihow(e) for e in field(where, row, "endings", list)]
        gold = int(row["label"]) if str(row.get("label")).isdecimal() else -1
    if not 0 <= gold < len(choices):
        raise ConfigError(f"{where} does not say which choice is right", fix="another split")
    return Question(query, tuple(choices), gold)


def _wikihow(text: str) -> str:
    """Without the brackets of the part of HellaSwag that is from WikiHow."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _book(where: str, row: dict[str, Any]) -> Question:
    """The Children's Book Test: a word of the 21st sentence, and with it the rest of that one."""
    undo = detokenise.childrens_books
    sentences = field(where, row, "sentences", list)
    options = field(where, row, "options", list)
    before, blank, rest = undo(field(where, row, "question", str)).partition(BLANK)
    word = field(where, row, "answer", str)
    if not blank or word not in options:
        what = f"{where} has no {BLANK}, or not its answer among the options"
        raise ConfigError(what, fix="the files of the Children's Book Test as they are")
    text = " ".join([*map(undo, sentences), before])
    context = text.rstrip(" ")
    return Question(context, tuple(options), options.index(word), text[len(context) :], rest)


def _books(text: str) -> list[dict[str, Any]]:
    r"""Rows of the Children's Book Test's own files: numbered lines, then a blank one.

    The last line of a question is `21 QUESTION\tANSWER\t\tOPTION|OPTION|...`.
    """
    rows = []
    for block in re.split(r"\n\s*\n", text.strip()):
        *sentences, last = [line.partition(" ")[2] for line in block.split("\n")]
        question, _, rest = last.partition("\t")
        word, _, options = rest.partition("\t")
        made = {"sentences": sentences, "question": question, "answer": word}
        rows.append(made | {"options": options.strip("\t").split("|")})
    return rows


_WIKITEXT = "Salesforce/wikitext"
_PARQUET = "refs/convert/parquet"  # the hub's own copy of sets that are scripts
TASKS: dict[str, TextTask | QuestionTask] = {
    "lambada": QuestionTask(
        "LAMBADA, the last word of a passage",
        HubSet("EleutherAI/lambada_openai", "default", column=None),
        _last_word,
        last_word_metrics,
        "passages",
    ),
    "cbt-cn": QuestionTask(
        "Children's Book Test, common nouns",
        HubSet("cam-cst/cbt", "CN", "validation", None),
        _book,
        parse=_books,
    ),
    "cbt-ne": QuestionTask(
        "Children's Book Test, named entities",
        HubSet("cam-cst/cbt", "NE", "validation", None),
        _book,
        parse=_books,
    ),
    "wikitext2": TextTask(
        "WikiText-2", HubSet(_WIKITEXT, "wikitext-2-v1"), undo=detokenise.wikitext
    ),
    "ptb": TextTask(
        "Penn Treebank",
        HubSet("ptb-text-only/ptb_text_only", column="sentence", revision=_PARQUET),
        undo=detokenise.penn_treebank,
    ),
    "enwik8": TextTask("enwik8", None, ("bits_per_byte", "token_perplexity"), last=LAST_BYTES),
    "text8": TextTask("text8", None, ("bits_per_char", "token_perplexity"), last=LAST_BYTES),
    "wikitext103": TextTask(
        "WikiText-103", HubSet(_WIKITEXT, "wikitext-103-v1"), undo=detokenise.wikitext
    ),
    "1bw": TextTask(
        "One Billion Words",
        HubSet("billion-word-benchmark/lm1b", revision=_PARQUET),
        undo=detokenise.one_billion_words,
        lines=True,
    ),
    "hellaswag": QuestionTask(
        "HellaSwag, the ending of a story",
        HubSet("Rowan/hellaswag", split="validation", column=None),
        _hellaswag,
    ),
}
