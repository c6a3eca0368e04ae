# SPDX-License-Identifier: Apache-2.0
import dataclasses

import jax
import numpy as np
import pytest

from jaxgpt import cli
from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import PostNorm
from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.cli.help import summary
from jaxgpt.config import RunConfig, from_yaml, to_yaml
from jaxgpt.data.bpe import BPETokenizer, train_bpe
from jaxgpt.data.config import DataConfig
from jaxgpt.data.corpus import read_corpus
from jaxgpt.data.tokenizer import load_tokenizer, train_tokenizer
from jaxgpt.data.tokens import prepare_tokens
from jaxgpt.flops import count_active_params, count_params
from jaxgpt.model import param_shapes
from jaxgpt.presets import MODELS, RUNS
from jaxgpt.testing import jit_init
from jaxgpt.train.files import read_metrics
from jaxgpt.train.optim import learning_rate
from jaxgpt.train.optimizers import AdamW
from jaxgpt.train.runfolder import RunFolder

GPT3 = {  # n_layers, d_model, n_heads: table 2.1, mended in two places (see the presets)
    "gpt3-125m": (12, 768, 12),
    "gpt3-350m": (24, 1024, 16),
    "gpt3-760m": (24, 1536, 16),
    "gpt3-1.3b": (24, 2048, 16),
    "gpt3-2.7b": (32, 2560, 32),
    "gpt3-6.7b": (32, 4096, 32),
    "gpt3-13b": (40, 5120, 40),
    "gpt3-175b": (96, 12_288, 96),
}


def _gpt3_total(n_layers, d_model, _):
    """Kernels, biases and norms of the blocks; tables of tokens and positions; the last norm."""
    block = 12 * d_model**2 + 13 * d_model
    return n_layers * block + (50_257 + 2048) * d_model + 2 * d_model


TOTALS = {
    # By hand: 37000 * 512 + 6 * (4 * 512^2 + 2 * 512 * 2048 + 2048 + 512 + 2 * 2 * 512).
    "transformer-2017": 37_846_016,
    # 2 * 32000 * 768 + 12 * (2 * 768^2 + 2 * 768 * 256 + 3 * 768 * 2048 + 2 * 768) + 768.
    "modern": 124_668_672,
    # (154 + 96) * 128 + 3 * (12 * 128^2 + 13 * 128) + 256 + 154 * 129.
    "wikitext2-char": 646_938,
    # From here on the numbers of the public checkpoints, but for GPT-3, which has none.
    "gpt": 116_534_784,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    **{name: _gpt3_total(*sizes) for name, sizes in GPT3.items()},
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "smollm2-135m": 134_515_008,
    "smollm3-3b": 3_075_098_624,
    "qwen2-0.5b": 494_032_768,
    "qwen2-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352 + 58 * 256,  # with the balance biases of 58 layers
    "gemma-2b": 2_506_172_416,
    "gemma2-2b": 2_614_341_888,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "olmo2-7b": 7_298_617_344,
    "gpt-oss-20b": 20_914_757_184,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_exact_number_of_parameters(name):
    assert sum(count_params(MODELS[name]()).values()) == TOTALS[name]
    assert f" {TOTALS[name]:,} parameters" in summary(MODELS[name])


def test_gpt3_has_the_size_that_the_paper_s_skeleton_predicts():
    """N = V D + L (12 D^2 + 2 D) + D, without biases and positions: within 1% from 350M on."""
    skeleton = {name: 50_257 * D + L * (12 * D * D + 2 * D) + D for name, (L, D, _) in GPT3.items()}
    assert skeleton["gpt3-175b"] == 174_566_105_088 and TOTALS["gpt3-175b"] == 174_604_259_328
    far = {name for name in GPT3 if abs(TOTALS[name] / skeleton[name] - 1) > 0.01}
    assert far == {"gpt3-125m"}
    for name, (n_layers, d_model, n_heads) in GPT3.items():
        cfg = MODELS[name]()
        shape = (cfg.n_layers, cfg.d_model, cfg.attention.n_heads)
        assert shape == (n_layers, d_model, n_heads) and cfg.context_length == 2048
        windows = [layer.attention.window for layer in cfg.layers]
        assert windows == [None, 256] * (n_layers // 2)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 12.9),
        ("qwen3-30b-a3b", 3.35),  # "3.3B"
        ("deepseek-v2-lite", 2.66),  # "2.4B", without the embedding
        ("deepseek-v2", 21.4),  # "21B"
        ("deepseek-v3", 37.6),  # "37B"
        ("gpt-oss-20b", 4.19),  # "3.6B", without the embedding
    ],
)
def test_parameters_of_one_token(name, billions):
    assert count_active_params(MODELS[name]()) / 1e9 == pytest.approx(billions, rel=0.004)


