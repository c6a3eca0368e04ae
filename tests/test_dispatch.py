# SPDX-License-Identifier: Apache-2.0
"""Every kernel that runs here against the reference: values, gradients, windows, caches, taps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.rope import RoPE
from jaxgpt.errors import ConfigError
from jaxgpt.kernels import attend, choices, chunked, reference
from jaxgpt.kernels.choice import forget
from jaxgpt.layers import LayerEdit
from jaxgpt.masks import Visibility
from jaxgpt.model import forward
from jaxgpt.testing import jit_init, quick_jit, tiny

TOLERANCE = 1e-5  # of the largest value, or of 1: outputs and gradients against the reference's
KERNELS = ("xla", "chunked")
B, T, N, H, P = 2, 13, 4, 8, 6


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Blocks of four queries, so that rows of a few tokens have several and a rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "MOST", 4)
        patch.setattr(chunked, "FEWEST", 2)
        yield


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def qkv(S=T, K=2, T=T):
    return draw(B, T, N, H), draw(B, S, K, H, seed=1), draw(B, S, K, P, seed=2)


def slope(q_pos, k_pos):
    """A bias as ALiBi's, one row of it for each head."""
    distance = jnp.abs(q_pos[:, None, :, None] - k_pos[:, None, None, :]).astype(jnp.float32)
    return -jnp.array([0.5, 0.2, 0.1, 0.0])[None, :, None, None] * distance


FULL = Visibility.full(B, T)
PADDED = Visibility.of(jnp.array([[-1] * 3 + list(range(10)), list(range(13))]))
PACKED_POS = jnp.array([list(range(5)) + list(range(8)), [*range(11), -1, -1]])
SEGMENTS = jnp.array([[0] * 5 + [1] * 8, [3] * 11 + [7] * 2])
CACHED = Visibility(  # three new tokens behind four, over nine slots of which one row has padding
    jnp.array([[3, 4, 5], [4, 5, 6]]),
    jnp.array([[-1, 0, 1, 2, 3, 4, 5, -1, -1], [0, 1, 2, 3, 4, 5, 6, -1, -1]]),
)
CASES = {
    "causal": (FULL, {}),
    "window": (FULL.replace(window=3), {}),
    "window of the last block": (FULL.replace(window=9), {}),
    "all see all": (FULL.replace(causal=False, window=3), {}),
    "padded": (PADDED, {}),
    "padded window": (PADDED.replace(window=3), {}),
    "packed": (Visibility.of(PACKED_POS, SEGMENTS), {}),
    "prefix": (Visibility.of(FULL.q_pos_BT, prefix_B=jnp.array([7, 2])), {}),
    "cached": (CACHED, {}),
    "cached window": (CACHED.replace(window=2), {}),
    "bias": (FULL, {"bias": slope}),
    "padded bias": (PADDED, {"bias": slope}),
    "capped": (FULL, {"softcap": 0.7, "sinks_N": jnp.linspace(-1.0, 2.0, N)}),
    "capped window": (FULL.replace(window=5), {"softcap": 0.7, "bias": slope}),
}


def value_and_gradients(kernel, visibility, q, k, v, **options):
    """The output, and gradients of a weighted sum of it for all arrays, sinks included."""
    sinks_N = options.pop("sinks_N", None)

    @quick_jit
    def run(visibility, q, k, v, sinks_N):
        def weighted(q, k, v, sinks_N):
            seen = visibility.replace(kernel=kernel)
            y = attend(q, k, v, seen, scale=H**-0.5, sinks_N=sinks_N, **options)
            return (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum(), y

        n_arrays = 3 if sinks_N is None else 4
        grads, y = jax.grad(weighted, argnums=range(n_arrays), has_aux=True)(q, k, v, sinks_N)
        return y, *grads

    return run(visibility, q, k, v, sinks_N)


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        b = np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * max(1.0, np.abs(b).max()))


