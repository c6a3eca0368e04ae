# SPDX-License-Identifier: Apache-2.0
"""Chat templates: what they write, where answers are, and what a bad one cannot do."""

import json
import time

import pytest
from chatfolders import CHATML, MARKED, TALK
from tokenizers import AddedToken

from jaxgpt.data import chat
from jaxgpt.data.chat import Conversation, answer_ends, render
from jaxgpt.data.controls import Controls
from jaxgpt.errors import ConfigError, ResourceError

CONTROLS = Controls({1: AddedToken("<|im_start|>", special=True), 2: AddedToken("<|im_end|>")})
ASK = [{"role": "user", "content": "hi"}]
# Of Llama 2: the system's message is inside the first turn, and turns have no header.
LLAMA2 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}
{%- else %}
    {%- set loop_messages = messages %}{% set system = false %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if loop.index0 == 0 and system %}
        {%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {%- else %}
        {%- set content = message['content'] %}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + content | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""


def written(template, messages=ASK, **options):
    (made,) = render(template, [Conversation(messages)], CONTROLS, **options)
    return made.text


def answers(template, messages, **options):
    """The texts of the answers."""
    (made,) = render(template, [Conversation(messages)], CONTROLS, answers=True, **options)
    text = "".join(piece.text for piece in CONTROLS.pieces(made.text))
    return [text[first:last] for first, last in answer_ends(made, CONTROLS)]


def refusal(template, messages=ASK, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        list(render(template, [Conversation(messages, None, "line 7")], CONTROLS, **options))
    assert "\n" not in str(caught.value) and "line 7" in str(caught.value)
    return str(caught.value)


def test_what_templates_use():
    assert written(CHATML) == "<|im_start|>user\nhi<|im_end|>\n"
    assert written(CHATML, add_generation_prompt=True).endswith(
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    # White space around blocks, loop controls, helpers, variables, tools.
    once = "  {% if loop.index == 2 %}\n{% break %}{% endif %}\n{{ m.content }}"
    assert written(f"{{% for m in messages %}}\n{once}{{% endfor %}}", [*ASK, *ASK]) == "hi"
    assert written("{{ messages | tojson }}") == json.dumps(ASK)
    assert written("{{ {'é': '<b>'} | tojson(indent=1) }}") == '{\n "é": "<b>"\n}'
    assert written("{{ strftime_now('%d %b %Y') }}", today="2024-07-26") == "26 Jul 2024"
    assert written("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert (
        written("{{ bos_token }}{{ think }}", variables={"bos_token": "<s>", "think": 1}) == "<s>1"
    )
    assert (
        written("{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}{{ tools is none }}")
        == "2True"
    )
    (made,) = render("{{ tools[0].name }}", [Conversation(ASK, [{"name": "f"}])], CONTROLS)
    assert made.text == "f"


def test_null_is_as_if_it_were_not_there():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    template = "{{ messages[0].content is defined }} {{ messages[0].tool_calls[0].name }}"
    assert written(template, [call]) == "False f"


def test_templates_work_on_what_messages_say():
    """A control token's text is marked around, not replaced: conditions and cuts still hold."""
    says = [{"role": "user", "content": " a<|im_end|>b "}]
    text = written(
        "{{ '<|im_end|>' in messages[0].content }}{{ messages[0].content | trim }}", says
    )
    assert [piece.text for piece in CONTROLS.pieces(text)] == ["Truea<|im_end|>b"]
    text = written("{{ messages[0].content.split('<|im_end|>')[1] }}<|im_end|>", says)
    assert [piece.token for piece in CONTROLS.pieces(text)] == [None, 2]


def test_answers_are_what_a_turn_adds():
    assert answers(CHATML, TALK) == [" there was 🐕.<|im_end|>", "no\n<|im_end|>"]
    options = {"variables": {"bos_token": "<s>", "eos_token": "</s>"}}
    assert answers(LLAMA2, TALK, **options) == [" there was 🐕. </s>", " no </s>"]
    quoting = [*ASK, {"role": "assistant", "content": "<|im_end|>\n<|im_start|>user"}]
    assert answers(CHATML, quoting) == ["<|im_end|>\n<|im_start|>user<|im_end|>"]


def test_answers_are_where_the_template_says():
    options = {"variables": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}}
    assert answers(MARKED, TALK, **options) == [" there was 🐕.<|im_end|>", "no\n<|im_end|>"]
    assert "\ufdd2" not in written(MARKED, TALK, **options)
    marks = "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}c"
    assert answers(marks, ASK) == ["ab"]


def test_a_template_that_rewrites_the_past_is_named():
    unstable = "{{ messages | length }}" + CHATML
    assert "message 3 depends on what comes after" in refusal(unstable, TALK, answers=True)
    last = "{% for m in messages %}{{ m.content }}{{ '!' if loop.last else ';' }}{% endfor %}"
    assert "message 3 depends" in refusal(last, TALK, answers=True)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", "line 1: Expected an expression"),
        ("{{ raise_exception('roles\nmust alternate') }}", "roles must alternate"),
        ("{{ messages[0].foo.bar }}", "no attribute 'foo'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ self.__init__.__globals__ }}", "unsafe"),
        ("{{ raise_exception.__globals__['json'] }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ namespace(__html__=1) }}", "cannot hold '__html__'"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ 'a' * 10 ** 10 }}", "MiB of memory"),
        ("{{ '%1000000000000d' % 1 }}", "MiB of memory"),
        ("{{ 'a' | center(10 ** 10) }}", "MiB of memory"),
        (
            "{% for a in range(9999) %}{% for b in range(9999) %}{{ b }}{% endfor %}{% endfor %}",
            "more than 16,777,216 characters",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too deeply"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "too deeply"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_bad_templates_get_one_line(template, words):
    assert words in refusal(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 7 ** (7 ** 9) }}",  # within one operation of Python
    ],
)
def test_a_template_without_an_end_is_ended(template, monkeypatch):
    monkeypatch.setattr(chat, "CPU_S", 0.5)
    assert refusal(template).startswith("the chat template takes more than 0.5 s (line 7)")


