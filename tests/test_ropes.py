# SPDX-License-Identifier: Apache-2.0
import pytest

from jaxgpt.boxes.rope import RoPE
from jaxgpt.boxes.scaling import DynamicNTK, LinearScaling, Llama3Scaling, YaRN
from jaxgpt.errors import ConfigError
from jaxgpt.interop.reading import Config
from jaxgpt.interop.ropes import DEEPSEEK, read_rope

LLAMA3 = {"factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
YARN = {"factor": 40, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
SCALINGS = [
    ("default", {}, None),
    ("linear", {"factor": 4}, LinearScaling(4.0)),
    ("dynamic", {"factor": 2.0}, DynamicNTK(2.0, 128)),
    ("llama3", LLAMA3, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
    ("yarn", YARN, YaRN(40.0, 32)),
    ("yarn", {"factor": None, "original_max_position_embeddings": 32}, YaRN(4.0, 32)),
    ("yarn", {"factor": 2.0, "truncate": False}, YaRN(2.0, 128, truncate=False)),
    ("yarn", YARN | {"attention_factor": 1.5}, YaRN(40.0, 32, attention_factor=1.5)),
]


def read(data, **how):
    c = Config({"max_position_embeddings": 128} | data, "config.json")
    rope = read_rope(c, **how)
    c.close()
    return rope


@pytest.mark.parametrize("kind, keys, box", SCALINGS)
def test_types_in_both_dialects(kind, keys, box):
    want = RoPE(theta=500_000.0, scaling=box)
    new = {"rope_type": kind, "rope_theta": 500_000, **keys}
    assert read({"rope_parameters": new}) == want
    for name in ("rope_type", "type"):  # the older name of the type
        assert read({"rope_theta": 5e5, "rope_scaling": {name: kind, **keys}}) == want


def test_the_plain_rope():
    assert read({}) == read({"rope_scaling": None}) == RoPE()
    assert read({}, theta=1e6) == RoPE(theta=1e6)
    assert read({"rope_theta": 2e6, "rope_scaling": None}, theta=1e6) == RoPE(theta=2e6)


def test_a_part_of_each_head():
    how = {"fraction": 0.25, "fraction_names": ("rotary_pct",), "theta_names": ("rotary_emb_base",)}
    assert read({}, **how) == RoPE(fraction=0.25)
    want = RoPE(theta=20_000.0, fraction=0.5)
    assert read({"rotary_pct": 0.5, "rotary_emb_base": 20_000}, **how) == want
    new = {"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.5}
    assert read({"rope_parameters": new}, **how) == want
    with pytest.raises(ConfigError, match=r"partial_rotary_factor=0\.5 is not supported"):
        read({"partial_rotary_factor": 0.5})  # families that rotate all of a head would ignore it
    with pytest.raises(ConfigError, match=r"rope_parameters\.partial_rotary_factor=0\.5 is not"):
        read({"rope_parameters": new})
    with pytest.raises(ConfigError, match=r"rotary_pct=0\.5 contradicts \w+=0\.4"):
        read({"rotary_pct": 0.5, "partial_rotary_factor": 0.4}, **how)


def test_deepseek_scales_the_scores_too():
    both = YARN | {"rope_type": "yarn", "mscale": 0.707, "mscale_all_dim": 0.707}
    got = read({"rope_parameters": both}, scalings=DEEPSEEK, layout="neighbours")
    want = YaRN(40.0, 32, mscale=0.707, mscale_all_dim=0.707)
    assert got == RoPE(scaling=want, layout="neighbours")
    zero = both | {"mscale_all_dim": 0}
    assert read({"rope_parameters": zero}, scalings=DEEPSEEK) == RoPE(scaling=YaRN(40.0, 32))
    with pytest.raises(ConfigError, match=r"rope_parameters\.mscale=0\.707 is not understood"):
        read({"rope_parameters": both})  # other families would drop it


@pytest.mark.parametrize(
    "data, message",
    [
        ({"rope_scaling": {"type": "longrope"}}, r"rope_type=.* is not known .*'linear'"),
        ({"rope_parameters": {"rope_type": "mrope"}}, r"rope_type='mrope' is not known"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "finetuned": True}},
            r"rope_scaling\.finetuned=True is not understood",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e4},
            r"rope_theta=10000\.0 contradicts 1000000\.0",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}}
            | {"rope_scaling": {"type": "linear", "factor": 2}},
            "rope_scaling=.* contradicts rope_parameters",
        ),
        (
            {
                "rope_scaling": {"type": "dynamic", "factor": 2.0}
                | {k: 64 for k in LLAMA3 if "max" in k}
            },
            "original_max_position_embeddings=64 is not supported",
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "contradicts"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' is not a dict"),
    ],
)
def test_what_is_not_understood_is_named(data, message):
    with pytest.raises(ConfigError, match=message):
        read(data)
