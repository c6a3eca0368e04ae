# SPDX-License-Identifier: Apache-2.0
"""A page of HTML that needs nothing but itself: text, tables and pictures as strings.

Every function returns HTML that is safe to put into a page: what it is given is taken as text, and
escaped. Pictures are inside the page. What a page says is `page_parts.py`'s.
"""

import base64
import html
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class Html(str):
    """What the functions of this file have made; every other text is escaped where it is shown."""


ROWS, FOLDED_ROWS = 50, 12
"""Of a table of unknown length, those that are shown, and how many are not shown at once."""

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --faint: #595959; --line: #d5d5d5;
  --ground: #ffffff; --raised: #f4f5f7; --link: #1a5fb4; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --faint: #b4b4b4; --line: #484848;
  --ground: #17191c; --raised: #23262b; --link: #8ab8f0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 54rem; padding: 1.5rem 1rem 4rem; background: var(--ground);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { margin: 0; font-size: 1.9rem; line-height: 1.2; }
h2 { margin: 2.8rem 0 .8rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line);
  font-size: 1.3rem; }
p { margin: .6rem 0; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: 0; margin: 1rem 0 0;
  list-style: none; }
a { color: var(--link); }
.lead { font-size: 1.1rem; }
.note, figcaption, caption, footer { color: var(--faint); font-size: .9rem; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; min-width: min(24rem, 100%); overflow-wrap: break-word;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .3rem; }
th, td { padding: .25rem 1rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; min-width: 3.5rem; }
th { font-weight: 600; }
tbody th { font-weight: 500; }
td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
figure { margin: 1rem 0; }
figure img { display: block; max-width: 100%; height: auto; padding: .5rem; background: #ffffff;
  border: 1px solid var(--line); border-radius: .4rem; }
figcaption { margin-top: .3rem; }
pre { margin: .6rem 0; padding: .7rem .9rem; background: var(--raised); border-radius: .4rem;
  white-space: pre-wrap; unicode-bidi: isolate; font: .87rem/1.45 ui-monospace, monospace; }
summary { cursor: pointer; padding: .2rem 0; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: .6rem; }
@media print { details > * { display: block; } nav { display: none; } }
"""

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'"
"""No script runs and nothing is loaded, whatever a text of the run may be."""


def escaped(text: Any) -> Html:
    """Any text as HTML that shows it, control characters and lone surrogates spelled out."""
    if isinstance(text, Html):
        return text
    return Html(html.escape(_CONTROLS.sub(lambda c: repr(c[0])[1:-1], str(text)), quote=True))


_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]"
)
"""What HTML forbids, and what turns the direction of the text behind it."""


def joined(parts: Iterable[Any], between: str = "") -> Html:
    """Several texts or pieces of HTML in one; None is left out."""
    return Html(between.join(escaped(part) for part in parts if part is not None))


def tag(name: str, *content: Any, **attributes: str) -> Html:
    """An element. A trailing underscore of an attribute's name is dropped: `class_`."""
    given = "".join(f' {key.rstrip("_")}="{escaped(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{given}>{joined(content)}</{name}>")


def paragraph(*content: Any) -> Html:
    """A paragraph."""
    return tag("p", *content)


def missing(what: str, why: str) -> Html:
    """The line in the place of something that is not there."""
    return tag("p", f"No {what}: {why}.", class_="note")


def folded(title: str, *content: Any) -> Html:
    """Content that opens with a click."""
    return tag("details", tag("summary", title), *content)


def preformatted(text: str) -> Html:
    """A text with its own lines and spaces."""
    return tag("pre", text, dir="auto")


def table(
    rows: Sequence[Sequence[Any]], head: Sequence[str] = (), *, caption: str | None = None
) -> Html:
    """A table whose first column names its rows. Numbers stand on the right, floats in 5 digits.

    Args:
      rows: Cells.
      head: Names of the columns.
      caption: Above it.
    """
    n = max((len(row) for row in rows), default=0)
    right = [all(_is_number(row[i]) for row in rows if i < len(row)) for i in range(n)]

    def cell(name: str, i: int, value: Any, **more: str) -> Html:
        more |= {"class_": "number"} if i < n and right[i] else {}
        return tag(name, shown(value), **more)

    lines = [
        tag("tr", cell("th", 0, row[0], scope="row"), *(cell("td", i, x) for i, x in _rest(row)))
        for row in rows
    ]
    top = tag("tr", *(cell("th", i, name, scope="col") for i, name in enumerate(head)))
    parts = [
        tag("caption", caption) if caption else None,
        tag("thead", top) if head else None,
        tag("tbody", *lines),
    ]
    return tag("div", tag("table", *parts), class_="wide", tabindex="0")


def _rest(row: Sequence[Any]) -> Iterable[tuple[int, Any]]:
    return list(enumerate(row))[1:]


def picture(figure: Any, alt: str, caption: str) -> Html:
    """A figure of matplotlib inside the page, as SVG; the alternative text is for who cannot see.

    Args:
      figure: As `jaxgpt.study.plots` makes them.
      alt: What is to be seen.
      caption: Below it.
    """
    import matplotlib

    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "jaxgpt"}):
        figure.savefig(content, format="svg", metadata={"Date": None})
    data = base64.b64encode(content.getvalue()).decode()
    width = str(round(figure.get_figwidth() * 96))
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{escaped(alt)}" width="{width}">'
    return tag("figure", Html(image), tag("figcaption", caption))


