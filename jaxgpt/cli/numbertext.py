# SPDX-License-Identifier: Apache-2.0
"""What the params and flops commands print for people, from the records that `numbers.py` makes."""

from collections.abc import Mapping, Sequence
from typing import Any

PASSES = ("training", "prefill", "decode")
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
Record = Mapping[str, Any]
Unit = tuple[float, str]


def params_text(record: Record) -> str:
    """The kinds of layers where there are several, the rules, and last the bill: boxes and sum.

    Args:
      record: As `jaxgpt params --json` prints it.
    """
    total, active = record["total"], record["active"]
    lines = [_title(record), "", *_kinds(record["layers"]), *_rules(record["formulas"]), ""]
    for box, n in record["parameters"].items():
        lines.append(f"{box:18} {n:>15,} {n / total:>7.1%}")
    lines.append(f"{'total':18} {total:>15,}")
    if active < total:
        lines.append(f"{'used by one token':18} {active:>15,} {active / total:>7.1%}")
    return "\n".join(lines) + "\n"


def flops_text(record: Record) -> str:
    """A row for each box, three columns for each pass, the cache, and the rules.

    Args:
      record: As `jaxgpt flops --json` prints it.
    """
    rows, tokens = record["batch"], record["tokens"]
    said = (f"{rows:,} x {tokens:,} tokens",) * 2 + (f"{rows:,} behind {tokens - 1:,}",)
    heads = [f"{name}, {what}" for name, what in zip(PASSES, said, strict=True)]
    units = [
        (_unit(record[name]["total"]["flops"]), _unit(record[name]["total"]["bytes"]))
        for name in PASSES
    ]
    columns = (
        f"  {flops[1] + 'FLOP':>9} {size[1] + 'B':>9} {'FLOP/B':>8}" for flops, size in units
    )
    weights, caches = (record["decode"]["total"][f"{name}_bytes"] for name in ("weight", "cache"))
    return "\n".join(
        [
            f"{_title(record)}; {record['dtype']}, {record['weights']} weights",
            "",
            " " * 34 + "".join(f"  {head:>28}" for head in heads),
            f"{'box':18} {'parameters':>15}" + "".join(columns),
            *(_row(record, box, units) for box in _boxes(record)),
            _row(record, "total", units),
            "",
            "training over all keys, not only those that are seen: "
            + f"{_short(record['training']['flops_over_all_keys'])}FLOP",
            f"KV cache: {record['cache_bytes_per_token']:,.0f} bytes a token; decoding moves "
            + f"{_short(weights)}B of weights and {_short(caches)}B of caches",
            "",
            *_rules(record["formulas"]),
            "",
        ]
    )


def _title(record: Record) -> str:
    layers, width, vocabulary, context = (
        f"{record[name]:,}" for name in ("n_layers", "d_model", "vocab_size", "context_length")
    )
    sizes = f"{layers} layers of width {width}, {vocabulary} tokens, context {context}"
    return f"{record['model']}: {sizes}"


def _kinds(layers: Sequence[Record]) -> list[str]:
    lines = []
    for kind in layers:
        n, size, active = (kind[name] for name in ("n", "parameters", "active"))
        used = "" if active == size else f", {active:,} used by a token"
        lines.append(f"{n:>4} layers of {size:>13,}: {kind['boxes']}{used}")
    return [*lines, ""] if len(lines) > 1 else []


def _rules(rules: Sequence[Record]) -> list[str]:
    lines = [f"{'formula':27} {'of':25} {'says':>15} {'counted':>15} {'off':>9}"]
    for rule in rules:
        says, counted = (_number(rule[name]) for name in ("value", "exact"))
        names = f"{rule['formula']:27} {rule['of']:25}"
        lines.append(f"{names} {says:>15} {counted:>15} {rule['percent']:>+9.2f}%")
    return lines


def _number(value: float | int) -> str:
    """In full while it is short."""
    return f"{value:,.0f}" if value < 1e12 else f"{value:.4e}"


def _boxes(record: Record) -> list[str]:
    """Those with parameters and those without, in the order of a pass."""
    names = list(dict.fromkeys([*record["parameters"], *record["training"]["boxes"]]))
    last = ("final_norm", "head", "optimizer")
    return sorted(names, key=lambda box: last.index(box) + 1 if box in last else 0)


def _row(record: Record, box: str, units: Sequence[tuple[Unit, Unit]]) -> str:
    size = record["total"] if box == "total" else record["parameters"].get(box)
    line = f"{box:18} {'' if size is None else f'{size:,}':>15}"
    for name, (flops, bytes_) in zip(PASSES, units, strict=True):
        one = record[name]["total"] if box == "total" else record[name]["boxes"].get(box)
        if one is not None:
            line += f"  {one['flops'] / flops[0]:>9,.2f} {one['bytes'] / bytes_[0]:>9,.2f}"
            line += f" {one['flops_per_byte']:>8,.1f}"
    return line


def _unit(value: float) -> Unit:
    """The largest factor below a number, and its prefix."""
    return next((unit for unit in PREFIXES if value >= unit[0]), PREFIXES[-1])


def _short(value: float) -> str:
    factor, prefix = _unit(value)
    return f"{value / factor:.4g} {prefix}"
