# SPDX-License-Identifier: Apache-2.0
"""Tests of the page's HTML: it is one file, needs no network, and runs no text of others."""

import json
import re
import sys
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any
from zlib import decompress

import pytest
from page import synthetic_page

from lossgate.base.errors import UsageError
from lossgate.engine.cell_record import CellRecord
from lossgate.gate.gate_verdict import GateReason
from lossgate.reports.page.entries import Page
from lossgate.reports.page.render import render_page
from property_tests.meta.page.made import HOSTILE, blocker, failure, gate, gated, page, record

pytestmark = pytest.mark.xdist_group("browser")  # one worker verifies what the tests of pages share


class Elements(HTMLParser):
    """Collects the elements of a page: their attributes, and the text of scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, Mapping[str, str | None]]] = []
        self.texts: list[str] = []
        self.words: list[str] = []
        self._raw = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._raw = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._raw = False

    def handle_data(self, data: str) -> None:
        (self.texts if self._raw else self.words).append(data)

    def named(self, tag: str) -> list[Mapping[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def embedded(html: str, name: str) -> Any:
    """Returns the JSON that a page embeds."""
    match = re.search(rf'<script type="[^"]+" id="{name}">(.*?)</script>', html, re.DOTALL)
    assert match is not None
    return json.loads(match[1] if name == "index" else decompress(b64decode(match[1])))


@pytest.mark.slow
def test_the_page_refers_to_nothing_outside_of_itself(report: Page) -> None:
    elements = Elements(render_page(report))
    assert not elements.named("link")
    references = [
        value
        for _, attributes in elements.found
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data", "poster", "style", "onclick", "onerror", "onload")
    ]
    assert references == ["#cells"]
    style = elements.texts[0]
    assert "url(" not in style
    assert "@import" not in style


@pytest.mark.slow
def test_the_policy_forbids_the_network_and_names_each_script_and_style_by_digest(report: Page) -> None:
    html = render_page(report)
    elements = Elements(html)
    policy = elements.named("meta")[1]
    assert policy["http-equiv"] == "Content-Security-Policy"
    rules = dict(rule.split(" ", 1) for rule in str(policy["content"]).split("; "))
    library = re.search(r'id="library">(.*?)</script>', html, re.DOTALL)
    assert library is not None
    style, *_, script = elements.texts
    assert rules == {
        "default-src": "'none'",
        "style-src": digest(style),
        "script-src": f"{digest(script)} {digest(decompress(b64decode(library[1])).decode())}",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


@pytest.mark.slow
def test_the_same_page_gives_the_same_bytes(report: Page) -> None:
    assert render_page(report) == render_page(replace(report, cells=tuple(report.cells)))


def test_the_order_of_the_records_does_not_matter(report: Page) -> None:
    assert render_page(report) == render_page(replace(report, cells=list(reversed(report.cells))))


def hostile_page(text: str) -> Page:
    """Returns a page that says a text wherever evidence, policy or names can."""
    names = dict.fromkeys(("property", "layout", "dtype", "spec", "head", "source", "time"), text)
    cell = record(text, **names, verdict="DISAGREE", causes=(text,))
    wrong = blocker(GateReason.DISAGREE, message=text)
    verdict = gate(gated(cell, wrong, excused=text), others=[replace(wrong, where=text)])
    return page(cell, record("b", failure=failure(text), reasons=(text,)), gate=verdict, title=text)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_stay_texts(text: str) -> None:
    html = render_page(hostile_page(text))
    elements = Elements(html)
    assert [attributes.get("id") for attributes in elements.named("script")] == ["index", "details", "library", None]
    assert not elements.named("img")
    index, details = embedded(html, "index"), embedded(html, "details")
    assert text in index["texts"]
    assert text in details["texts"]
    assert any(text in word for word in elements.words)
    assert not re.search("[\u2028\u2029<>]", json_text(html))


def json_text(html: str) -> str:
    return html.partition('id="index">')[2].partition("</script>")[0]


def test_every_cell_is_in_the_table_with_its_verdict_in_words(report: Page) -> None:
    html = render_page(report)
    table = html[html.index("<table") : html.index("</table>")]
    assert len(re.findall("<button", table)) == 40
    assert len(re.findall('<span class="word">disagrees', table)) == 1
    assert len(re.findall('<span class="word">promise broken', table)) == 1  # it is of another property than agreement
    assert len(re.findall('<span class="word">agrees', table)) == 38


def test_a_missing_cell_is_in_the_table() -> None:
    verdict = gate(gated("gone", blocker(GateReason.MISSING, "gone", "No evidence tells of it.")))
    html = render_page(page(gate=verdict))
    assert '<span class="word">missing, keeps the gate closed</span> <span class="mde">missing</span>' in html
    assert "No evidence tells of it." in html


@pytest.mark.parametrize(
    ("changes", "sign", "meaning"),
    [
        ({"verdict": "INCONCLUSIVE", "mde": None}, "nothing", "even an error of 100%"),
        ({"verdict": "DISAGREE", "mde": None}, "\N{EN DASH}", "no smallest detectable error: the cell disagrees"),
    ],
)
def test_the_legend_explains_what_stands_instead_of_an_effect(changes: dict[str, Any], sign: str, meaning: str) -> None:
    assert f"<li><b>{sign}</b> {meaning}" in render_page(page(record(**changes)))
    assert meaning not in render_page(page(record()))


def test_commit_policy_versions_and_date_stand_at_the_top() -> None:
    top = render_page(page(gate=gate(gated(record())))).partition("<header")[2].partition("</header>")[0]
    facts = [("commit", "4f" * 6), ("policy", "gate.toml"), ("lossgate", "0.1.0"), ("evidence of", "2026-01-31")]
    assert [name for name, value in facts if f"{name} <bdi>{value}" not in top] == []


def test_a_page_without_cells_says_so() -> None:
    html = render_page(page())
    assert "There are no cells." in html
    assert "<table" not in html


def test_long_lists_of_blockers_are_folded() -> None:
    html = render_page(page(gate=gate(others=[blocker(GateReason.DAMAGED, message=f"Line {i}.") for i in range(1200)])))
    before, _, after = html.partition("<summary>1,194 more</summary>")
    assert "Line 5." in before
    assert "Line 6." not in before
    assert "Line 1199." in after


@pytest.mark.slow
def test_a_thousand_cells_fit_into_five_mebibytes(real: Sequence[CellRecord]) -> None:
    html = render_page(synthetic_page(real, cells=1000, runs=10))
    assert len(html.encode()) < 5 * 2**20
    assert len(embedded(html, "details")["cells"]) == 1000


@pytest.mark.parametrize("package", ["jinja2", "vl_convert"])
def test_a_package_that_is_missing_is_named_with_the_way_out(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lossgate.reports.page import render

    render._library.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"needs the package {package}, .*; pip install 'lossgate\[html\]'"):
        render_page(page())


def test_reading_the_module_imports_neither_torch_nor_jinja() -> None:
    import subprocess

    code = "import lossgate.reports.page.render, sys; print(*{'torch', 'jinja2', 'vl_convert'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
