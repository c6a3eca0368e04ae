# SPDX-License-Identifier: Apache-2.0
import dataclasses

import jax
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import PostNorm
from jaxgpt.config import from_yaml, to_yaml
from jaxgpt.flops import count_params
from jaxgpt.model import param_shapes
from jaxgpt.presets import MODELS, RUNS


@pytest.mark.parametrize(
    "name, total",
    [
        # GPT-2: the sizes of the public checkpoints, 12 D^2 + 13 D a block, the rest is
        # (V + T) D + 2 D.
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        # By hand: 37000 * 512 + 6 * (4 * 512^2 + 2 * 512 * 2048 + 2048 + 512 + 2 * 2 * 512).
        ("transformer-2017", 37_846_016),
        # 2 * 32000 * 768 + 12 * (2 * 768^2 + 2 * 768 * 256 + 3 * 768 * 2048 + 2 * 768) + 768.
        ("modern", 124_668_672),
    ],
)
def test_the_exact_number_of_parameters(name, total):
    assert sum(count_params(MODELS[name]()).values()) == total


def test_gpt2_shapes():
    shapes = param_shapes(MODELS["gpt2"]())
    assert shapes["position"]["embedding"].shape == (1024, 768)
    assert shapes["block_11"]["ffn"]["up"]["kernel"].shape == (768, 3072)
    heads = {name: MODELS[name]().attention.n_heads for name in MODELS if name.startswith("gpt2")}
    assert heads == {"gpt2": 12, "gpt2-medium": 16, "gpt2-large": 20, "gpt2-xl": 25}


def test_transformer_2017_is_that_of_the_paper():
    cfg = MODELS["transformer-2017"]()
    assert (cfg.n_layers, cfg.d_model, cfg.ffn.d_ff, cfg.attention.n_heads) == (6, 512, 2048, 8)
    assert (cfg.block, cfg.dropout, cfg.embed.scale) == (PostNorm(), 0.1, True)
    leaves = jax.tree_util.tree_leaves_with_path(param_shapes(cfg))
    assert not any("final_norm" in jax.tree_util.keystr(path) for path, _ in leaves)
    rate = RUNS["transformer-2017"]().optim
    assert rate.lr == pytest.approx(512**-0.5 * 4000**-0.5, rel=0.01) and rate.warmup_steps == 4000


@pytest.mark.parametrize("name", RUNS)
def test_recipes_survive_yaml_and_take_the_tokenizer_s_vocabulary(name):
    run = RUNS[name]()
    assert from_yaml(to_yaml(run)) == run
    assert run.model.vocab_size is None
    assert RUNS[name].__doc__.partition("\n")[0].endswith("."), "shown in --help"


def test_tiny_needs_no_text_and_the_others_name_one():
    paths = {name: recipe().data.path for name, recipe in RUNS.items()}
    assert paths.pop("tiny") is None and None not in paths.values()


def test_shakespeare_keeps_its_budget():
    run = RUNS["shakespeare"]()
    model, train = run.model, run.train
    assert (model.n_layers, model.d_model, model.context_length, train.batch_size) == (
        4,
        128,
        64,
        24,
    )
    assert isinstance(model.attention, GQA) and not model.attention.use_bias
    shapes = param_shapes(dataclasses.replace(model, vocab_size=65))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) < 1_000_000