ALL = [("chunked", name) for name in CASES] + [
    ("xla", name) for name, (_, options) in CASES.items() if "softcap" not in options
]


@pytest.mark.parametrize(("kernel", "name"), ALL)
def test_values_and_gradients_are_the_references(kernel, name):
    visibility, options = CASES[name]
    arrays = qkv(visibility.k_pos_BS.shape[1], T=visibility.q_pos_BT.shape[1])
    want = value_and_gradients("reference", visibility, *arrays, **options)
    assert_close(value_and_gradients(kernel, visibility, *arrays, **options), want)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("K", [1, 4])
def test_other_groups_of_heads(kernel, K):  # N09
    want = value_and_gradients("reference", FULL, *qkv(K=K))
    assert_close(value_and_gradients(kernel, FULL, *qkv(K=K)), want)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("window", "want"),
    [
        (1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (4, [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5]),
        (8, [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]),
        (100, [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]),
    ],
)
def test_a_window_of_w_keys_has_w_keys(kernel, window, want):  # N07
    zeros, pos = jnp.zeros((1, 8, 1, 8)), jnp.arange(8)[None]
    v = jnp.broadcast_to(jnp.arange(8.0)[None, :, None, None], (1, 8, 1, 8))
    run = quick_jit(lambda q, seen: attend(q, zeros, v, seen, scale=1.0)[0, :, 0, 0])
    full = Visibility.full(1, 8).replace(window=window, kernel=kernel)
    np.testing.assert_allclose(run(zeros, full), want, atol=1e-6)
    np.testing.assert_allclose(run(zeros, full.replace(plain=False)), want, atol=1e-6)
    for t in range(8):  # over a cache of which t + 1 slots are filled
        one = Visibility(pos[:, t : t + 1], jnp.where(pos <= t, pos, -1))
        got = run(zeros[:, :1], one.replace(window=window, kernel=kernel))
        np.testing.assert_allclose(got, want[t : t + 1], atol=1e-6)


@functools.cache
def compiled(kernel):
    def run(visibility, q, k, v):
        seen = visibility.replace(kernel=kernel, window=4)
        return attend(q, k, v, seen, scale=H**-0.5)

    def grads(visibility, q, k, v):
        return jax.grad(lambda *qkv: (run(visibility, *qkv) ** 2).sum(), (0, 1, 2))(q, k, v)

    return quick_jit(run), quick_jit(grads)


POSITIONS = st.lists(st.integers(-1, 8), min_size=T, max_size=T)


@pytest.mark.parametrize("kernel", ("reference", *KERNELS))
@settings(max_examples=25, deadline=None)
@given(q_pos=POSITIONS, k_pos=POSITIONS)
def test_a_query_that_sees_nothing_gives_zero(kernel, q_pos, k_pos):
    """Whatever the positions are; keys in empty slots are NaN, and gradients stay finite."""
    seen = Visibility(jnp.array([q_pos] * B), jnp.array([k_pos] * B))
    q, k, v = qkv()
    run, grads = compiled(kernel)
    empty = (jnp.array(k_pos) < 0)[None, :, None, None]
    y = np.asarray(run(seen, q, jnp.where(empty, jnp.nan, k), jnp.where(empty, jnp.nan, v)))
    blind_T = ~np.asarray(seen.replace(window=4).mask()).any(-1)[0]
    assert not y[:, blind_T].any() and y[:, ~blind_T].all()
    for grad in grads(seen, q, k, v):
        assert np.isfinite(grad).all()


# --- in a model -----------------------------------------------------------------------------------

CFG = tiny(
    position=RoPE(),
    attention=GQA(n_heads=4, n_kv_heads=2),
    edits=(LayerEdit(every=2, start=1, set={"attention.window": 3}),),
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, 11)), jnp.int32)
STATIC = ("capture", "kernel")
jit_forward = quick_jit(functools.partial(forward, CFG), static_argnames=STATIC)


