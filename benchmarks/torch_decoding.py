# SPDX-License-Identifier: Apache-2.0
"""A peer of `decoding.py`: nanoGPT's generate, or transformers' with its cache.

Runs in an environment with torch; nothing of jaxgpt is imported.
"""

import sys
import time

import torch
from serve import serve


def timed(device, call):
    began = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def nanogpt(settings, device):
    """Without a cache: each token is a forward pass over all before it."""
    sys.path.insert(0, settings["checkout"])
    from model import GPT, GPTConfig

    names = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
    model = GPT(GPTConfig(**{name: settings[name] for name in names}, dropout=0.0, bias=True))
    model.eval().to(device=device, dtype=getattr(torch, settings["dtype"]))

    def prefill(rows, tokens):
        ids = torch.randint(settings["vocab_size"], (rows, tokens), device=device)
        return {"seconds": timed(device, lambda: model.generate(ids, 1))}

    def decode(rows, lengths):
        """Seconds of one new token behind each of these lengths."""
        return {"seconds": [prefill(rows, tokens)["seconds"] for tokens in lengths]}

    return {"prefill": prefill, "decode": decode}


def transformers(settings, device):
    """A folder, or random weights of a Llama's shape."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    dtype = getattr(torch, settings["dtype"])
    if "folder" in settings:
        model = AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=dtype)
    else:
        torch.set_default_dtype(dtype)
        model = LlamaForCausalLM(LlamaConfig(**settings["llama"]))
    model = model.eval().to(device)
    same = {"do_sample": False, "pad_token_id": 0}

    def generate(rows, tokens, new):
        ids = torch.randint(settings["vocab_size"], (rows, tokens), device=device)
        mask = torch.ones_like(ids)
        limits = {"max_new_tokens": new, "min_new_tokens": new}
        with torch.inference_mode():
            return timed(device, lambda: model.generate(ids, attention_mask=mask, **limits, **same))

    def prefill(rows, tokens):
        return {"seconds": generate(rows, tokens, 1)}

    def decode(rows, tokens, new):
        """Seconds a step, the prompt's own time taken off."""
        first = generate(rows, tokens, 1)
        return {"seconds": (generate(rows, tokens, new) - first) / (new - 1)}

    return {"prefill": prefill, "decode": decode}


def start(settings):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.no_grad():
        functions = (nanogpt if "checkout" in settings else transformers)(settings, device)
    facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": device}
    return facts, functions


if __name__ == "__main__":
    serve(start)
