# SPDX-License-Identifier: Apache-2.0
"""The contract suite: put a box into a tiny model and assert what `boxes/base.py` promises of it.

    from jaxgpt.testing import check_box

    def test_my_attention():
        check_box(MyAttention(scale=0.5))
        check_box(MyAttention(scale=0.5), position=RoPE())  # with other boxes around it

All of our boxes pass it. A broken promise is an AssertionError that says which one and where. Left
out: whether the box computes what its paper says; that takes a reference to compare with.
"""

import copy
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxgpt.boxes import base
from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.init import Normal
from jaxgpt.masks import Visibility
from jaxgpt.model import ModelConfig, forward, init_params
from jaxgpt.shapes import Params

LENGTH = 12  # tokens of a row, in the checks
PADDING = 2  # of them, in front of a padded row

# Compiles in a third of the time; what is compiled is too small for optimisation to matter.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

jit_init = quick_jit(init_params, static_argnames="cfg")
STATIC = ("cfg", "capture", "dtype", "remat", "scan", "last_only")
jit_forward = quick_jit(forward, static_argnames=STATIC)


def tiny(**boxes: Any) -> ModelConfig:
    """A model small enough to compile in a moment, drawn so widely that attention is not uniform.

    Args:
      **boxes: Fields of ModelConfig to replace.
    """
    small: dict[str, Any] = dict(
        vocab_size=31,
        context_length=16,
        d_model=16,
        n_layers=2,
        dropout=0.25,
        attention=GQA(n_heads=4),
        init=Normal(std=0.5, embedding_std=0.5),
    )
    return ModelConfig(**(small | boxes))


def check_box(box: base.Box, **boxes: Any) -> None:
    """Check every contract for a box of any kind.

    Args:
      box: The box; put into each field of `tiny` that takes its kind.
      **boxes: Other fields of the model around it.

    Raises:
      AssertionError: A contract is broken.
      TypeError: `box` is of no kind of `jaxgpt.boxes.base`.
    """
    kinds = {f.name: f.type for f in dataclasses.fields(ModelConfig) if isinstance(f.type, type)}
    fields = [name for name, kind in kinds.items() if isinstance(box, kind)]
    if not fields:
        raise TypeError(f"{type(box).__name__} subclasses no kind of box of jaxgpt.boxes.base")
    check_value(box)
    check_model(tiny(**(dict.fromkeys(fields, box) | boxes)))


def check_model(cfg: ModelConfig) -> None:
    """Check every contract for the boxes of a model: context 12, vocabulary 30 or more."""
    check_value(cfg)
    check_types(cfg)
    params = jit_init(cfg, jax.random.key(0))
    for check in (check_causality, check_rows, check_padding, check_packing, check_cache):
        check(cfg, params)
    check_training(cfg, params)


def check_value(box: Any) -> None:
    """A config is a value: frozen, hashable, equal to its copies."""
    name, twin = type(box).__name__, copy.deepcopy(box)
    assert dataclasses.is_dataclass(box), f"{name} is not a dataclass"
    assert twin == box, f"{name} differs from its own copy"
    try:
        assert hash(twin) == hash(box), f"{name} hashes differently from an equal copy"
    except TypeError as error:
        raise AssertionError(f"{name} is not hashable: {error}") from None
    try:
        twin.changed = 1
    except dataclasses.FrozenInstanceError:
        return
    raise AssertionError(f"{name} is not frozen: write @dataclasses.dataclass(frozen=True)")


