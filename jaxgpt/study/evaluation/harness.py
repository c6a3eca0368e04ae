# SPDX-License-Identifier: Apache-2.0
"""A model for lm-evaluation-harness: its tasks, few-shot prompts and generation, by our forward.

    import lm_eval
    from jaxgpt.interop import load
    from jaxgpt.study.evaluation.harness import harness_model

    lm = harness_model(*load("gpt2"))
    lm_eval.simple_evaluate(model=lm, tasks=["lambada_openai", "hellaswag"])

It needs the extra: `pip install "jaxgpt[lm-eval]"`. Requests are encoded as the harness does it for
models of transformers (`pairs.py`); a rolling log-likelihood is of windows without overlap but for
one token of context, and the last of them is moved back to be a full one, as there.

Left out: the harness's command line (its models must be known to it by name), and chat templates.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jaxgpt.data.base import Tokenizer, begin_ids, end_ids
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.generate import generate
from jaxgpt.sample.text import start_ids
from jaxgpt.shapes import Params
from jaxgpt.study.evaluation.likelihood import Pair, loglikelihoods
from jaxgpt.study.evaluation.pairs import encode, encode_pair

MAX_NEW_TOKENS = 256  # where a task names no number
MOST_PROMPTS = 16  # that are continued side by side


def harness_model(
    cfg: ModelConfig,
    params: Params,
    tokenizer: Tokenizer | None,
    *,
    batch_size: int | None = None,
    dtype: DTypeLike | None = None,
) -> Any:
    """An `lm_eval.api.model.LM` of a model.

    Args:
      cfg: The model.
      params: Its parameters.
      tokenizer: The tokenizer that it was trained with.
      batch_size: As for `loglikelihoods`, and of prompts that are continued side by side.
      dtype: Of the computation; None: that of the embedding.

    Raises:
      ConfigError: lm-evaluation-harness is not installed, or there is no tokenizer.
    """
    if tokenizer is None:
        raise ConfigError("the harness needs a tokenizer", fix="a folder with a tokenizer.json")
    try:
        from lm_eval.api.model import LM  # type: ignore[import-not-found]
    except ImportError as error:
        what = f"lm-evaluation-harness cannot be imported: {error}"
        raise ConfigError(what, fix='pip install "jaxgpt[lm-eval]"') from error

    class HarnessModel(Answers, LM):
        """See `harness_model`."""

        def __init__(self) -> None:
            LM.__init__(self)
            Answers.__init__(self, cfg, params, tokenizer, batch_size, dtype)

    return HarnessModel()


class Answers:
    """The three kinds of requests of the harness; `args` of a request are what it asks.

    Args:
      cfg: The model.
      params: Its parameters.
      tokenizer: Its tokenizer.
      batch_size: Rows side by side, or None.
      dtype: Of the computation, or None.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params,
        tokenizer: Tokenizer,
        batch_size: int | None,
        dtype: DTypeLike | None,
    ):
        self._model, self._tokenizer = (cfg, params), tokenizer
        self._options: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype}

    @property
    def tokenizer_name(self) -> str:
        """What the harness names its caches by."""
        return f"jaxgpt-{self._tokenizer.fingerprint[:16]}"

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Of each (context, continuation): its log-likelihood, and whether it is the greedy one."""
        pairs = [encode_pair(self._tokenizer, *request.args) for request in requests]
        found = loglikelihoods(*self._model, pairs, **self._options)
        return [(float(x), bool(g)) for x, g in zip(found.log_probs, found.greedy, strict=True)]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Of each (text,): the log-likelihood of all of its tokens."""
        start, pairs, owners = start_ids(self._tokenizer), [], []
        for number, request in enumerate(requests):
            ids = encode(self._tokenizer, request.args[0])
            windows = [*rolling_pairs(start, ids, self._model[0].context_length)]
            pairs += windows
            owners += [number] * len(windows)
        found = loglikelihoods(*self._model, pairs, **self._options).log_probs
        totals = np.zeros(len(requests))
        np.add.at(totals, np.array(owners, np.int64), found)
        return totals.tolist()

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Of each (context, options): the text up to the first of the strings in `until`."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        texts, most = [""] * len(requests), self._options["batch_size"] or MOST_PROMPTS
        for numbers in groups.values():
            numbers.sort(key=lambda i: len(requests[i].args[0]))
            for begin in range(0, len(numbers), most):
                some = numbers[begin : begin + most]
                prompts = [requests[i].args[0] for i in some]
                found = self._continued(prompts, dict(requests[some[0]].args[1]))
                for number, text in zip(some, found, strict=True):
                    texts[number] = text
        return texts

    def _continued(self, prompts: list[str], options: dict[str, Any]) -> list[str]:
        until = options.pop("until", None) or []
        stops = [until] if isinstance(until, str) else list(until)
        new, sampling = options.pop("max_gen_toks", MAX_NEW_TOKENS), _sampling(options)
        tokenizer, ends = self._tokenizer, end_ids(self._tokenizer)
        room = self._model[0].context_length - new
        if room < 1:
            raise ConfigError(
                f"max_gen_toks={new} leaves no room in {self._model[0].context_length} tokens",
                fix="a smaller max_gen_toks",
            )

        def text(ids: list[int]) -> str:
            return tokenizer.decode([i for i in ids if i not in ends])

        def ended(row: int, ids: list[int]) -> bool:
            return any(stop in text(ids) for stop in stops)

        begin = list(begin_ids(tokenizer))
        ids = [begin + encode(tokenizer, prompt) or start_ids(tokenizer) for prompt in prompts]
        found = generate(
            *self._model,
            [each[-room:] for each in ids],
            max_new_tokens=new,
            sampling=sampling,
            stop_ids=ends,
            until=ended if stops else None,
            dtype=self._options["dtype"],
        )
        return [_before(text(each), stops) for each in found.ids]


def rolling_pairs(start: Sequence[int], ids: list[int], context: int) -> Iterator[Pair]:
    """Windows of a text as the harness makes them: each id is scored once.

    Args:
      start: What stands before the text; not scored.
      ids: The text.
      context: The most ids that the model reads at once.

    Source: `get_rolling_token_windows` of lm-evaluation-harness 0.4, with `context_len=1`.
    """
    done = min(context, len(ids))
    if done:
        yield list(start), ids[:done]
    while done < len(ids):
        end = min(done + context, len(ids))
        yield ids[end - context - 1 : done], ids[done:end]
        done = end


def _before(text: str, stops: list[str]) -> str:
    return text[: min((i for s in stops if (i := text.find(s)) >= 0), default=len(text))]


def _sampling(options: dict[str, Any]) -> Sampling:
    """How the harness wants tokens to be drawn: greedily, if it does not say otherwise."""
    drawn = options.pop("do_sample", options.get("temperature", 0.0) > 0)
    known = {k: options.pop(k) for k in ("temperature", "top_k", "top_p", "min_p") if k in options}
    if options:
        raise ConfigError(
            f"generation options that we have not: {', '.join(sorted(options))}", fix="drop them"
        )
    return Sampling(**known) if drawn else Sampling(temperature=0.0)
