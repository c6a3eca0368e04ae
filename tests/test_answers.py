# SPDX-License-Identifier: Apache-2.0
"""Rows with answers: which ids weigh 1, which rows are refused, and where they are split."""

import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from chatfolders import MARKED, TALK, chat_folder, rows
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from jaxgpt.data.answers import Example, encode_examples, example, split_examples
from jaxgpt.data.config import DataConfig
from jaxgpt.data.corpus import Corpus, read_examples
from jaxgpt.data.source import read_source
from jaxgpt.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    load_folder_tokenizer,
    train_tokenizer,
)
from jaxgpt.errors import ConfigError, ResourceError

PAIRS = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "", "completion": "é<|im_end|>"}]


def trained(found, tokenizer) -> list[list[str]]:
    """Of each row the texts that weigh 1."""
    texts = []
    for ids, weights in found:
        assert len(ids) == len(weights) and set(weights.tolist()) <= {0, 1}
        pairs = zip(weights.tolist(), ids.tolist(), strict=True)
        groups = itertools.groupby(pairs, lambda pair: pair[0])
        texts.append([tokenizer.decode([i for _, i in some]) for one, some in groups if one])
    return texts


def chats(*conversations):
    return [example("chat", {"messages": one}, "line 1 of x") for one in conversations]


def refusal(path, format="chat") -> str:
    with pytest.raises(ConfigError) as caught:
        read_examples(path, format)
    assert "\n" not in str(caught.value) and path.name in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("template", ["by prefixes", MARKED])
def test_answers_weigh_one_with_the_token_that_ends_them(tmp_path, template):
    options = {} if template == "by prefixes" else {"template": template}
    tokenizer = load_folder_tokenizer(chat_folder(tmp_path, **options))
    quoting = [TALK[1], {"role": "assistant", "content": "<|im_start|>user\n"}]
    found = list(encode_examples(chats(TALK, TALK[1:3], quoting), tokenizer))
    assert trained(found, tokenizer) == [
        [" there was 🐕.<|im_end|>", "no\n<|im_end|>"],
        [" there was 🐕.<|im_end|>"],
        ["<|im_start|>user\n<|im_end|>"],
    ]
    for (ids, _), talk in zip(found, (TALK, TALK[1:3], quoting), strict=True):
        whole = tokenizer.chat(talk, add_generation_prompt=False)
        np.testing.assert_array_equal(ids, whole)
    quoted = found[2][0]
    assert (quoted == 261).sum() == (1 if template == MARKED else 2)


def test_tokens_that_begin_before_an_answer_do_not_count(tmp_path):
    """A merge across the border: the template has written a part of it."""
    answer = "a{% generation %}{{ m.content }}{% endgeneration %}"
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        + answer
        + "{% endif %}{% endfor %}"
    )
    tokenizer = load_folder_tokenizer(chat_folder(tmp_path, template=template))
    talk = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "bcd"}]
    ((ids, weights),) = encode_examples(chats(talk), tokenizer)
    assert [tokenizer.decode([i]) for i in ids.tolist()] == ["c", "ab", "cd"]
    assert weights.tolist() == [0, 0, 1]


def test_dates_of_templates_do_not_change_ids(tmp_path):
    template = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = load_folder_tokenizer(chat_folder(tmp_path, template=template))
    ((ids, _),) = encode_examples(chats(TALK[1:3]), tokenizer)
    assert tokenizer.decode(ids).startswith("2024-07-26Once")


