# SPDX-License-Identifier: Apache-2.0
"""Help of the train command, read from the dataclasses: their fields, defaults and comments.

The comment behind a field is its documentation, in the source and here.
"""

import ast
import dataclasses
import functools
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any

from jaxgpt.boxes.base import Box
from jaxgpt.config import RunConfig
from jaxgpt.configlib import describe, hints_of, kind_of, our_boxes, short_name

WIDTH = 100
COMMON = (
    "data.path",
    "data.tokenizer",
    "model.n_layers",
    "model.d_model",
    "model.context_length",
    "model.attention",
    "model.attention.n_heads",
    "model.norm",
    "model.ffn",
    "optim.method",
    "optim.lr",
    "optim.warmup_steps",
    "optim.weight_decay",
    "train.steps",
    "train.batch_size",
    "train.accumulate",
    "train.dtype",
    "train.eval_every",
    "train.save_every",
    "train.seed",
    "mesh.fsdp",
    "show.prompt",
)
"""The names that the short help shows."""

USAGE = """\
usage: python train.py [--preset NAME] [--config FILE] [--init-from MODEL] [--name=value ...]

Trains a model. The same command, run again after an interruption, goes on where it stopped.
"""


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The comment behind each field of a dataclass, inherited fields included; "" where none is."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(base)) if base is not object else ""
        except (OSError, TypeError):  # no source: made in a notebook or by exec
            continue
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
        body = ast.parse(source).body
        for node in body[0].body if body and isinstance(body[0], ast.ClassDef) else ():
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                docs[node.target.id] = comments.get(node.end_lineno or node.lineno, "")
    return {name: docs.get(name, "") for name in hints_of(cls)}


def short_help(run: RunConfig, name: str, presets: Mapping[str, Any]) -> str:
    """What people use most, on one screen.

    Args:
      run: Where the shown values come from.
      name: What they are called.
      presets: Functions by name; the first line of each docstring is shown.
    """
    lines = [USAGE, "  --preset NAME   what all values start from; tiny unless a --config is given"]
    lines += [f"      {preset:17} {summary(made)}" for preset, made in presets.items()]
    lines += [
        "  --config FILE   YAML with some of the values, over the preset; may be repeated",
        "  --init-from MODEL  begin with a public model's weights and tokenizer: a Hugging Face",
        "                  folder, OWNER/NAME of its hub, or a short name such as gpt2",
        "  --run NAME      folder below runs/, or a path with a slash; default: the preset's name",
        "  --device KIND   cpu, gpu or tpu; the best there is by default",
        "  --distributed   join the processes of a launcher (docs/clusters.md): on, off or auto",
        "  --print_config  print all values as YAML, for --config, and stop",
        "  --help-all      every name with its type, value and meaning",
    ]
    values = dict(_rows(run))
    lines += ["", f"The values of {name} (null is None):"]
    for dotted in COMMON:
        if dotted in values:  # a box of another class has other fields
            value, kind, doc = values[dotted]
            lines.append(_line(f"  --{dotted}={value}", _choices(kind) or doc, 34))
    return "\n".join(lines) + "\n"


def long_help(run: RunConfig, name: str, presets: Mapping[str, Any]) -> str:
    """Everything: all values with types and meanings, and all boxes with their fields.

    Args:
      run: Where the shown values come from.
      name: What they are called.
      presets: As for `short_help`.
    """
    head = short_help(run, name, presets).split("\nThe values of ")[0]
    lines = [head, f"All values of {name} (null is None):"]
    for dotted, (value, kind, doc) in _rows(run):
        lines.append(_line(f"  --{dotted}={value}", f"[{kind}] {doc}", 42))
    lines += ["", "Boxes, by class or by import path: --model.norm=RMSNorm --model.norm.eps=1e-6"]
    for kind in Box.__subclasses__():
        lines += ["", f"  {kind.__name__}: {summary(kind)}"]
        for cls in our_boxes().values():
            if issubclass(cls, kind):
                lines.append(_line(f"    {cls.__name__}", summary(cls), 22))
                lines += [_line(f"      {left}", doc, 42) for left, doc in _fields(cls)]
    lines += [
        "",
        "Mixed stacks: --model.edits='[{every: 2, start: 1, set: {attention.window: 128}}]'",
        "Many runs in one step (docs/lanes.md): --seeds=8, or --lanes.optim.lr=1e-3,2e-3,4e-3",
        "Say when a run leaves the reference curve of its preset, and draw it there: --compare",
        "A trace of what the devices do in steps 10 to 15, into the run's folder: --profile=10:15",
    ]
    return "\n".join(lines) + "\n"


def summary(thing: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def _rows(value: Any, key: str = "") -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Dotted name -> value, type and meaning, of every field; a box's own fields come after it."""
    docs = field_docs(type(value))
    for name, hint in hints_of(type(value)).items():
        item, dotted = getattr(value, name), f"{key}.{name}" if key else name
        if isinstance(item, Box):
            yield dotted, (short_name(type(item)), _kind(hint), docs[name] or summary(type(item)))
            yield from _rows(item, dotted)
        elif dataclasses.is_dataclass(item):
            yield from _rows(item, dotted)
        else:
            yield dotted, (_shown(item), _kind(hint), docs[name])


def _fields(cls: type[Box]) -> Iterator[tuple[str, str]]:
    docs = field_docs(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        default = "" if field.default is dataclasses.MISSING else f"={_shown(field.default)}"
        kind = _kind(hints_of(cls)[field.name])
        yield f"{field.name}{default}", f"[{kind}] {docs[field.name]}".rstrip()


def _kind(hint: Any) -> str:
    box = kind_of(hint)
    if box is None:
        return describe(hint) if "LayerEdit" not in str(hint) else "list of edits"
    return box.__name__ + (" or null" if box is not hint else "")


def _shown(value: Any) -> str:
    if isinstance(value, Box):
        return short_name(type(value))
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple) and all(isinstance(item, str) for item in value):
        return f"[{', '.join(value)}]"
    return str(value)


def _choices(kind: str) -> str:
    """Our boxes of a kind; "" where the kind is none."""
    names = [n for n, c in our_boxes().items() if kind in [base.__name__ for base in c.__mro__]]
    return f"{', '.join(sorted(names))}, or your own" if names else ""


def _line(left: str, right: str, column: int) -> str:
    """Two columns; the right one is wrapped."""
    left = f"{left:{column - 1}} "
    return (left + f"\n{' ' * column}".join(textwrap.wrap(right, WIDTH - column))).rstrip()