def test_which_layers_differ_from_the_others():
    def per_layer(name, of):
        return [of(layer) for layer in MODELS[name]().layers]

    def window(layer):
        return layer.attention.window

    def theta(layer):
        return getattr(layer.position, "theta", None)

    def is_dense(layer):
        return isinstance(layer.ffn, GatedMLP)

    assert per_layer("gemma2-2b", window) == [4096, None] * 13
    assert per_layer("gpt-oss-20b", window) == [128, None] * 12
    assert per_layer("gemma3-1b", window) == ([512] * 5 + [None]) * 4 + [512] * 2
    assert per_layer("gemma3-1b", theta) == ([1e4] * 5 + [1e6]) * 4 + [1e4] * 2
    assert per_layer("gemma3-270m", theta) == ([1e4] * 5 + [1e6]) * 3
    assert per_layer("smollm3-3b", theta) == ([5e6] * 3 + [None]) * 9
    assert per_layer("deepseek-v2-lite", is_dense) == [True] + [False] * 26
    assert per_layer("deepseek-v3", is_dense) == [True] * 3 + [False] * 58


@pytest.mark.parametrize("name", ["gpt3-125m", "llama3.2-1b", "deepseek-v3", "gemma3-1b"])
def test_architectures_survive_yaml(name):
    run = RunConfig(model=MODELS[name]())
    assert from_yaml(to_yaml(run)) == run


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
    assert rate.schedule == "inverse-sqrt" and rate.method == AdamW(beta2=0.98, eps=1e-9)
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
    assert optim.method == AdamW(beta1=0.9, beta2=0.999, eps=1e-8)
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


def test_gpt2_124m_is_nanogpt_s_recipe():
    run = RUNS["gpt2-124m"]()
    assert run.model == dataclasses.replace(MODELS["gpt2"](), vocab_size=None)
    assert run.train.batch_size * run.model.context_length == 491_520
    assert run.train.batch_size // run.train.accumulate == 12 and run.train.dtype == "bfloat16"
    rate, horizon = learning_rate(run.optim, run.train.steps), 600_000
    assert run.train.steps == horizon
    want = {1: 6e-4 / 2000, 2000: 6e-4, 301_000: 3.3e-4, horizon: 6e-5, 2 * horizon: 6e-5}
    assert {n: float(rate(n)) for n in want} == pytest.approx(want, rel=1e-3)
    assert (run.optim.weight_decay, run.optim.decay, run.optim.clip) == (0.1, "matrices", 1.0)
    assert (run.optim.method.beta1, run.optim.method.beta2) == (0.9, 0.95)


def test_gpt2_124m_at_a_small_scale(tmp_path, monkeypatch):
    """From nanoGPT's two files through the command to a model that has learned something."""
    monkeypatch.chdir(tmp_path)
    text = "the cat sat on the mat and the dog sat on the log. " * 60
    tokenizer = BPETokenizer(train_bpe((text,), 280))
    tokenizer.save(tmp_path / "bpe.json")
    (tmp_path / "openwebtext").mkdir()
    ids = np.array([*tokenizer.encode(text), tokenizer.eot_id], "<u2")
    for name, part in (("train.bin", ids[:-100]), ("val.bin", ids[-100:])):
        part.tofile(tmp_path / "openwebtext" / name)
    words = [
        "--preset=gpt2-124m",
        "--data.tokenizer=bpe.json",
        "--model.n_layers=1",
        "--model.d_model=24",
        "--model.attention.n_heads=2",
        "--model.context_length=16",
        "--train.steps=20",
        "--train.batch_size=4",
        "--train.accumulate=2",
        "--train.eval_every=10",
        "--train.save_every=20",
        "--train.log_every=1",
        "--optim.warmup_steps=2",
        "--optim.lr=0.03",
        "--show.sample_tokens=0",
        "--show.pictures=false",
    ]
    assert cli.train_main(words) == 0
    folder = RunFolder(tmp_path / "runs" / "gpt2-124m")
    records = read_metrics(folder.metrics_path)
    losses = [record["loss_nats"] for record in records if "loss_nats" in record]
    assert len(losses) == 20 and losses[0] == pytest.approx(np.log(280), abs=0.5)
    last = records[-1]
    assert last["tokens"] == 20 * 4 * 16 and last["val_nats_per_token"] < losses[0] - 1
    assert last["val_bits_per_byte"] < 8 and not folder.tokens_path.exists()
    assert load_tokenizer(folder.tokenizer_path).fingerprint == tokenizer.fingerprint
