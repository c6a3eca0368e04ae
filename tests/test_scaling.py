# SPDX-License-Identifier: Apache-2.0
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.base import RopeScaling
from jaxgpt.boxes.rope import RoPE, rates
from jaxgpt.boxes.scaling import DynamicNTK, LinearScaling, Llama3Scaling, NTKScaling, YaRN
from jaxgpt.config import RunConfig, from_yaml, resolve, to_yaml
from jaxgpt.errors import ConfigError
from jaxgpt.model import forward
from jaxgpt.testing import jit_init, quick_jit, tiny

# Rates and factors of transformers 5, which computes in float32:
#   config = LlamaConfig(hidden_size=2 * width, num_attention_heads=2, head_dim=width,
#       max_position_embeddings=128, rope_parameters={"rope_type": ..., "rope_theta": theta,
#       "factor": ..., "original_max_position_embeddings": ..., ...})
#   transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len)
DEEPSEEK = YaRN(factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=0.707)
GOLDEN = [  # box, width, theta, every eighth rate where the width exceeds 16
    (LinearScaling(4.0), 16, 1e4),
    "0.25 0.07905694 0.025 0.007905695 0.0025 0.0007905695 0.00025 7.905695e-05",
    (DynamicNTK(2.0, 128).at(64), 16, 1e4),
    "1 0.3162278 0.1 0.03162278 0.01 0.003162278 0.001 0.0003162278",
    (DynamicNTK(2.0, 128).at(129), 16, 1e4),
    "1 0.3155281 0.09955801 0.03141335 0.009911796 0.003127451 0.0009867987 0.0003113627",
    (DynamicNTK(2.0, 128).at(512), 16, 1e4),
    "1 0.2394814 0.05735132 0.01373457 0.003289174 0.0007876959 0.0001886385 4.517539e-05",
    (Llama3Scaling(8.0, original_length=64), 16, 5e5),
    "1 0.07940301 0.004700754 0.0009115831 0.0001767767 3.428102e-05 6.64787e-06 1.289173e-06",
    (YaRN(4.0, 32), 16, 1e4),
    "1 0.1976424 0.025 0.007905695 0.0025 0.0007905695 0.00025 7.905695e-05",
    (YaRN(4.0, 32, truncate=False), 16, 15e4),
    "1 0.07069291 0.01270332 0.002863557 0.0006454972 0.0001455067 3.279983e-05 7.393672e-06",
    (YaRN(2.0, 4), 16, 1e4),
    "1 0.1581139 0.05 0.01581139 0.005 0.001581139 0.0005 0.0001581139",
    (Llama3Scaling(), 128, 5e5),  # Llama 3.1
    "1 0.1939228 0.03760603 0.007292665 0.000524846 3.428102e-05 6.64787e-06 1.289173e-06",
    (YaRN(16.0, 4096), 128, 1e4),
    "1 0.3162278 0.1 0.0270618 0.005673077 0.000881789 6.25e-05 1.976424e-05",
    (YaRN(32.0, 4096, truncate=False), 64, 15e4),  # gpt-oss
    "1 0.05081327 0.0004564839 4.099978e-06",
    (DEEPSEEK, 64, 1e4),
    "1 0.1 0.0055 2.5e-05",
]
BOXES = [LinearScaling, NTKScaling, DynamicNTK, Llama3Scaling, YaRN]


def scaled(box, width=16, theta=10_000.0):
    rate_I = box.rates(rates(width, theta), theta)
    assert rate_I.dtype == jnp.float32 and rate_I.shape == (width // 2,)
    return np.asarray(rate_I)


@pytest.mark.parametrize(("case", "want"), [*zip(GOLDEN[::2], GOLDEN[1::2], strict=True)], ids=repr)
def test_rates_equal_those_of_transformers(case, want):
    got = scaled(*case)[:: 8 if case[1] > 16 else 1]
    np.testing.assert_allclose(got, np.array(want.split(), float), rtol=5e-7)


@pytest.mark.parametrize(
    ("box", "magnitude", "score_scale"),
    [
        (YaRN(4.0), 1.138629436111989, 1.0),
        (YaRN(16.0), 1.2772588722239782, 1.0),
        (YaRN(40.0, attention_factor=1.3), 1.3, 1.0),
        # score_scale: models.deepseek_v3.modeling_deepseek_v3.yarn_apply_mscale(parameters, 1.0)
        (YaRN(40.0, mscale=1.0, mscale_all_dim=1.0), 1.0, 1.8738542070926265),
        (YaRN(40.0, mscale=0.707, mscale_all_dim=0.707), 1.0, 1.5896261651208736),
        (DEEPSEEK, 1.0857263992561355, 1.5896261651208736),
        (YaRN(4.0, mscale_all_dim=1.0), 1.138629436111989, 1.138629436111989**2),
        *[(box(), 1.0, 1.0) for box in BOXES[:-1]],
    ],
    ids=repr,
)
def test_magnitudes_equal_those_of_transformers(box, magnitude, score_scale):
    assert math.isclose(box.magnitude(), magnitude, rel_tol=1e-12)
    assert math.isclose(RoPE(scaling=box).score_scale(), score_scale, rel_tol=1e-12)


@pytest.mark.parametrize("layout", ["halves", "neighbours"])
def test_the_magnitude_is_on_what_is_rotated_alone(layout):
    box = RoPE(fraction=0.5, layout=layout, scaling=YaRN(4.0, attention_factor=2.0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 2, 16)), jnp.float32)
    y = box.rotate(x, jnp.zeros((1, 3), jnp.int32))
    assert np.array_equal(y, x.at[..., :8].multiply(2.0))


