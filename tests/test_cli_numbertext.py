# SPDX-License-Identifier: Apache-2.0
"""Text of records, columns that align; `test_cli_numbers.py` has real records."""

from jaxgpt.cli.numbertext import PASSES, flops_text, params_text

RULE = {"formula": "12 L d^2", "of": "the layers", "value": 90, "exact": 100, "percent": -10.0}
RECORD = {"model": "m", "n_layers": 2, "d_model": 8, "vocab_size": 1000, "context_length": 4}


def layers(*sizes):
    return [{"boxes": f"box {n}", "n": 1, "parameters": n, "active": active} for n, active in sizes]


def record(total, active, *kinds):
    boxes = {"embed": 8000, "ffn": total - 8000}
    counted = {"parameters": boxes, "total": total, "active": active, "layers": layers(*kinds)}
    return RECORD | counted | {"formulas": [RULE]}


def test_the_bill_comes_last():
    lines = params_text(record(10_000, 10_000, (1000, 1000))).splitlines()
    assert lines[0] == "m: 2 layers of width 8, 1,000 tokens, context 4"
    assert lines[2].split() == ["formula", "of", "says", "counted", "off"]
    assert lines[3].split() == ["12", "L", "d^2", "the", "layers", "90", "100", "-10.00%"]
    assert len(lines[2]) + 1 == len(lines[3])  # the sign of percent
    assert lines[5:] == [
        "embed                        8,000   80.0%",
        "ffn                          2,000   20.0%",
        "total                       10,000",
    ]


def test_several_kinds_of_layers_and_parts_that_a_token_does_not_use():
    lines = params_text(record(10_000, 9000, (1500, 500), (500, 500))).splitlines()
    assert lines[2:5] == [
        "   1 layers of         1,500: box 1500, 500 used by a token",
        "   1 layers of           500: box 500",
        "",
    ]
    assert lines[-1] == "used by one token            9,000   90.0%"


def test_units_follow_the_sum_of_a_pass():
    def cost(scale):
        numbers = {"flops": 2e12 * scale, "bytes": 5e8 * scale, "flops_per_byte": 4000.0}
        return numbers | {"weight_bytes": 3e8 * scale, "cache_bytes": 2e3 * scale}

    made = record(10_000, 10_000, (1000, 1000))
    made |= {"batch": 1, "tokens": 4, "dtype": "bfloat16", "weights": "int8"}
    made |= {name: {"boxes": {"ffn": cost(1)}, "total": cost(1)} for name in PASSES}
    made["training"] = {"boxes": {"ffn": cost(1e3)}, "total": cost(1e3)}
    made["training"] |= {"flops_over_all_keys": 3e15}
    made["cache_bytes_per_token"] = 512.0
    lines = flops_text(made).splitlines()
    units = "PFLOP GB FLOP/B TFLOP MB FLOP/B TFLOP MB FLOP/B"
    assert lines[3].split() == ["box", "parameters", *units.split()]
    ffn, total = lines[5], lines[6]
    assert ffn.split() == ["ffn", "2,000", *["2.00", "500.00", "4,000.0"] * 3]
    assert total.split()[2:] == ffn.split()[2:] and len(total) == len(ffn) == len(lines[3])
    assert "3 PFLOP" in lines[8] and "512 bytes a token; decoding moves 300 MB of" in lines[9]
    assert lines[9].endswith("weights and 2 kB of caches")