def check_types(cfg: ModelConfig) -> None:
    """Shape and dtype follow the input, parameters are float32; nothing is computed."""
    layer, (B, T, D) = cfg.layers[0], (2, 3, cfg.d_model)
    dims, visibility, key = cfg.dims(layer), Visibility.full(B, T), jax.random.key(0)
    params = jax.eval_shape(functools.partial(init_params, cfg), key)

    def check(name: str, y: Any, shape: tuple[int, ...], dtype: Any) -> None:
        assert y.shape == shape, f"{name} returns {y.shape}, not {shape}"
        assert y.dtype == dtype, f"{name} returns {y.dtype} for an input in {jnp.dtype(dtype)}"

    for dtype in (jnp.float32, jnp.bfloat16):
        x_BTD, q_BTNH = jnp.zeros((B, T, D), dtype), jnp.zeros((B, T, 4, D // 4), dtype)
        for name, module, *args in (
            ("norm", layer.norm.build()),
            ("final_norm", cfg.final_norm.build()),
            ("position", cfg.position.build(dims), visibility.q_pos_BT),
            ("attention", layer.attention.build(dims), visibility, None, None),
            ("ffn", layer.ffn.build(dims), visibility.valid_BT, None),
            ("block", layer.block.build(dims, layer), visibility, None, None),
        ):
            y, variables = jax.eval_shape(module.init_with_output, key, x_BTD, *args)
            check(name, y[0] if isinstance(y, tuple) else y, x_BTD.shape, dtype)
            for leaf in jax.tree.leaves(variables):
                assert leaf.dtype == jnp.float32, f"{name} has a parameter in {leaf.dtype}"
        rotated = jax.eval_shape(layer.position.rotate, q_BTNH, visibility.q_pos_BT)
        check("position.rotate", rotated, q_BTNH.shape, dtype)
        run = functools.partial(forward, cfg, dtype=dtype)
        logits = jax.eval_shape(run, params, jnp.zeros((B, T), jnp.int32)).logits_BTV
        check("logits", logits, (B, T, dims.padded_vocab_size), dtype)


def check_causality(cfg: ModelConfig, params: Params) -> None:
    """Logits before a changed token stay the same bit for bit; from it on they change."""
    tokens_BT, _ = _tokens()
    before = _logits(cfg, params, tokens_BT)
    for t in (1, LENGTH // 2, LENGTH - 1):
        changed_BT = np.where(np.arange(LENGTH) < t, tokens_BT, tokens_BT ^ 1)
        same_T = (before == _logits(cfg, params, changed_BT)).all((0, 2))
        assert same_T[:t].all(), f"position {np.argmin(same_T)} sees token {t}, its future"
        assert not same_T[t:].any(), f"tokens from {t} on have no influence on their own logits"


def check_rows(cfg: ModelConfig, params: Params) -> None:
    """A row of the batch does not see the others; ids past the vocabulary get -inf."""
    tokens_BT, _ = _tokens()
    before = _logits(cfg, params, tokens_BT)
    tokens_BT[1] = tokens_BT[1] ^ 1
    assert (_logits(cfg, params, tokens_BT)[0] == before[0]).all(), "row 0 of a batch sees row 1"
    filler = jit_forward(cfg, params, tokens_BT).logits_BTV[..., cfg.vocab_size :]
    assert (np.asarray(filler) == -np.inf).all(), "logits of ids past the vocabulary are not -inf"


def check_padding(cfg: ModelConfig, params: Params) -> None:
    """Padding on the left (position -1) changes nothing, and what stands there has no influence."""
    want = _logits(cfg, params, _tokens()[0])
    tokens_BT, pos_BT = _tokens(padded=True)
    got = _logits(cfg, params, tokens_BT, pos_BT=pos_BT)
    _assert_padded(got, want, "the full forward")
    changed_BT = np.where(pos_BT < 0, tokens_BT ^ 1, tokens_BT)
    again = _logits(cfg, params, changed_BT, pos_BT=pos_BT)
    assert (again == got)[pos_BT >= 0].all(), "tokens see what stands in padding"
    aux = [jit_forward(cfg, params, t, pos_BT=pos_BT).aux for t in (tokens_BT, changed_BT)]
    for path, one, other in _pairs(*aux):
        assert (one == other).all(), f"padding counts in aux{path}"


def check_packing(cfg: ModelConfig, params: Params) -> None:
    """Documents packed into one row give what each gives alone."""
    (tokens_BT, _), cut = _tokens(), LENGTH - 7
    alone = _logits(cfg, params, tokens_BT)
    packed_BT = np.concatenate([tokens_BT[:, :cut], tokens_BT[::-1, : LENGTH - cut]], 1)
    segment_BT = np.tile(np.arange(LENGTH) // cut, (2, 1)).clip(0, 1)
    pos_BT = np.arange(LENGTH)[None] - cut * segment_BT
    got = _logits(cfg, params, packed_BT, pos_BT=pos_BT, segment_BT=segment_BT)
    _assert_close(got[:, :cut], alone[:, :cut], 2e-5, "the first document of a packed row")
    _assert_close(got[:, cut:], alone[::-1, : LENGTH - cut], 2e-5, "the second document of a row")


def check_cache(cfg: ModelConfig, params: Params) -> None:
    """Decoding with caches equals the full forward; slots not yet written have no influence.

    A model whose attention has no cache passes. Slots are the arrays of shape (batch, length, ...).
    """
    length = LENGTH + 3
    try:
        empty = cfg.init_caches(2, length)
    except NotImplementedError:
        return
    tokens_BT, pos_BT = _tokens()
    want = got = _logits(cfg, params, tokens_BT)
    for chunks in ((1,), (3,), (2, 1)):
        got = _decode(cfg, params, tokens_BT, pos_BT, chunks, empty)
        _assert_close(got, want, 2e-5, f"decoding with caches, fed {chunks} tokens, then one each")

    def fill(a: Array, rubbish: float) -> Array:
        slots = a.shape[:2] == (2, length) and jnp.issubdtype(a.dtype, jnp.floating)
        return jnp.full_like(a, rubbish) if slots else a

    for rubbish in (np.nan, 1e4):
        filled = jax.tree.map(functools.partial(fill, rubbish=rubbish), empty)
        again = _decode(cfg, params, tokens_BT, pos_BT, (2, 1), filled)
        assert (again == got).all(), f"{rubbish} in slots not yet written changes the logits"
    got = _decode(cfg, params, *_tokens(padded=True), (3,), empty)
    _assert_padded(got, want, "decoding with caches")


def check_training(cfg: ModelConfig, params: Params) -> None:
    """Gradients are finite, beside padding too; remat, scan and unused dropout change nothing."""
    args, key = (cfg, *_tokens(padded=True)), jax.random.key(1)
    loss, grads = _jit_loss(params, *args, key)
    other, _ = _jit_loss(params, *args, jax.random.key(2))
    assert not cfg.dropout or loss != other, "two dropout keys give one loss"
    loss2, grads2 = _jit_loss(params, *args, key, remat=True, scan=True)
    _assert_close(loss2, loss, 1e-6, "the loss with remat and scan")
    top = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads))
    for path, got, want in _pairs(grads2, grads):
        assert np.isfinite(want).all(), f"the gradient of {path} is not finite"
        # An element is a sum over tokens; scanned or not, XLA adds them up in different orders.
        _assert_close(got / top, want / top, 5e-6, f"the gradient of {path} with remat and scan")
    without = _logits(dataclasses.replace(cfg, dropout=0.0), params, args[1])
    assert (_logits(cfg, params, args[1]) == without).all(), "dropout without a dropout_key"


def _loss(params, cfg, tokens_BT, pos_BT, dropout_key, remat=False, scan=False) -> Array:
    """Mean loss of the tokens that are not padding, and what the boxes add to it."""
    call: dict[str, Any] = dict(dropout_key=dropout_key, remat=remat, scan=scan)
    out = forward(cfg, params, tokens_BT, pos_BT=pos_BT, **call)
    logp_BTV = jax.nn.log_softmax(out.logits_BTV[:, :-1])
    logp_BT = jnp.take_along_axis(logp_BTV, tokens_BT[:, 1:, None], -1)[..., 0]
    extra = [v for aux in out.aux.values() for k, v in aux.items() if k.endswith("_loss")]
    return -jnp.mean(logp_BT, where=pos_BT[:, :-1] >= 0) + sum(extra)


_jit_loss = quick_jit(jax.value_and_grad(_loss), static_argnames=("cfg", "remat", "scan"))


def _tokens(padded: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Two rows of tokens below 30 and their positions, the first perhaps moved behind padding."""
    tokens_BT = np.random.default_rng(0).integers(0, 30, (2, LENGTH), np.int32)
    pos_BT = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
    if padded:
        tokens_BT[0], pos_BT[0] = np.roll(tokens_BT[0], PADDING), pos_BT[0] - PADDING
    return tokens_BT, pos_BT.clip(-1)


def _logits(cfg: ModelConfig, params: Params, tokens_BT: np.ndarray, **call: Any) -> np.ndarray:
    return np.asarray(jit_forward(cfg, params, tokens_BT, **call).logits_BTV)[..., : cfg.vocab_size]


def _decode(cfg, params, tokens_BT, pos_BT, chunks, caches) -> np.ndarray:
    """Logits of rows fed in chunks and then token by token."""
    start, logits = 0, []
    for end in np.cumsum([*chunks, *[1] * (LENGTH - sum(chunks))]):
        fed = slice(start, end)
        out = jit_forward(cfg, params, tokens_BT[:, fed], pos_BT=pos_BT[:, fed], caches=caches)
        caches, start = out.caches, end
        logits.append(np.asarray(out.logits_BTV)[..., : cfg.vocab_size])
    return np.concatenate(logits, 1)


def _pairs(a: Any, b: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(path, leaf, leaf) of two trees of one structure."""
    leaves = zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True)
    return [(jax.tree_util.keystr(p), np.asarray(x), np.asarray(y)) for (p, x), y in leaves]


def _assert_padded(got: np.ndarray, want: np.ndarray, what: str) -> None:
    _assert_close(got[0, PADDING:], want[0, :-PADDING], 2e-5, f"{what} of a row padded on the left")
    _assert_close(got[1], want[1], 2e-5, f"{what} of the row beside a padded one")


def _assert_close(got: Any, want: Any, tolerance: float, what: str) -> None:
    """Agreement within `tolerance` times the largest value, or 1."""
    error = np.abs(np.asarray(got) - np.asarray(want)).max()
    limit = tolerance * max(1.0, np.abs(np.asarray(want)).max())
    assert error <= limit, f"{what}: off by {error:.3g}, more than {limit:.3g}"