def data_table(value: Any, name: str = "") -> Html:
    """Plain data of unknown form, as JSON has it, in tables; what is no table stays JSON.

    Args:
      value: Lists, dicts and scalars.
      name: What it is called.
    """
    if isinstance(value, Mapping):
        flat = {key: x for key, x in value.items() if not isinstance(x, Mapping | list)}
        deep = {key: x for key, x in value.items() if key not in flat}
        if not flat and len({frozenset(x) for x in deep.values() if isinstance(x, Mapping)}) == 1:
            if all(_is_flat(x) for x in deep.values()):  # rows of one form
                return data_table([{"": key, **x} for key, x in deep.items()], name)
        parts = [table(list(flat.items()), caption=name or None)] if flat else []
        parts += [data_table(x, f"{name}: {key}" if name else str(key)) for key, x in deep.items()]
        return joined(parts)
    if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
        return _rows_table(value, name)
    text = json.dumps(value, indent=1, ensure_ascii=False)
    return folded(name or "data", preformatted(cut(text, 4000)))


def _rows_table(value: Sequence[Mapping], name: str) -> Html:
    """Several dicts: rows of a table, or one after the other where there is more inside them."""
    left = len(value) - ROWS
    more = tag("p", f"{left:,} further rows are left out.", class_="note") if left > 0 else None
    if not all(_is_flat(row) for row in value):
        each = [(row.get("name", number), row) for number, row in enumerate(value[:ROWS], 1)]
        return joined([*(data_table(row, f"{name}: {said}") for said, row in each), more])
    head = list(dict.fromkeys(key for row in value for key in row))
    rows = [[row.get(key, "") for key in head] for row in value[:ROWS]]
    if len(value) > FOLDED_ROWS:
        return folded(f"{name}: {len(value)} rows", table(rows, head), more)
    return table(rows, head, caption=name or None)


def cut(text: str, length: int) -> str:
    """The beginning of a long text, and how much is left out."""
    left = len(text) - length
    return text if left <= 0 else f"{text[:length]}\n... {left:,} further characters"


def whole(title: str, lead: Sequence[Any], sections: Mapping[str, Sequence[Any]], end: str) -> str:
    """The page.

    Args:
      title: Of the page.
      lead: Paragraphs below the title.
      sections: What stands below each heading.
      end: The last line.
    """
    ids = {name: re.sub(r"\W+", "-", name.lower()) for name in sections}
    links = [tag("li", tag("a", name, href=f"#{ids[name]}")) for name in sections]
    body = [
        tag("header", tag("h1", title), *lead, tag("nav", tag("ul", *links), aria_label="Parts")),
        tag(
            "main",
            *(tag("section", tag("h2", name, id=ids[name]), *sections[name]) for name in sections),
        ),
        tag("footer", end),
    ]
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escaped(title)}</title>",
        f"<style>{STYLE}</style>",
    ]
    lines = ["<!DOCTYPE html>", '<html lang="en">', "<head>", *head, "</head>", "<body>"]
    return "\n".join([*lines, *body, "</body>", "</html>", ""])


def shown(value: Any) -> str:
    """A value for people: numbers in a few digits, null for None."""
    if isinstance(value, Html):
        return value
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.5g}" if not math.isfinite(value) or abs(value) < 1e4 else f"{value:,.0f}"
    return str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_flat(value: Any) -> bool:
    return isinstance(value, Mapping) and not any(
        isinstance(x, Mapping | list) for x in value.values()
    )
