# SPDX-License-Identifier: Apache-2.0
"""Imports go one way, and importing does nothing."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "jaxgpt").rglob("*.py"))

ORDER = [  # a file imports from its own row and from those above it
    ["errors", "shapes", "taps", "masks", "cache", "placing", "products", "kernels"],
    ["boxes.base", "boxes.weights"],
    ["boxes.init", "boxes.dense"],
    ["boxes"],
    ["layers", "readout", "stack"],
    ["model"],
    ["flops", "costs", "losses"],
    ["data"],
    ["train"],
    ["sample"],
    ["interop"],
    ["study"],
    ["testing"],
    ["configlib"],
    ["config"],
    ["presets"],
    ["cli"],
]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def row(name):
    """The row of the longest entry that covers a module."""
    short = name.removeprefix("jaxgpt").removeprefix(".")
    found = [
        (len(entry), i)
        for i, entries in enumerate(ORDER)
        for entry in entries
        if short == entry or short.startswith(entry + ".")
    ]
    return max(found)[1] if found else None


def imports(tree, everywhere):
    """Modules of jaxgpt that are imported; with `everywhere`, inside functions too."""
    pending, found = [tree], set()
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.FunctionDef) and not everywhere:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the order"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            inner = {name for name in names if name in MODULES}
            found |= inner or {node.module or ""}
        pending += ast.iter_child_nodes(node)
    return {name for name in found if name.split(".")[0] == "jaxgpt"}


@pytest.mark.parametrize("name", [name for name in MODULES if name != "jaxgpt"])
def test_imports_go_one_way(name):
    mine = row(name)
    assert mine is not None, f"{name} has no row in ORDER"
    for other in imports(ast.parse(MODULES[name].read_text()), everywhere=True) - {"jaxgpt"}:
        theirs = row(other)
        assert theirs is not None and theirs <= mine, f"{name} imports {other}, which is below it"
        ours, suite = (n.startswith("jaxgpt.testing") for n in (name, other))
        assert ours or not suite, f"{name} imports the test suite"


def test_no_imports_run_in_circles():
    graph = {
        name: imports(ast.parse(path.read_text()), everywhere=False) - {name, "jaxgpt"}
        for name, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def test_importing_has_no_side_effects(tmp_path):  # I7
    code = """
import pkgutil, signal, threading
before = {s: signal.getsignal(s) for s in signal.valid_signals()}
import jax
config = dict(jax.config.values)
import jaxgpt
for module in pkgutil.walk_packages(jaxgpt.__path__, "jaxgpt."):
    if not module.name.endswith("__main__"):
        __import__(module.name)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a device was initialised"
after = {s: signal.getsignal(s) for s in signal.valid_signals()}
assert before == after, "a signal handler was installed"
changed = {k: v for k, v in jax.config.values.items() if k in config and config[k] != v}
assert not changed, f"jax.config was changed: {changed}"
assert threading.active_count() == 1, threading.enumerate()
"""
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", code],
        env={"PATH": "", "PYTHONPATH": str(ROOT), **home},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
