# SPDX-License-Identifier: Apache-2.0
import copy
import dataclasses
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import PostNorm
from jaxgpt.boxes.embed import Embed
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.init import Normal
from jaxgpt.boxes.norm import NoNorm, RMSNorm
from jaxgpt.boxes.position import NoPosition, Sinusoidal
from jaxgpt.boxes.rope import RoPE
from jaxgpt.errors import ConfigError
from jaxgpt.model import LayerEdit, ModelConfig, forward, init_params, param_shapes
from jaxgpt.testing import jit_forward, jit_init, tiny

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, 12)), jnp.int32)
LLAMA = tiny(
    vocab_multiple=1,
    attention=GQA(n_heads=4, n_kv_heads=2, use_bias=False),
    position=RoPE(),
    norm=RMSNorm(),
    final_norm=RMSNorm(),
    ffn=GatedMLP(d_ff=24),
    head=Untied(),
)
POST_NORM = tiny(
    block=PostNorm(), final_norm=NoNorm(), position=Sinusoidal(), embed=Embed(scale=True)
)
ALTERNATING = tiny(
    n_layers=5,
    edits=(
        LayerEdit(every=2, start=1, set={"attention.window": 3}),
        LayerEdit(start=4, ffn=GatedMLP(d_ff=20)),
    ),
)


@pytest.fixture(scope="module")
def params():
    return jit_init(tiny(), jax.random.key(0))


def logits(cfg, params, tokens=TOKENS, **call):
    return np.asarray(jit_forward(cfg, params, tokens, **call).logits_BTV)[..., : cfg.vocab_size]


def paths(tree):
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(k, simple=True, separator="/"): v for k, v in leaves}


def count(cfg):
    return sum(leaf.size for leaf in jax.tree.leaves(param_shapes(cfg)))


# --- values ---------------------------------------------------------------------------------------


def test_gpt2_equals_numpy(params):
    exact = jax.tree.map(lambda p: np.asarray(p, float), params)
    want = reference.gpt2(exact, np.asarray(TOKENS), 4)[..., :31]
    np.testing.assert_allclose(logits(tiny(), params), want, atol=1e-5 * np.abs(want).max())


def test_only_the_last_logits(params):
    np.testing.assert_allclose(
        logits(tiny(), params, last_only=True), logits(tiny(), params)[:, -1:], atol=1e-5
    )


def test_embeddings_in_place_of_tokens(params):
    x_BTD = params["embed"]["embedding"][TOKENS]
    assert np.array_equal(
        logits(tiny(), params, None, embeddings_BTD=x_BTD), logits(tiny(), params)
    )
    half = jit_forward(tiny(), params, embeddings_BTD=x_BTD, dtype=jnp.bfloat16)
    assert half.logits_BTV.dtype == jnp.bfloat16


def test_arguments_that_exclude_each_other_are_refused(params):
    x_BTD, pos, run = params["embed"]["embedding"][TOKENS], jnp.zeros_like(TOKENS), jit_forward
    with pytest.raises(ValueError, match="either tokens_BT or embeddings_BTD"):
        run(tiny(), params)
    with pytest.raises(ValueError, match="either tokens_BT or embeddings_BTD"):
        run(tiny(), params, TOKENS, embeddings_BTD=x_BTD)
    with pytest.raises(ValueError, match="need pos_BT"):
        run(tiny(), params, TOKENS, segment_BT=pos)
    with pytest.raises(ValueError, match="need pos_BT"):
        run(tiny(), params, TOKENS, caches=tiny().init_caches(2, 16))
    with pytest.raises(ValueError, match="one document a row"):
        call = dict(pos_BT=pos, segment_BT=pos, caches=tiny().init_caches(2, 16))
        run(tiny(), params, TOKENS, **call)
    with pytest.raises(ValueError, match="for training"):
        run(tiny(), params, TOKENS, pos_BT=pos, caches=tiny().init_caches(2, 16), scan=True)


def test_bfloat16_is_near_float32(params):
    want = logits(tiny(), params)
    got = logits(tiny(), params, dtype=jnp.bfloat16).astype(np.float32)
    assert 0 < np.abs(got - want).max() < 0.1 * np.abs(want).max()


def test_post_norm_ends_in_a_norm():
    shapes = param_shapes(POST_NORM)
    assert sorted(shapes) == ["block_0", "block_1", "embed"]  # no final norm, no positions
    params = jit_init(POST_NORM, jax.random.key(0))
    out = jit_forward(POST_NORM, params, TOKENS, capture=("block_1/out",)).captured["block_1/out"]
    np.testing.assert_allclose(out.mean(-1), 0, atol=1e-5)
    np.testing.assert_allclose(out.std(-1), 1, atol=1e-3)