def test_completions_weigh_one_with_what_ends_them(tmp_path):
    examples = [example("prompt-completion", row | {"n": 1}, "line 1") for row in PAIRS]

    def pairs(tokenizer):
        found = list(encode_examples(examples, tokenizer))
        return [tokenizer.decode(ids) for ids, _ in found], trained(found, tokenizer)

    plain = "4\n", "é<|im_end|>\n"
    assert pairs(ByteTokenizer()) == (["2+2=" + plain[0], plain[1]], [[plain[0]], [plain[1]]])
    char = train_tokenizer("char", Corpus.of([one.text for one in examples]), 0)
    assert pairs(char) == pairs(ByteTokenizer())
    assert pairs(CharTokenizer("2+=4é<|im_end|>"))[1] == [["4"], ["é<|im_end|>"]]  # has no newline
    config = {"add_bos_token": True}
    folder = load_folder_tokenizer(chat_folder(tmp_path, config=config))
    texts, answers = pairs(folder)
    assert texts[0] == "<|im_start|>2+2=4<|endoftext|>"
    assert answers == [["4<|endoftext|>"], ["é<|im_end|><|endoftext|>"]]
    ids = np.concatenate([ids for ids, _ in encode_examples(examples, folder)])
    assert (ids == 261).sum() == 2 and (ids == 262).sum() == 0  # its text stays text


def test_a_completion_goes_on_where_the_prompt_ended(shared):
    """No space comes between, which a sentencepiece tokenizer puts before a text."""
    tokenizer = load_folder_tokenizer(shared / "data" / "stories260k")
    row = {"prompt": "On", "completion": "ce upon"}
    ((ids, weights),) = encode_examples([example("prompt-completion", row, "1")], tokenizer)
    assert tokenizer.decode(ids) == "<s> Once upon</s>"
    prompt = tokenizer.encode("On")
    assert (
        ids[: len(prompt) + 1].tolist() == [1, *prompt]
        and weights.sum() == len(ids) - len(prompt) - 1
    )


def test_conversations_need_a_template(tmp_path):
    made = load_folder_tokenizer(chat_folder(tmp_path, template=None))
    for tokenizer in (ByteTokenizer(), made):
        with pytest.raises(ConfigError, match=r"no chat template; fix: .*prompt-completion"):
            list(encode_examples(chats(TALK), tokenizer))


def test_a_template_without_answers_names_the_row(tmp_path):
    template = "{% generation %}{% endgeneration %}{{ messages[0].content }}"
    tokenizer = load_folder_tokenizer(chat_folder(tmp_path, template=template))
    with pytest.raises(ConfigError, match=r"writes nothing of the assistant's \(line 1 of x\)"):
        list(encode_examples(chats(TALK), tokenizer))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_are_read_with_their_place(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        parquet.write_table(
            pyarrow.Table.from_pylist([{"messages": TALK}, {"messages": TALK[1:3]}]), path
        )
    else:
        path.write_text("\n".join(json.dumps({"messages": m, "n": 1}) for m in (TALK, TALK[1:3])))
    found = read_examples(path, "chat")
    assert [one.row for one in found.examples] == [{"messages": TALK}, {"messages": TALK[1:3]}]
    place = "row 2 of" if suffix == ".parquet" else "line 2 of"
    assert found.examples[1].where == f"{place} {path}"
    assert found.documents[1] == "Once upon a time\n there was 🐕.\n" and found.name == path.name
    tools = rows(tmp_path / "b.jsonl", {"messages": TALK, "tools": [{"name": "f"}]})
    assert read_examples(tools, "chat").examples[0].row["tools"] == [{"name": "f"}]


def test_fingerprints_are_of_rows_and_format(tmp_path):
    both = {"messages": TALK[1:3], **PAIRS[0]}
    path = rows(tmp_path / "a.jsonl", both)
    prints = {read_examples(path, f).fingerprint for f in ("chat", "prompt-completion")}
    rows(path, both | {"other": 1})
    assert read_examples(path, "chat").fingerprint in prints
    rows(path, both | {"messages": [TALK[1] | {"role": "system"}, TALK[2]]})
    assert read_examples(path, "chat").fingerprint not in prints and len(prints) == 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "hi"}, "no messages, but text (line 2 of"),
        ({}, "no messages, but nothing"),
        ({"messages": "hi"}, "messages holds str, not a list (line 2 of"),
        ({"messages": []}, "without messages (line 2 of"),
        ({"messages": ["hi"]}, "message 1 has no role (line 2 of"),
        ({"messages": [{"from": "human", "value": "hi"}]}, "message 1 has no role"),
        ({"messages": [{"role": "user", "content": 1}]}, "message 1 has no content"),
        ({"messages": TALK[:2]}, "no message of the assistant (line 2 of"),
        ({"messages": [TALK[1], {"role": "assistant", "content": ""}]}, "no message of the"),
        ({"messages": [TALK[1] | {"content": "\ud800"}, TALK[2]]}, "lone surrogate U+D800 (line 2"),
    ],
)
def test_rows_that_are_no_conversation(tmp_path, row, words):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps({'messages': TALK})}\n{json.dumps(row)}\n")
    assert words in refusal(path)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a"}, "no completion, but prompt (line 1 of"),
        ({"prompt": None, "completion": "a"}, "prompt holds NoneType, not a text"),
        ({"prompt": [TALK[1]], "completion": "a"}, "prompt holds list, not a text"),
        ({"prompt": "a", "completion": ""}, "the completion is empty (line 1 of"),
    ],
)
def test_rows_that_are_no_pair(tmp_path, row, words):
    assert words in refusal(rows(tmp_path / "a.jsonl", row), "prompt-completion")