@pytest.mark.parametrize("box", BOXES)
def test_factor_one_is_the_plain_rope(box):
    plain = rates(64, 10_000.0)
    np.testing.assert_allclose(scaled(box(factor=1.0), 64), plain, rtol=2e-7)
    assert box(factor=1.0).magnitude() == 1.0 and box(factor=1.0).score_scale() == 1.0
    assert RoPE().at(99) == RoPE() and RoPE().score_scale() == 1.0


@pytest.mark.parametrize("box", [Llama3Scaling(), YaRN()])
def test_fast_pairs_stay_and_slow_ones_are_interpolated(box):
    plain, got = np.asarray(rates(128, 10_000.0)), scaled(box, 128)
    kept = got == plain
    assert kept[:16].all() and not kept[-8:].any()
    np.testing.assert_allclose(got[-8:], plain[-8:] / box.factor, rtol=1e-6)
    ratio = got / plain
    assert (np.diff(ratio) <= 1e-6).all() and ((ratio > 0.3) & (ratio < 0.9)).any()


def test_a_ramp_outside_of_the_pairs_keeps_all_or_interpolates_all_but_the_first():
    plain = rates(16, 10.0)
    assert np.array_equal(scaled(YaRN(4.0, 10**9), 16, 10.0), plain)
    np.testing.assert_allclose(scaled(YaRN(4.0, 1), 16, 10.0)[1:], plain[1:] / 4, rtol=1e-6)


@pytest.mark.parametrize("width", [2, 4, 64])
def test_ntk_scaling_is_a_change_of_base(width):
    theta = 10_000.0 * (3.0 ** (width / (width - 2)) if width > 2 else 1)
    np.testing.assert_allclose(scaled(NTKScaling(3.0), width), rates(width, theta), rtol=5e-7)


def test_the_dynamic_scale_follows_the_declared_length():
    box = RoPE(scaling=DynamicNTK(factor=2.0, original_length=100))
    assert box.at(100) == box.at(1) == RoPE(scaling=NTKScaling(1.0))
    assert box.at(150) == RoPE(scaling=NTKScaling(2.0))  # 2 * 150 / 100 - (2 - 1)
    assert box.at(400) == RoPE(scaling=NTKScaling(7.0))
    for still in (RoPE(), RoPE(scaling=YaRN()), RoPE(scaling=LinearScaling())):
        assert still.at(150) == still


@pytest.mark.parametrize(
    ("box", "knobs", "message"),
    [
        *[(box, {"factor": 0.5}, r"factor=0\.5 would shorten the context") for box in BOXES],
        (DynamicNTK, {"original_length": 0}, "original_length=0 must be positive"),
        (Llama3Scaling, {"high_freq_factor": 1.0}, r"high_freq_factor=1\.0 must exceed low_freq"),
        (Llama3Scaling, {"low_freq_factor": 0.0}, r"low_freq_factor=0\.0 must be positive"),
        (YaRN, {"original_length": -1}, "original_length=-1 must be positive"),
        (YaRN, {"beta_slow": 33.0}, r"beta_fast=32\.0 is below beta_slow=33\.0"),
        (YaRN, {"attention_factor": 0.0}, r"attention_factor=0\.0 must be positive"),
        (YaRN, {"mscale": 1.0}, r"mscale=1\.0 has no effect.*mscale_all_dim"),
        (
            YaRN,
            {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0},
            r"mscale=1\.0 has no effect",
        ),
        (YaRN, {"mscale_all_dim": 0.0}, r"mscale_all_dim=0\.0 must be positive"),
    ],
)
def test_wrong_knobs_are_refused(box, knobs, message):
    with pytest.raises(ConfigError, match=message):
        box(**knobs)


# --- in a model -----------------------------------------------------------------------------------

DYNAMIC = tiny(position=RoPE(theta=100.0, scaling=DynamicNTK(2.0, original_length=8)))
TOKENS = np.random.default_rng(0).integers(0, 30, (2, 12), np.int32)
run = quick_jit(forward, static_argnames=("cfg", "rope_length"))


@pytest.fixture(scope="module")
def params():
    return jit_init(DYNAMIC, jax.random.key(0))


def logits(params, tokens=TOKENS, cfg=DYNAMIC, **call):
    return np.asarray(run(cfg, params, tokens, **call).logits_BTV)[..., :31]


