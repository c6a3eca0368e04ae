# SPDX-License-Identifier: Apache-2.0
"""A peer of `training.py`: nanoGPT's own model and optimizer, or the note's model, in PyTorch.

Runs in an environment with torch; nothing of jaxgpt is imported.
"""

import contextlib
import sys
import time

import torch
from serve import serve
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Fused causal attention in the place of the note's score matrix."""

    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads, self.qkv, self.proj = (
            n_heads,
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x_BTD):
        B, T, D = x_BTD.shape
        heads = (
            y.view(B, T, self.n_heads, -1).transpose(1, 2) for y in self.qkv(x_BTD).chunk(3, -1)
        )
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    """Pre-norm, GELU."""

    def __init__(self, width, n_heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, n_heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTD):
        x_BTD = x_BTD + self.attn(self.ln1(x_BTD))
        return x_BTD + self.mlp(self.ln2(x_BTD))


class NoteModel(nn.Module):
    """The character model of the note on decoder-only transformers."""

    def __init__(self, vocab, context, width, n_heads, n_layers):
        super().__init__()
        self.token, self.pos = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, n_heads) for _ in range(n_layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, ids_BT, targets_BT):
        x_BTD = self.token(ids_BT) + self.pos(torch.arange(ids_BT.shape[1], device=ids_BT.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.ln_f(x_BTD))
        return logits_BTV, functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def nanogpt(settings):
    """The model and AdamW of nanoGPT, as its train.py makes them."""
    sys.path.insert(0, settings["checkout"])
    from model import GPT, GPTConfig

    names = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
    model = GPT(GPTConfig(**{name: settings[name] for name in names}, dropout=0.0, bias=False))
    model.to(settings["device"])
    return model, model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), settings["device"])


def note(settings):
    """The note's model with the fused AdamW."""
    names = ("vocab_size", "block_size", "n_embd", "n_head", "n_layer")
    model = NoteModel(*(settings[name] for name in names)).to(settings["device"])
    return model, torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.01, fused=True)


def start(settings):
    torch.manual_seed(0)
    device = settings["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model, optimizer = (nanogpt if "checkout" in settings else note)(settings)
    n_params = sum(p.numel() for p in model.parameters())
    if settings["compile"]:
        model = torch.compile(model)
    narrow = settings["dtype"] == "bfloat16"
    if narrow and device == "cuda":
        context = torch.amp.autocast(device_type=device, dtype=torch.bfloat16)
    else:
        context = contextlib.nullcontext()
    shape = (4, settings["batch_size"], settings["block_size"] + 1)
    ids = torch.randint(settings["vocab_size"], shape)
    ids = ids.pin_memory() if device == "cuda" else ids

    def steps(n):
        began = time.perf_counter()
        for i in range(n):
            rows = ids[i % 4].to(device, non_blocking=True)
            with context:
                _, loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        last = loss.item()  # waits
        if device == "cuda":
            torch.cuda.synchronize()
        return {"seconds": (time.perf_counter() - began) / n, "loss": last}

    first_s = steps(1)["seconds"]
    facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": device}
    return {**facts, "n_params": n_params, "first_s": first_s}, {"steps": steps}


if __name__ == "__main__":
    serve(start)