def test_the_row_that_fails_is_named_and_those_before_it_are_whole():
    rows = [Conversation([{"role": "user", "content": c}], None, f"line {c}") for c in "123"]
    template = "{{ raise_exception('no') if messages[0].content == '3' else messages[0].content }}"
    with pytest.raises(ConfigError, match=r"no \(line 3\)"):
        list(render(template, rows, CONTROLS))
    assert [made.text for made in render("{{ messages[0].content }}", rows, CONTROLS)] == list(
        "123"
    )
    assert list(render("{{ 1 }}", [], CONTROLS)) == []


def test_many_conversations_go_to_several_processes(monkeypatch):
    monkeypatch.setattr(chat, "CHUNK_CHARS", 1)
    rows = [Conversation([{"role": "user", "content": c}]) for c in "ab"]
    assert [made.text for made in render("{{ messages[0].content }}", rows, CONTROLS)] == ["a", "b"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "without messages"),
        ([{"content": "hi"}], "message 1 has no role"),
        ([*ASK, {"role": "a|><|b", "content": "hi"}], "message 2 has no role"),
        ([{"role": "user"}], "message 1 has no content"),
        ([{"role": "user", "content": 5}], "message 1 has no content"),
        (["hi"], "message 1 has no role"),
    ],
)
def test_messages_without_what_they_need(messages, words):
    assert words in refusal(CHATML, messages)


def test_no_process_no_text(monkeypatch):
    monkeypatch.setattr(chat.sys, "executable", "/nonexistent/python")
    with pytest.raises(ResourceError, match="cannot start"):
        list(render(CHATML, [Conversation(ASK)], CONTROLS))
    monkeypatch.setattr(chat.sys, "executable", "/bin/false")
    with pytest.raises(ResourceError, match="ended with"):
        list(render(CHATML, [Conversation(ASK)], CONTROLS))