# --- dropout --------------------------------------------------------------------------------------


def test_without_a_key_dropout_is_off(params):  # T09
    calm, half = tiny(dropout=0.0), tiny(dropout=0.5)
    assert np.array_equal(logits(calm, params), logits(half, params))
    assert np.array_equal(logits(half, params), logits(half, params))
    key = jax.random.key(1)
    assert np.array_equal(logits(calm, params, dropout_key=key), logits(calm, params))
    assert not np.allclose(logits(half, params, dropout_key=key), logits(half, params))


SITES = {"embedding": "block_0/in"} | {
    f"{branch} of layer {i}": f"block_{i}/{site}"
    for i in range(2)
    for branch, site in (("attention", "mid"), ("ffn", "out"))
}


@pytest.fixture(scope="module")
def masks():
    """The mask of every residual site at two steps: each branch and the embedding give ones."""
    cfg = tiny(dropout=0.5, d_model=64, position=NoPosition(), vocab_multiple=1)
    params = jax.tree.map(jnp.zeros_like, jit_init(cfg, jax.random.key(0)))
    params["embed"]["embedding"] += 1
    for i in range(2):
        params[f"block_{i}"]["attention"]["out"]["bias"] += 1
        params[f"block_{i}"]["ffn"]["down"]["bias"] += 1
    found = []
    for step in range(2):
        key = jax.random.fold_in(jax.random.key(0), step)
        call = dict(dropout_key=key, capture=tuple(SITES.values()))
        stream = list(jit_forward(cfg, params, TOKENS, **call).captured.values())
        found += [stream[0], *(b - a for a, b in itertools.pairwise(stream))]
    return np.stack(found)


def test_masks_keep_half_and_double_it(masks):  # T09
    assert set(np.unique(masks)) == {0.0, 2.0} and len(masks) == 10
    assert np.abs((masks > 0).mean((1, 2, 3)) - 0.5).max() < 0.04
    assert abs((masks > 0).mean() - 0.5) < 0.02


def test_masks_differ_between_layers_sites_and_steps(masks):  # T09
    kept = (masks > 0).reshape(10, -1)
    agree = (kept[:, None] == kept[None]).mean(-1)
    assert np.abs(agree[~np.eye(10, dtype=bool)] - 0.5).max() < 0.06


def test_attention_masks_differ_between_layers(params):  # T09
    """Probabilities are dropped too, by a mask of their own in each layer."""
    cfg, ones = tiny(dropout=0.5), jnp.ones((2, 12, 4, 4))
    capture = tuple(f"block_{i}/attention/heads" for i in range(2))
    patch = {f"block_{i}/attention/values": ones for i in range(2)}
    patch |= {f"block_{i}/attention/scores": 0.0 for i in range(2)}
    call = dict(capture=capture, patch=patch)
    a, b = forward(cfg, params, TOKENS, **call, dropout_key=jax.random.key(0)).captured.values()
    kept = [np.asarray(y[..., 0] * jnp.arange(1, 13)[None, :, None] / 2) for y in (a, b)]
    for n in kept:  # the number of keys kept of 1, 2, ... 12, each counted twice
        np.testing.assert_allclose(n, np.round(n), atol=1e-4)
    assert not np.allclose(kept[0], kept[1])
    calm = forward(cfg, params, TOKENS, **call).captured.values()
    assert all(np.allclose(y, 1, atol=1e-5) for y in calm)


@pytest.mark.parametrize("training", [False, True])
def test_attention_maps_are_probabilities_of_the_past(params, training):  # T09
    key = jax.random.key(0) if training else None
    call = dict(capture=("block_*/attention/probs",), dropout_key=key)
    maps = jit_forward(tiny(dropout=0.5), params, TOKENS, **call).captured
    assert len(maps) == 2
    for probs in maps.values():
        np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)
        assert not np.triu(probs, 1).any() and probs[..., -1, :].max() > 0.5  # not uniform


# --- shapes and counts ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_parameter_paths_are_public(name):
    cfg = {"gpt2": tiny(), "llama": LLAMA}[name]
    golden = Path(__file__).parent / "golden" / f"params_{name}.json"
    found = {path: list(leaf.shape) for path, leaf in paths(param_shapes(cfg)).items()}
    assert found == json.loads(golden.read_text())
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(param_shapes(cfg)))


def test_padding_of_the_vocabulary_is_rows_of_the_table():
    padded, exact = (ModelConfig(n_layers=1, vocab_multiple=n) for n in (128, 1))
    assert padded.dims().padded_vocab_size == 50_304
    assert count(padded) - count(exact) == (50_304 - 50_257) * padded.d_model