def test_files_without_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n")
    assert f"{path} is empty" in refusal(path)
    path.write_text("")
    assert f"{path} is empty" in refusal(path)
    path.write_text('{"messages": [\n')
    assert "line 1 of" in refusal(path) and "is not JSON" in refusal(path)
    path = tmp_path / "a.txt"
    path.write_text("hi")
    assert "has no rows" in refusal(path)
    with pytest.raises(ConfigError, match=r"format=chat needs rows; fix: --data.path=FILE.jsonl"):
        read_examples(None, "chat")


def test_unreadable_rows(tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ResourceError, match=r"cannot read .*a\.jsonl: Permission denied"):
        read_examples(rows(tmp_path / "a.jsonl", *PAIRS), "prompt-completion")


def test_a_beginning_is_of_whole_rows(tmp_path):
    path = rows(tmp_path / "a.jsonl", *PAIRS)
    sizes = [len(one.text) for one in read_examples(path, "prompt-completion").examples]
    for max_chars, n in ((sizes[0], 1), (sum(sizes) - 1, 1), (sum(sizes), 2), (10**9, 2)):
        found = read_examples(path, "prompt-completion", max_chars=max_chars)
        assert len(found.examples) == n
    with pytest.raises(ConfigError, match="the first row has more than max_chars=5"):
        read_examples(path, "prompt-completion", max_chars=5)


@given(st.lists(st.integers(1, 50), min_size=1), st.floats(0, 0.99))
def test_a_split_cuts_no_row(sizes, fraction):
    made = [
        Example(str(n), {"prompt": "a" * (size - 1), "completion": ""}, "")
        for n, size in enumerate(sizes)
    ]
    train, val = split_examples(made, fraction)
    assert train + val == made and train
    assert bool(val) == (fraction > 0 and len(made) > 1)
    if len(train) > 1:
        assert sum(sizes[: len(train)]) <= (1 - fraction) * sum(sizes)
    if len(val) > 1:
        assert sum(sizes[: len(train) + 1]) > int((1 - fraction) * sum(sizes))


def test_data_configs_say_what_is_read(tmp_path):
    path = str(rows(tmp_path / "a.jsonl", *PAIRS))
    corpus, revision = read_source(DataConfig(path=path, format="prompt-completion"))
    assert len(corpus.examples) == 2 and revision is None
    assert read_source(DataConfig(path=path, column="prompt"))[0].examples == ()
    for wrong in (
        {"format": "sharegpt"},
        {"format": "chat", "column": "x"},
        {"format": "chat", "rows": "documents"},
    ):
        with pytest.raises(ConfigError, match="format"):
            DataConfig(**wrong)
    with pytest.raises(ConfigError, match="of the hub; fix: save its rows as jsonl"):
        read_source(DataConfig(path="hf://a/b", format="chat"))
