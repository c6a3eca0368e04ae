# SPDX-License-Identifier: Apache-2.0
"""The examples run, and a box of one's own passes what ours pass."""

import dataclasses
import math
import runpy
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt import GPT, GQA, LayerEdit, Sampling, Visibility, generate
from jaxgpt.errors import ConfigError
from jaxgpt.testing import check_box, jit_forward, jit_init, tiny

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


@pytest.mark.slow
def test_research(capsys):
    runpy.run_path(str(EXAMPLES / "research.py"))
    out = capsys.readouterr().out
    assert "continues with [3, 4, 0, 1, 2, 3, 4]" in out  # it has learned to count
    source = (EXAMPLES / "research.py").read_text().split("# --- forty lines")[0]
    code = source[source.index("# A model") :]
    assert len([line for line in code.splitlines() if line.strip()]) < 40


def test_my_attention_passes_the_contract_suite():
    check_box(runpy.run_path(str(EXAMPLES / "my_attention.py"))["MeanPool"](scale=0.5))


@pytest.mark.slow
def test_my_attention_from_the_command_line(tmp_path):
    """Trained and sampled by import path; nothing in jaxgpt knows of it."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox\n" * 40)
    run = tmp_path / "run"
    sizes = "--model.d_model=16 --model.n_layers=1 --model.context_length=8 --train.steps=3"
    train = f"--preset tiny --run {run} --data.path={text} --optim.warmup_steps=1 {sizes}"
    box = "--model.attention=my_attention.MeanPool --model.attention.scale=0.5"
    for command in (f"train.py {train} {box}", f"sample.py --run {run} --max-new-tokens 5"):
        script, *words = command.split()
        done = subprocess.run(
            [sys.executable, str(ROOT / script), *words],
            cwd=EXAMPLES,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    assert "my_attention.MeanPool" in (run / "config.yaml").read_text()


# --- the skeleton survives a mixer without attention ----------------------------------------------


@pytest.fixture(scope="module")
def ssm():
    return types.SimpleNamespace(**runpy.run_path(str(EXAMPLES / "ssm.py")))


@pytest.mark.parametrize("mixed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_state_space_mixer_passes_the_contract_suite(ssm, mixed):
    edits = (LayerEdit(every=2, start=1, attention=GQA(n_heads=4)),) if mixed else ()
    check_box(ssm.LRU(n_states=8), edits=edits)


def test_a_state_space_mixer_is_its_recurrence(ssm):
    cfg = tiny(attention=ssm.LRU(n_states=8))
    module = cfg.attention.build(cfg.dims())
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 7, 16)), jnp.float32)
    (y, _), variables = module.init_with_output(jax.random.key(0), x, Visibility.full(1, 7))
    p = jax.tree.map(lambda leaf: np.asarray(leaf, float), variables["params"])
    a = np.exp(-np.exp(p["decay"]) + 1j * p["angle"])
    assert (0 < abs(a)).all() and (abs(a) < 0.99).all()
    state, B, C = np.zeros(8, complex), p["in"]["kernel"], p["out"]["kernel"]
    for t in range(7):
        u = np.asarray(x[0, t], float) @ B
        state = a * state + np.sqrt(1 - abs(a) ** 2) * (u[:8] + 1j * u[8:])
        want = (state * (C[:8] - 1j * C[8:]).T).sum(1).real  # Re(C h), C's imaginary part negated
        np.testing.assert_allclose(y[0, t], want, atol=1e-5)


def test_a_state_space_mixer_writes_with_a_cache_of_one_size(ssm):
    cfg = tiny(attention=ssm.LRU(n_states=8))
    for length in (16, 4096):
        leaves = jax.tree.leaves(jax.eval_shape(lambda n=length: cfg.init_caches(2, n)))
        assert [leaf.shape for leaf in leaves] == [(2, 8)] * cfg.n_layers
    params, prompts = jit_init(cfg, jax.random.key(0)), [[3, 1], [4, 1, 5, 9, 2]]
    greedy = Sampling(temperature=0.0)
    out = generate(cfg, params, prompts, max_new_tokens=6, sampling=greedy)
    for prompt, new in zip(prompts, out.ids, strict=True):
        logits = jit_forward(cfg, params, jnp.array([prompt + new])).logits_BTV[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == new


def test_a_state_space_mixer_refuses_to_look_ahead(ssm):
    cfg, tokens = tiny(attention=ssm.LRU()), jnp.zeros((1, 3), jnp.int32)
    with pytest.raises(NotImplementedError, match="does not look ahead"):
        jax.eval_shape(lambda: GPT(cfg).init(jax.random.key(0), tokens, prefix_B=jnp.array([2])))
    with pytest.raises(ConfigError, match=r"slowest=1\.0 must be between 0 and 1"):
        ssm.LRU(slowest=1.0)


def test_a_mixed_stack_is_trained_on_the_text_inside_python(ssm):
    small = dataclasses.replace(ssm.MODELS["mixed"], d_model=16, context_length=16)
    assert 0 < ssm.train(small, steps=3) < math.log(256)


@pytest.mark.slow
def test_the_comparison_of_mixers(ssm, capsys):
    ssm.main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert "after 200 steps" in head and [row.split()[0] for row in rows] == list(ssm.MODELS)
    assert all(float(row.split()[1]) < 2.4 for row in rows)  # three mixers that learn
    caches = [[int(n.replace(",", "")) for n in row.split()[2:]] for row in rows]
    assert caches == [[1032, 66_048], [517, 33_025], [1, 1]]  # KiB of 1,024 and 65,536 tokens


def test_the_state_space_mixer_is_short():
    box = (EXAMPLES / "ssm.py").read_text().split("# --- the box ends here")[0]
    code = box[box.index("@dataclasses.dataclass") :]
    assert len([line for line in code.splitlines() if line.strip()]) < 80


@pytest.mark.parametrize("name", ["research.py", "my_attention.py", "ssm.py"])
def test_readme_names_the_example(name):
    assert f"examples/{name}" in (ROOT / "README.md").read_text()
