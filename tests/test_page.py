# SPDX-License-Identifier: Apache-2.0
import html.parser

import pytest

from jaxgpt.study import page
from jaxgpt.study.page import Html, data_table, escaped, folded, paragraph, table, tag, whole
from jaxgpt.study.plots import new_figure

VOID = {"img", "meta"}


class Reader(html.parser.HTMLParser):
    """Elements, attributes and text of a page; every element must be closed, in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_text_is_shown_and_never_markup():
    for text in ("<script>x</script>", "a & b", "\"'><img onerror=x>", "é中\n\ttab"):
        read = Reader(tag("p", text, title=text))
        assert "".join(read.text) == text and read.attributes == [("title", text)]
        assert read.tags == ["p"]
    assert escaped("\x00 \x1b[0m \ud800 \u202e") == "\\x00 \\x1b[0m \\ud800 \\u202e"
    assert escaped(escaped("<")) == "&lt;", "once"
    assert isinstance(paragraph("a"), Html) and escaped(7) == "7"


def test_numbers_stand_on_the_right_in_few_digits():
    read = table([("a", 1234567, 0.123456789, True), ("b", 3, 1e9, None)], ("", "n", "x", "y"))
    assert "1,234,567" in read and "0.12346" in read and "1,000,000,000" in read
    assert read.count('class="number"') == 2 * 3, "two columns and their heads"
    assert "<td>true</td>" in read and "<td>null</td>" in read
    assert '<th scope="row">a</th>' in read and '<th scope="col"></th>' in read


def test_data_of_any_form_is_shown():
    tasks = {"one": {"n": 1, "mean": 0.5}, "two": {"n": 2, "mean": 0.25}}
    made = data_table({"model": "<m>", "tasks": tasks}, "evaluation.json")
    text = Reader(made).text
    assert text[:3] == ["evaluation.json", "model", "<m>"]
    assert text[3:] == [
        "evaluation.json: tasks",
        "n",
        "mean",
        "one",
        "1",
        "0.5",
        "two",
        "2",
        "0.25",
    ]
    rows = data_table([{"i": i, "j": -i} for i in range(60)])
    assert rows.count("<tr>") == 51 and "10 further rows are left out" in rows
    assert rows.startswith("<details>"), "many rows are not open"
    results = [{"name": "lambada", "metrics": {"acc": {"value": 0.5, "se": 0.1}}}, {"name": "b"}]
    assert Reader(data_table({"results": results}, "e.json")).text == [
        *("e.json: results: lambada", "name", "lambada"),
        *("e.json: results: lambada: metrics", "value", "se", "acc", "0.5", "0.1"),
        *("e.json: results: b", "name", "b"),
    ]
    for odd in ([1, [2, {"<": "3"}]], "text", None, [], {}, {"a": {}}, {"a": [[]], "b": 1}):
        Reader(data_table(odd, "odd"))
    assert "further characters" in data_table([["x" * 9000]])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-9, 12345.6, "nan"])
def test_any_number_is_shown(value):
    assert page.shown(value) == {12345.6: "12,346", -1e-9: "-1e-09"}.get(value, str(value))


def test_a_picture_is_inside_the_page_and_always_the_same():
    def draw():
        figure = new_figure(3.0, 2.0)
        figure.subplots().plot([1, 2], [2, 1])
        return page.picture(figure, 'a "line"', "falls")

    read = Reader(draw())
    attributes = dict(read.attributes)
    assert attributes["src"].startswith("data:image/svg+xml;base64,")
    assert attributes["alt"] == 'a "line"' and attributes["width"] == "288"
    assert draw() == draw()


def test_the_whole_page_is_sound_and_loads_nothing():
    sections = {"The model": [paragraph("one")], "Next <2>": [folded("more", "two")]}
    text = whole("<run>", [paragraph("lead")], sections, "the end")
    read = Reader(text)
    assert text.startswith("<!DOCTYPE html>\n")
    assert "<title>&lt;run&gt;</title>" in text and "default-src &#x27;none&#x27;" not in text
    links = [value[1:] for name, value in read.attributes if name == "href"]
    ids = [value for name, value in read.attributes if name == "id"]
    assert links == ids == ["the-model", "next-2-"]
    assert not {"script", "link", "iframe", "object"} & set(read.tags)
    assert (
        "url(" not in text
        and "@import" not in text
        and "http" not in text.replace("http-equiv", "")
    )
