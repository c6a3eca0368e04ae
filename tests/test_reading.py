# SPDX-License-Identifier: Apache-2.0
import pytest

from jaxgpt.errors import CheckpointError, ConfigError
from jaxgpt.interop.reading import MAX_BYTES, Config, read_json


def of(**data):
    return Config(data, "config.json")


def test_each_kind_of_value():
    c = of(n=3, x=1, y=0.5, on=True, word="b", some=[1], inner={"k": 2})
    assert c.count("n") == 3
    assert [type(c.number(key)) for key in "xy"] == [float, float]
    assert c.flag("on") is True
    assert c.choice({"b": "ours"}, "word") == "ours"
    assert c.items("some") == [1]
    inner = c.section("inner")
    assert inner is not None and inner.count("k") == 2
    inner.close()
    c.close()


def test_absent_and_null():
    c = of(empty=None)
    assert c.count("gone", default=7) == 7
    assert c.count("empty", default=None) is None
    assert c.count("empty", default=7, null=None) is None
    assert c.count("gone", default=7, null=None) == 7
    assert c.section("empty") is c.section("gone") is None
    with pytest.raises(ConfigError, match="empty is missing"):
        c.count("empty")
    with pytest.raises(ConfigError, match="empty=None is not a whole number"):
        c.count("empty", default=7)


@pytest.mark.parametrize("value", ["3", 3.0, True, [3], {"n": 3}])
def test_a_wrong_type_is_named(value):
    with pytest.raises(ConfigError, match=r"n=.* is not a whole number \(config\.json\)"):
        of(n=value).count("n")


def test_names_of_one_thing_must_agree():
    assert of(a=2, b=2).count("a", "b") == of(b=2).count("a", "b") == 2
    with pytest.raises(ConfigError, match="b=3 contradicts a=2"):
        of(a=2, b=3).count("a", "b")


def test_a_key_that_nobody_read_is_an_error_with_its_value():
    c = of(hidden_size=8, attention_chunk=512)
    c.count("hidden_size")
    with pytest.raises(ConfigError, match="attention_chunk=512 is not understood"):
        c.close()
    with pytest.raises(ConfigError, match=r"inner\.deep=1 is not understood"):
        of(inner={"deep": 1}).section("inner").close()  # type: ignore[union-attr]


def test_keys_without_effect_may_have_any_value():
    of(
        torch_dtype="bfloat16", use_cache=False, auto_map={"AutoModel": "x.y"}, resid_pdrop=1
    ).close()
    with pytest.raises(ConfigError, match=r"inner\.use_cache=True is not understood"):
        of(inner={"use_cache": True}).section("inner").close()  # type: ignore[union-attr]


def test_what_is_off_must_be_off():
    of(is_encoder_decoder=False, add_cross_attention=None).close()
    with pytest.raises(ConfigError, match="is_encoder_decoder=True is not supported"):
        of(is_encoder_decoder=True).close()


@pytest.mark.parametrize(
    "method, fix",
    [
        ("mxfp4", r"float32: in transformers .*Mxfp4Config\(dequantize=True\)\)\.save_pretrained"),
        ("fp8", r"FineGrainedFP8Config\(dequantize=True\)"),
        ("gptq", r"a copy of the model in bfloat16, float16 or float32$"),
    ],
)
def test_quantised_weights_are_refused_with_what_to_do(method, fix):
    what = rf"quantization_config\.quant_method='{method}' weights are not read .*{fix}"
    with pytest.raises(ConfigError, match=what):
        of(quantization_config={"quant_method": method}).close()


def test_an_unknown_word_shows_the_known_ones():
    with pytest.raises(ConfigError, match=r"act='selu' is not known .* one of \['gelu', 'relu'\]"):
        of(act="selu").choice({"relu": 1, "gelu": 2}, "act")


def test_long_values_are_cut():
    with pytest.raises(ConfigError) as caught:
        of(act="x" * 1000).choice({}, "act")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "text, what",
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),  # H8
        ("[1]", "holds no dict"),
        ('{"a": "' + "x" * MAX_BYTES + '"}', "has over 1,048,576 bytes"),
    ],
)
def test_files_that_are_no_config(tmp_path, text, what):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=what):
        read_json(tmp_path / "config.json")


def test_no_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*No such file"):
        read_json(tmp_path / "config.json")