@pytest.fixture(scope="module")
def params():
    return jit_init(CFG, jax.random.key(0))


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_layer_is_the_references_in_prefill_and_over_a_cache(params, kernel):  # N07
    sites = ("block_*/attention/heads", "block_1/out")
    want = jit_forward(params, TOKENS, capture=sites, kernel="reference").captured
    assert_close(jit_forward(params, TOKENS, capture=sites, kernel=kernel).captured, want)
    caches, parts = CFG.init_caches(2, 14), []
    for some in (slice(0, 5), slice(5, 10), slice(10, 11)):
        pos_BT = jnp.broadcast_to(jnp.arange(11)[None, some], TOKENS[:, some].shape)
        call = dict(pos_BT=pos_BT, caches=caches, capture=sites, kernel=kernel)
        out = jit_forward(params, TOKENS[:, some], **call)
        caches = out.caches
        parts.append(out.captured)
    assert_close(jax.tree.map(lambda *xs: jnp.concatenate(xs, 1), *parts), want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_capture_changes_nothing_and_takes_the_references_probabilities(params, kernel):
    sites = ("block_0/attention/scores", "block_*/attention/probs")
    plain = jit_forward(params, TOKENS, kernel=kernel)
    taken = jit_forward(params, TOKENS, capture=sites, kernel=kernel)
    assert np.array_equal(plain.logits_BTV, taken.logits_BTV)
    want = jit_forward(params, TOKENS, capture=sites, kernel="reference")
    assert_close(taken.captured, want.captured)


def test_no_score_matrix_is_made_where_none_is_asked_for(params):
    def matrices(**call):
        jaxpr = jax.make_jaxpr(functools.partial(forward, CFG, kernel="chunked", **call))
        return str(jaxpr(params, TOKENS)).count("f32[2,4,11,11]")

    assert matrices() == matrices(capture=["block_*/attention/heads", "block_0/out"]) == 0
    assert matrices(capture=["block_1/attention/probs"]) > 0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("site", ["scores", "probs"])
def test_a_patch_of_scores_or_probabilities_takes_the_reference(params, kernel, site):
    patch = {f"block_1/attention/{site}": np.float32(0.25)}
    forget()
    got = jit_forward(params, TOKENS, patch=patch, kernel=kernel).logits_BTV[..., :31]
    assert set(map(str, choices())) == {f"{kernel} (asked for)", f"reference (patched {site})"}
    want = jit_forward(params, TOKENS, patch=patch, kernel="reference").logits_BTV[..., :31]
    assert_close(got, want)
    plain = jit_forward(params, TOKENS, kernel=kernel).logits_BTV[..., :31]
    assert not np.allclose(got, plain, atol=1e-2)


def test_choices_are_noted_once_while_tracing(params):
    forget()
    for _ in range(2):
        jax.eval_shape(functools.partial(forward, CFG), params, TOKENS)
    (choice,) = choices()
    assert choice.kernel == "reference" and "not cudnn: no NVIDIA GPU but cpu" in choice.reason


def test_what_cannot_be_done_is_an_error_with_what_fits(params):
    """It comes through the whole model as it is."""
    with pytest.raises(ConfigError, match="'cudnn' cannot serve this call: no NVIDIA GPU but cpu"):
        jax.eval_shape(functools.partial(forward, CFG, kernel="cudnn"), params, TOKENS)
    capped = functools.partial(forward, tiny(attention=GQA(n_heads=4, softcap=5.0)), kernel="xla")
    with pytest.raises(ConfigError, match=r"has softcap; fix: .* \['reference', 'chunked'\]"):
        jax.eval_shape(capped, jit_init(tiny(), jax.random.key(0)), TOKENS)


def test_the_reference_is_bitwise_what_auto_takes_for_small_calls():
    q, k, v = qkv()
    got = attend(q, k, v, FULL, scale=1.0)
    assert np.array_equal(got, reference.attend(q, k, v, FULL, scale=1.0))
