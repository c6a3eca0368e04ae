# SPDX-License-Identifier: Apache-2.0
import dataclasses

import jax
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import PostNorm
from jaxgpt.config import from_yaml, to_yaml
from jaxgpt.data.config import DataConfig
from jaxgpt.data.corpus import read_corpus
from jaxgpt.data.tokenizer import train_tokenizer
from jaxgpt.data.tokens import prepare_tokens
from jaxgpt.flops import count_params
from jaxgpt.model import param_shapes
from jaxgpt.presets import MODELS, RUNS
from jaxgpt.testing import jit_init
from jaxgpt.train.optim import learning_rate


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
        # (154 + 96) * 128 + 3 * (12 * 128^2 + 13 * 128) + 256 + 154 * 129.
        ("wikitext2-char", 646_938),
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


def test_wikitext2_char_is_the_note_s_experiment(tmp_path):
    run = RUNS["wikitext2-char"]()
    assert run.data == DataConfig(path="wikitext-2", max_chars=300_000)
    small = dataclasses.replace(run.model, vocab_size=103)  # characters of the validation file
    assert sum(count_params(small).values()) == 633_831
    assert (run.model.context_length, run.train.batch_size, run.train.steps) == (96, 32, 400)
    optim, rate = run.optim, learning_rate(run.optim, 400)
    assert [float(rate(n)) for n in (1, 400)] == pytest.approx([2e-4] * 2)
    # What torch.optim.AdamW(parameters, lr=2e-4, weight_decay=1e-2) has besides.
    assert (optim.decay, optim.weight_decay, optim.clip) == ("all", 0.01, None)
    assert (optim.beta1, optim.beta2, optim.eps) == (0.9, 0.999, 1e-8)
    # int(0.9 * 300000) characters train, the rest validates.
    text = tmp_path / "text.txt"
    text.write_text("abcdefghij\n" * 30_000)
    corpus = read_corpus(text, max_chars=run.data.max_chars)
    tokenizer = train_tokenizer(run.data.tokenizer, corpus, 0)
    tokens = prepare_tokens(corpus, tokenizer, tmp_path / "t", val_fraction=run.data.val_fraction)
    assert (len(tokens.train), len(tokens.val)) == (270_000, 30_000)


def test_wikitext2_char_begins_as_pytorch_does():
    """Linear: U(-a, a), a = 1/sqrt(inputs), biases too; Embedding: N(0, 1); LayerNorm: 1 and 0."""
    cfg = MODELS["wikitext2-char"]()
    drawn = {}
    for key, p in jax.tree.leaves_with_path(jit_init(cfg, jax.random.key(0))):
        *path, name = (k.key for k in key)
        drawn["/".join(path), name] = np.asarray(p)
    assert len(drawn) == 2 + 3 * (2 * 2 + 4 * 2 + 2 * 2) + 2 + 2
    for (path, name), p in drawn.items():
        if path.endswith("_norm"):
            assert (p == (name == "scale")).all(), path
            continue
        if path in ("embed", "head/out"):  # padding of the vocabulary is zero
            true, padding = (p[:154], p[154:]) if path == "embed" else (p[..., :154], p[..., 154:])
            assert not padding.any()
            p = true
        slack = 5 / p.size**0.5  # five standard errors, or more
        if name == "embedding":
            assert abs(p.mean()) < slack and abs(p.std() - 1) < slack and abs(p).max() > 3, path
            continue
        a = drawn[path, "kernel"].shape[0] ** -0.5
        assert a * (1 - 10 / p.size) < abs(p).max() < a * (1 + 1e-6), (path, name)
        assert abs(p.mean()) < slack * a and abs(p.std() / a - 3**-0.5) < slack, (path, name)


def test_shakespeare_keeps_its_budget():
    run = RUNS["shakespeare"]()
    model, train = run.model, run.train
    assert (model.context_length, train.batch_size) == (64, 24)
    assert isinstance(model.attention, GQA) and not model.attention.use_bias
    shapes = param_shapes(dataclasses.replace(model, vocab_size=65))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) <= 900_000
