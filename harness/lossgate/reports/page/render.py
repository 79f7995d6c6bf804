# SPDX-License-Identifier: Apache-2.0
"""Renders the page: one HTML file that holds its style, its scripts, its numbers and Vega-Lite.

Its content security policy forbids the network, and allows only the scripts whose digests it names.
Vega interprets its expressions, so that no script needs ``eval``.
"""

from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import compress

import msgspec

from lossgate.base.errors import UsageError
from lossgate.reports.page.details import Details, Kept
from lossgate.reports.page.entries import PLURALS, SYMBOLS, Page, PageCell, count_states, entries_of, matrix_of
from lossgate.reports.page.headline import UNKNOWN, detects, headline, origin_of, problems_of
from lossgate.reports.shown_verdict import NOTHING

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("dom", "data", "words", "plots", "charts", "sections", "dialog", "filters", "grid", "main")
"""The parts of the page's script, in order."""

_SHOWN_PROBLEMS = 6
"""The most lines at the top of the page. The other lines can be opened below them."""


def render_page(page: Page) -> str:
    """Returns the page as HTML. The same page gives the same bytes.

    Raises:
        UsageError: if a package that the page needs is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        library = _library()
    except ImportError as error:
        raise UsageError(
            f"the HTML page needs the package {error.name}, which is not installed; pip install 'lossgate[html]'"
        ) from None
    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html.jinja").render(_context(page, library))


def _context(page: Page, library: str) -> dict[str, Any]:
    entries = entries_of(page)
    style, script = _asset("page.css"), _script()
    problems = problems_of(page.gate, entries)
    return {
        "page": page,
        "entries": entries,
        "matrix": matrix_of(entries),
        "headline": headline(page.gate, entries),
        "states": count_states(entries),
        "symbols": SYMBOLS,
        "plurals": PLURALS,
        "origin": origin_of(page, entries),
        "detects": detects,
        "unknown": UNKNOWN,
        "unclear": _explained(entries),
        "problems": problems[:_SHOWN_PROBLEMS],
        "more_problems": problems[_SHOWN_PROBLEMS:],
        "style": style,
        "script": script,
        "library": _packed(library.encode()),
        "index": _embedded(_index(entries, gate=page.gate is not None)),
        "details": _packed(msgspec.json.encode(_details(page, entries))),
        "policy": _policy(style=[style], scripts=[script, library]),
    }


def _explained(entries: Sequence[PageCell]) -> dict[str, str]:
    """Returns the words that cells show in place of an effect, with their meanings."""
    meanings = {
        NOTHING: "even an error of 100% in the scale of an output could have stayed hidden",
        UNKNOWN: "no smallest detectable error: the cell disagrees, or nothing was compared",
    }
    shown = {detects(entry) for entry in entries}
    return {sign: meaning for sign, meaning in meanings.items() if sign in shown}


def _index(entries: Sequence[PageCell], gate: bool) -> dict[str, Any]:
    """Returns the data that scripts read at once: columns of numbers of texts, and the texts."""
    texts = Kept()
    columns = {
        "candidate": [entry.key.candidate for entry in entries],
        "property": [entry.key.property for entry in entries],
        "layout": [entry.key.layout for entry in entries],
        "dtype": [entry.key.dtype for entry in entries],
        "where": [entry.key.place for entry in entries],
        "spec": [entry.spec for entry in entries],
        "state": [entry.state for entry in entries],
    }
    cells = {name: [texts.number(value) for value in column] for name, column in columns.items()}
    attention = [int(entry.needs_attention) for entry in entries]
    return {"gate": gate, "cells": cells, "attention": attention, "texts": texts.values}


def _details(page: Page, entries: Sequence[PageCell]) -> dict[str, Any]:
    """Returns the data that scripts read when the first cell is opened."""
    details = Details({run.run: run for run in page.runs})
    cells = [details.of(entry, page.history.get(entry.key, ())) for entry in entries]
    return {
        "cells": cells,
        "texts": details.texts.values,
        "problems": details.problems.values,
        "runs": details.runs.values,
    }


def _embedded(data: dict[str, Any]) -> str:
    """Returns JSON without characters that could end a script or a line."""
    text = msgspec.json.encode(data).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _packed(text: bytes) -> str:
    """Returns a text compressed, in characters that are safe in HTML."""
    return b64encode(compress(text)).decode()


def _policy(style: Sequence[str], scripts: Sequence[str]) -> str:
    """Returns the content security policy."""
    named = {"style-src": style, "script-src": scripts}
    sources = [f"{kind} {' '.join(map(_digest, texts))}" for kind, texts in named.items()]
    return "; ".join(["default-src 'none'", *sources, "base-uri 'none'", "form-action 'none'"])


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _script() -> str:
    parts = "".join(_asset(f"{name}.js") for name in _SCRIPTS)
    return _inline(f"(() => {{\n'use strict';\n{parts}}})();\n")


@cache
def _library() -> str:
    """Returns Vega-Lite with all that it needs, as one script."""
    import vl_convert

    return _inline(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def _inline(script: str) -> str:
    """Returns a script for HTML, in which nothing ends the script or starts a comment."""
    lines = script.replace("\r\n", "\n")
    return lines.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
