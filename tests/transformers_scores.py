# SPDX-License-Identifier: Apache-2.0
"""Scores of a model by transformers, row by row: a process of its own, and no jaxgpt in it.

    python tests/transformers_scores.py REQUEST.json OUT.json

REQUEST: `folder`, and any of `lambada` and `hellaswag` ([file, count]) and `text` ([file,
characters, context, stride]). OUT: for LAMBADA [log-likelihood, greedy] of each passage, for
HellaSwag [four log-likelihoods, decision, decision by length] of each question, for the text
[nats, tokens]. Nothing is padded, and nothing is batched. It needs torch and transformers alone.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


class Scorer:
    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def log_probs(self, ids):
        return self.model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def encode(self, text):
        return self.tokenizer(text)["input_ids"]

    def pair(self, context, continuation):
        """The log-likelihood of a continuation, and whether greedy decoding gives it."""
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        whole, n = self.encode(context + continuation), len(self.encode(context))
        rows = self.log_probs(whole[:-1])[n - 1 :]
        wanted = torch.tensor(whole[n:])
        found = rows.gather(1, wanted[:, None]).double().sum().item()
        return found, bool((rows.argmax(-1) == wanted).all())

    def lambada(self, file, count):
        for line in lines(file, count):
            words = json.loads(line)["text"].split(" ")
            yield self.pair(" ".join(words[:-1]), " " + words[-1])

    def hellaswag(self, file, count):
        for line in lines(file, count):
            row = json.loads(line)
            scores = [self.pair(row["query"], " " + choice)[0] for choice in row["choices"]]
            by_length = [s / len(c) for s, c in zip(scores, row["choices"], strict=True)]
            yield scores, scores.index(max(scores)), by_length.index(max(by_length))

    def text(self, file, chars, context, stride):
        """As the page "Perplexity of fixed-length models" of transformers, token by token."""
        with open(file, encoding="utf-8") as stream:
            ids = self.encode(stream.read()[:chars])
        nats, count, last = 0.0, 0, 0
        for begin in range(0, len(ids), stride):
            end = min(begin + context, len(ids))
            first = max(last, begin + 1)
            rows = self.log_probs(ids[begin:end])[first - begin - 1 : end - begin - 1]
            wanted = torch.tensor(ids[first:end])[:, None]
            nats -= rows.gather(1, wanted).double().sum().item()
            count, last = count + end - first, end
            if end == len(ids):
                break
        return [nats, count]


def lines(file, count):
    with open(file, encoding="utf-8") as stream:
        return stream.read().splitlines()[:count]


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    scorer = Scorer(request.pop("folder"))
    said = {name: list(getattr(scorer, name)(*words)) for name, words in request.items()}
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(said, file)