def test_shapes_do_not_depend_on_the_length_or_batch(params):
    assert jit_forward(tiny(), params, TOKENS[:1, :5]).logits_BTV.shape == (1, 5, 128)
    assert tiny(vocab_size=None).dims().vocab_size == 1


def test_parameters_need_a_vocabulary():
    with pytest.raises(ConfigError, match="vocab_size is None"):
        init_params(tiny(vocab_size=None), jax.random.key(0))


# --- layer edits ----------------------------------------------------------------------------------


def test_edits_change_the_layers_they_name():
    windows = [layer.attention.window for layer in ALTERNATING.layers]
    assert windows == [None, 3, None, 3, None]
    assert [type(layer.ffn) for layer in ALTERNATING.layers] == [MLP] * 4 + [GatedMLP]
    shapes = param_shapes(ALTERNATING)
    assert "gate" in shapes["block_4"]["ffn"] and "gate" not in shapes["block_3"]["ffn"]
    some = tiny(n_layers=6, edits=(LayerEdit(every=2, start=1, stop=4, norm=RMSNorm()),))
    assert [layer.norm == RMSNorm() for layer in some.layers] == [0, 1, 0, 1, 0, 0]


def test_each_layer_has_the_window_of_its_edit():  # N07: probe each layer separately
    cfg = tiny(n_layers=3, edits=(LayerEdit(every=2, start=1, set={"attention.window": 3}),))
    params = jit_init(cfg, jax.random.key(0))
    maps = jit_forward(cfg, params, TOKENS, capture=("*/probs",)).captured
    for i, window in enumerate((99, 3, 99)):
        distance = np.subtract.outer(np.arange(12), np.arange(12))
        seen = (distance >= 0) & (distance < window)
        assert np.array_equal(maps[f"block_{i}/attention/probs"].max((0, 1)) > 0, seen)


def test_later_edits_see_earlier_ones():
    edits = (
        LayerEdit(ffn=GatedMLP(d_ff=8)),
        LayerEdit(start=1, set={"ffn.d_ff": 12, "ffn.use_bias": True}),
    )
    layers = tiny(edits=edits).layers
    assert [layer.ffn for layer in layers] == [GatedMLP(d_ff=8), GatedMLP(d_ff=12, use_bias=True)]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("attention.windw", 3, r"'attention\.windw'; fix: one of \['attention\.n_heads'"),
        ("atention.window", 3, r"'atention\.window'; fix: one of \['block', 'norm', 'attention'"),
        ("attention", 3, r"layer edit sets 'attention'"),
        ("attention.window", 0, r"window=0 must be positive \(layer edit sets 'attention\.window'"),
        ("attention.n_heads", 3, r"d_model=16 is not divisible by n_heads=3 \(layer 1\)"),
        ("attention.head_dim", 3, r"head_dim=3 is 3 channels.*\(layer 1\)"),
    ],
)
def test_a_wrong_edit_names_its_path_or_layer(path, value, message):
    with pytest.raises(ConfigError, match=message):
        tiny(position=RoPE(), edits=(LayerEdit(start=1, set={path: value}),))


def test_a_replaced_box_is_checked_in_its_layer():
    with pytest.raises(ConfigError, match=r"n_heads=5 \(layer 1\)"):
        tiny(edits=(LayerEdit(start=1, attention=GQA(n_heads=5)),))


def test_configs_are_values():
    twin = copy.deepcopy(ALTERNATING)
    assert twin == ALTERNATING and hash(twin) == hash(ALTERNATING)
    assert twin != dataclasses.replace(twin, n_layers=6)
    a, b = (LayerEdit(set=dict(items)) for items in ([("a.b", 1), ("c.d", 2)],) * 2)
    c = LayerEdit(set={"c.d": 2, "a.b": 1})
    assert a == b == c and hash(a) == hash(b) == hash(c)
    with pytest.raises(dataclasses.FrozenInstanceError):
        twin.n_layers = 3


def test_an_edit_that_reaches_no_layer_is_an_error():
    with pytest.raises(ConfigError, match="a layer edit starts at 12 of 12 layers"):
        ModelConfig(edits=(LayerEdit(start=12, set={"attention.window": 4}),))


@pytest.mark.parametrize(
    ("field", "box", "name", "message"),
    [
        ("attention", GQA(4), "qk_norm_of", r"qk_norm_of='other' is not known \(layer 0\)"),
        ("ffn", MLP(), "activation", r"activation='other' .* one of \['gelu_tanh'"),
        ("init", Normal(), "residual", "residual='other' is not known"),
    ],
)
def test_words_are_checked(field, box, name, message):
    object.__setattr__(box, name, "other")  # the hook of the tests would refuse it sooner
    with pytest.raises(ConfigError, match=message):
        tiny(**{field: box})
