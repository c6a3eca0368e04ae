# SPDX-License-Identifier: Apache-2.0
"""House rules that a reader would notice: short files, short functions, no switch over families."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "jaxgpt").rglob("*.py"))}
FILE_LINES, FUNCTION_LINES = 300, 60


def functions(tree):
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def code_lines(function):
    """Lines from `def` to the end, without the docstring."""
    first = function.body[0]
    total = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return total
    return total - ((first.end_lineno or 0) - first.lineno + 1)


def compared_families(tree):
    """Lines of comparisons of a family, or what a config calls it, with names of families."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            one, *others = (ast.unparse(side) for side in (node.left, *node.comparators))
            if re.search("family|model_type", one) and any("'" in other for other in others):
                yield node.lineno


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_short_and_so_are_its_functions(name):
    source = FILES[name].read_text()
    lines, tree = len(source.splitlines()), ast.parse(source)
    assert lines <= FILE_LINES, f"{name} has {lines} lines; it is usually two ideas"
    for function in functions(tree):
        n = code_lines(function)
        assert n <= FUNCTION_LINES, f"{name}:{function.lineno} {function.name} has {n} lines"


@pytest.mark.parametrize("name", FILES)
def test_no_code_asks_for_the_family_of_a_model(name):
    """What a model is stands in its boxes; a branch over families would be a second place."""
    found = list(compared_families(ast.parse(FILES[name].read_text())))
    assert not found, f"{name} compares a family in line {found}"


def test_the_rules_can_be_broken():
    long = "def f():\n    '''Doc.\n\n    More.\n    '''\n" + "    x = 1\n" * 61
    assert [code_lines(f) for f in functions(ast.parse(long))] == [62]
    for code in ("family == 'llama'", "cfg.family in ('a',)", "data['model_type'] != 'a'"):
        assert list(compared_families(ast.parse(f"if {code}: pass"))) == [1]
    for code in ("family in FAMILIES", "'model_type' in data"):
        assert not list(compared_families(ast.parse(f"if {code}: pass")))
