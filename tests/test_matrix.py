# SPDX-License-Identifier: Apache-2.0
"""The table of docs/reliability.md: each fault once, and tests that there are."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS = dict(A=32, B=13, C=13, D=14, E=8, F=13, G=6, H=11, I=10)
"""Faults of storage, resuming, health, text, sizes, sampling, hub, security, and processes."""


def table() -> dict[str, list[str]]:
    """Row -> its cells."""
    lines = (ROOT / "docs" / "reliability.md").read_text().splitlines()
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if re.match(r"\| [A-I]\d", line)]
    found = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows}
    assert len(found) == len(rows), "a row stands there twice"
    return found


@functools.cache
def defined(name: str) -> set[str]:
    """The test functions of a file."""
    tree = ast.parse((ROOT / "tests" / name).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_fault_has_its_row():
    assert list(table()) == [f"{group}{n + 1}" for group, size in ROWS.items() for n in range(size)]


def test_every_row_names_tests_that_there_are():
    for row, (fault, answer, tests) in table().items():
        assert fault and answer
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
        assert named and len(named) == tests.count("`") // 2, f"{row}: {tests}"
        for file, function in named:
            assert function in defined(file), f"{row}: {file}::{function}"


def test_rows_are_those_of_the_specification(shared):
    text = (shared / "reliability.md").read_text()
    assert list(table()) == re.findall(r"^\| ([A-I]\d+) \| [012] \|", text, re.MULTILINE)