def test_the_declared_length_changes_the_logits(params):
    default = logits(params)  # context_length, 16
    assert np.array_equal(logits(params, rope_length=16), default)
    assert not np.allclose(logits(params, rope_length=32), default, atol=1e-3)
    plain = dataclasses.replace(DYNAMIC, position=RoPE(theta=100.0))
    np.testing.assert_allclose(logits(params, rope_length=8), logits(params, cfg=plain), atol=1e-5)


@pytest.mark.parametrize("length", [12, 64])
def test_at_one_declared_length_logits_are_causal_and_caches_equal_the_full_forward(params, length):
    want = logits(params, rope_length=length)
    for t in (1, 9, 11):
        changed = np.where(np.arange(12) < t, TOKENS, TOKENS ^ 1)
        got = logits(params, changed, rope_length=length)
        assert np.array_equal(got[:, :t], want[:, :t]) and not np.array_equal(got, want)
    caches, steps = DYNAMIC.init_caches(2, 12), []
    for start, end in ((0, 7), *((i, i + 1) for i in range(7, 12))):
        pos_BT = np.tile(np.arange(start, end, dtype=np.int32), (2, 1))
        call = dict(pos_BT=pos_BT, caches=caches, rope_length=length)
        out = run(DYNAMIC, params, TOKENS[:, start:end], **call)
        caches = out.caches
        steps.append(np.asarray(out.logits_BTV)[..., :31])
    limit = 2e-5 * max(1.0, np.abs(want).max())
    np.testing.assert_allclose(np.concatenate(steps, 1), want, rtol=0, atol=limit)


def test_yarn_of_factor_one_is_the_plain_model(params):
    yarn = tiny(position=RoPE(scaling=YaRN(factor=1.0, mscale=1.0, mscale_all_dim=1.0)))
    want = logits(params, cfg=tiny(position=RoPE()))
    np.testing.assert_allclose(logits(params, cfg=yarn), want, atol=1e-5)
    four = dataclasses.replace(yarn, position=RoPE(scaling=YaRN(factor=4.0)))
    assert not np.allclose(logits(params, cfg=four), want, atol=1e-2)


def test_the_score_scale_reaches_the_scores(params):
    plain, by_hand = YaRN(4.0, 8), YaRN(4.0, 8, mscale_all_dim=1.0)
    factor = by_hand.score_scale()
    cfg = tiny(position=RoPE(scaling=plain))
    scaled_box = dataclasses.replace(cfg.attention, scale=factor / 2)  # heads are 4 wide
    want = logits(params, cfg=dataclasses.replace(cfg, attention=scaled_box))
    got = logits(params, cfg=tiny(position=RoPE(scaling=by_hand)))
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert not np.allclose(got, logits(params, cfg=cfg), atol=1e-2)


# --- on the command line --------------------------------------------------------------------------


@pytest.mark.parametrize("box", [box.__name__ for box in BOXES])
def test_scalings_are_chosen_by_name(box):
    options = ["--model.position.scaling.factor=3.5", f"--model.position.scaling={box}"]
    options += ["--model.position.theta=5e5", "--model.position=RoPE"]
    chosen = resolve(RunConfig(), options=options)
    kind = next(cls for cls in BOXES if cls.__name__ == box)
    assert chosen.model.position == RoPE(theta=5e5, scaling=kind(factor=3.5))
    assert from_yaml(to_yaml(chosen)) == chosen
    again = resolve(chosen, options=["--model.position.scaling=null"])
    assert again.model.position == RoPE(theta=5e5)
    assert from_yaml(to_yaml(again)) == again


def test_layer_edits_set_scalings():
    edit = "[{start: 1, set: {position.scaling: {class_path: YaRN, init_args: {factor: 2}}}}]"
    run = resolve(RunConfig(), options=["--model.position=RoPE", f"--model.edits={edit}"])
    assert [layer.position.scaling for layer in run.model.layers[:2]] == [None, YaRN(factor=2.0)]
    assert from_yaml(to_yaml(run)) == run


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("scaling=Llama3", r"did you mean model\.position\.scaling=Llama3Scaling"),
        ("scaling=RoPE", "is no RopeScaling"),
        ("layout=thirds", "one of halves, neighbours"),
        ("scaling.factor=2", r"there is no box at model\.position\.scaling"),
    ],
)
def test_wrong_options_are_named(option, message):
    with pytest.raises(ConfigError, match=message):
        resolve(RunConfig(), options=["--model.position=RoPE", f"--model.position.{option}"])


def test_a_scaling_from_elsewhere_needs_only_what_it_changes():
    @dataclasses.dataclass(frozen=True)
    class Freeze(RopeScaling):
        def rates(self, rate_I, theta):
            return rate_I * 0

    x = jnp.ones((1, 2, 1, 4))
    assert np.array_equal(RoPE(scaling=Freeze()).rotate(x, jnp.array([[3, 9]])), x)
