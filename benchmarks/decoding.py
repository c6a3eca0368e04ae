# SPDX-License-Identifier: Apache-2.0
r"""How fast are prompts read and tokens made, beside peers, and how much is left?

    python benchmarks/decoding.py --shape gpt2-124m --nanogpt CHECKOUT --nanogpt-python PYTHON
    python benchmarks/decoding.py --model SMOLLM2_FOLDER --transformers-python PYTHON \
        --weights float32 bfloat16 int8 int4

Prefill: until each prompt has its first new token. Decode: from there, seconds a step, greedy. The
limit of decoding is the time to read the weights and the keys and values that are there, at the
measured rate. nanoGPT keeps no cache: its time for all new tokens is the sum over lengths of one
pass each, measured at `--lengths` of them and joined by straight lines.
"""

import dataclasses
import itertools

from harness import Competitor, Peer, Report, compete, in_turns, limits_of, parser, ready_device

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.costs import decode_costs, prefill_costs, total
from jaxgpt.flops import count_params
from jaxgpt.interop import load
from jaxgpt.model import ModelConfig
from jaxgpt.presets.models import MODELS
from jaxgpt.presets.models.llama import llama
from jaxgpt.sample.weights import for_decoding
from jaxgpt.study.bench import Decoding, bytes_per_number, random_params


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model with random weights, and what it is asked for.

    Attributes:
      model: The model.
      dtypes: Of its weights where none are asked for.
      prompt: Tokens before the new ones.
      new: New tokens.
      prefill: Tokens of the prompts that are only read.
      batch_sizes: Rows where none are asked for.
    """

    model: ModelConfig
    dtypes: tuple[str, ...]
    prompt: int
    new: int
    prefill: int
    batch_sizes: tuple[int, ...] = (1,)


SHAPES = {
    "tiny": Shape(
        ModelConfig(vocab_size=17, context_length=32, d_model=16, n_layers=1, attention=GQA(2)),
        *(("float32", "int8"), 3, 6, 8),
    ),
    "gpt2-124m": Shape(MODELS["gpt2"](), ("float32",), 24, 1000, 512),
    "llama-1.2b": Shape(
        llama(
            *(16, 2048, 32, 8192),
            n_kv_heads=8,
            vocab_size=128_256,
            context_length=2048,
            theta=500_000.0,
            tied=True,
            head_dim=64,
        ),
        *(("bfloat16",), 128, 896, 2048, (1, 8, 32)),
    ),
}


def shape_of(options):
    """The shape and its parameters."""
    if options.model is None:
        shape = SHAPES[options.shape]
        return shape, random_params(shape.model)
    found = load(options.model)
    return Shape(found.config, ("float32",), 64, 64, 512), found.params


def weights_of(name):
    """Compute dtype and kind of weights: int8 and int4 are multiplied in float32 or bfloat16."""
    kind, _, dtype = name.partition("/")
    return (kind, None) if kind in ("float32", "bfloat16") else (dtype or "float32", kind)


def ours(options, shape, params, rows):
    """Competitors of both tables."""
    prefill, decode, cfg = [], [], shape.model
    for name in options.weights or shape.dtypes:
        dtype, kind = weights_of(name)
        ready = for_decoding(cfg, params, dtype=dtype, weights=kind)
        how = {"dtype": dtype, "weights": bytes_per_number(cfg, ready)}
        read = Decoding(cfg, ready, batch=rows, prompt_tokens=shape.prefill, dtype=dtype)
        text = Decoding(cfg, ready, batch=rows, prompt_tokens=shape.prompt, dtype=dtype)
        read.prefill()
        text.decode(shape.new)  # compiles for each length that the cache grows to
        cost = total(prefill_costs(cfg, rows, shape.prefill, **how))
        called, tokens = f"jaxgpt {name}", rows * shape.prefill
        turn = in_turns(lambda n, read=read: sum(read.prefill() for _ in range(n)) / n, 0.5)
        prefill.append(Competitor(called, turn, cost, tokens, ours=True, facts=dict(how)))
        cost = total(decode_costs(cfg, rows, shape.prompt + shape.new // 2, **how))
        decode.append(
            Competitor(
                *(called, lambda text=text: text.decode(shape.new)[1], cost, rows),
                ours=True,
                facts=dict(how),
            )
        )
    return prefill, decode


def peers(options, shape):
    """Name, interpreter and settings of each."""
    cfg = shape.model
    same = {"vocab_size": cfg.vocab_size}
    gated = isinstance(cfg.ffn, GatedMLP)  # as in Llama, and not in GPT-2
    if options.nanogpt and options.model is None and not gated:
        sizes = {
            "block_size": cfg.context_length,
            "n_embd": cfg.d_model,
            "n_head": cfg.attention.n_heads,
            "n_layer": cfg.n_layers,
        }
        settings = {**same, **sizes, "checkout": options.nanogpt, "dtype": options.peer_dtypes[0]}
        yield "nanoGPT", options.nanogpt_python, settings
    if options.transformers_python and (options.model or gated):
        which = {"folder": options.model} if options.model else {"llama": _llama(cfg)}
        for dtype in options.peer_dtypes:
            settings = {**same, **which, "dtype": dtype}
            yield f"transformers {dtype}", options.transformers_python, settings


def _llama(cfg):
    """The same shape as transformers spells it."""
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.ffn.d_ff,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.attention.n_heads,
        "num_key_value_heads": cfg.attention.kv_heads,
        "max_position_embeddings": cfg.context_length,
        "tie_word_embeddings": True,
    }


def summed(lengths, seconds):
    """Seconds a token, over all lengths from the first to the last, between them by lines."""
    pairs = zip(itertools.pairwise(lengths), itertools.pairwise(seconds), strict=True)
    area = sum((b - a) * (x + y) / 2 for (a, b), (x, y) in pairs)
    return area / (lengths[-1] - lengths[0])


def against(options, shape, rows, opened):
    """Competitors of both tables, each in a process that `opened` gets."""
    prefill, decode, cfg = [], [], shape.model
    for name, python, settings in peers(options, shape):
        peer = Peer(python, "torch_decoding.py", settings)
        opened.append(peer)
        how, facts = {"dtype": settings["dtype"]}, peer.facts

        def read(peer=peer):
            return peer.ask(what="prefill", rows=rows, tokens=shape.prefill)["seconds"]

        def text(peer=peer, name=name):
            same = {"what": "decode", "rows": rows}
            if name != "nanoGPT":
                return peer.ask(**same, tokens=shape.prompt, new=shape.new)["seconds"]
            last, n = shape.prompt + shape.new - 1, options.lengths
            lengths = [round(shape.prompt + i * (last - shape.prompt) / (n - 1)) for i in range(n)]
            return summed(lengths, peer.ask(**same, lengths=lengths)["seconds"])

        read()
        cost = total(prefill_costs(cfg, rows, shape.prefill, **how))
        prefill.append(Competitor(name, read, cost, rows * shape.prefill, facts=facts))
        keys, note = shape.prompt + shape.new // 2, {}
        if name == "nanoGPT":
            cost = total(prefill_costs(cfg, rows, keys, **how))
            note = {"note": f"no cache: {options.lengths} lengths measured, summed over all"}
        else:
            cost = total(decode_costs(cfg, rows, keys, **how))
        decode.append(Competitor(name, text, cost, rows, facts={**facts, **note}))
    return prefill, decode


def tables(options, shape, params, rows, report):
    opened = []
    try:
        both = ours(options, shape, params, rows), against(options, shape, rows, opened)
        prefill, decode = (mine + theirs for mine, theirs in zip(*both, strict=True))
        dtype = (options.weights or shape.dtypes)[0]
        limits = limits_of(options, weights_of(dtype)[0])
        n_params = sum(count_params(shape.model).values())
        name = f"{options.model or options.shape}: {n_params:,} parameters, batch {rows}"
        for what, competitors in (
            (f"prefill of {shape.prefill} tokens", prefill),
            (f"decode of {shape.new} tokens behind {shape.prompt}", decode),
        ):
            if what.split()[0] in options.what:
                report.add(compete(f"{name}, {what}", competitors, limits, options.rounds))
    finally:
        for peer in opened:
            peer.close()


def main(argv=None):
    made = parser(__doc__)
    made.add_argument("--shape", choices=SHAPES, default="gpt2-124m")
    made.add_argument("--model", help="a Hugging Face folder instead")
    made.add_argument(
        "--weights", nargs="+", help="float32, bfloat16, int8, int4, int8/bfloat16 ..."
    )
    made.add_argument("--what", nargs="+", default=["prefill", "decode"])
    made.add_argument("--batch-size", type=int, nargs="+", help="rows, tables for each")
    made.add_argument("--prompt-tokens", type=int)
    made.add_argument("--new-tokens", type=int)
    made.add_argument("--prefill-tokens", type=int)
    made.add_argument("--nanogpt", help="a checkout of nanoGPT")
    made.add_argument("--nanogpt-python", help="an interpreter with torch")
    made.add_argument("--lengths", type=int, default=9, help="at which nanoGPT is measured")
    made.add_argument("--transformers-python", help="an interpreter with transformers")
    made.add_argument("--peer-dtypes", nargs="+", default=["float32"])
    options = made.parse_args(argv)
    ready_device()
    shape, params = shape_of(options)
    asked = {
        "prompt": options.prompt_tokens,
        "new": options.new_tokens,
        "prefill": options.prefill_tokens,
    }
    shape = dataclasses.replace(shape, **{k: v for k, v in asked.items() if v})
    report = Report("Prefill and decoding: tokens a second", options.out)
    for rows in options.batch_size or shape.batch_sizes:
        tables(options, shape, params, rows, report)


if __name__ == "__main__":
    main()
