# SPDX-License-Identifier: Apache-2.0
"""Drives the page in Chromium, as a reader does with mouse, keyboard and phone."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from msgspec.structs import replace as altered
from page import browser_flags, find_browser
from playwright.sync_api import Browser, Locator, sync_playwright
from playwright.sync_api import Page as Tab

from lossgate.engine.cell_record import CellRecord, PropertyRecord
from lossgate.engine.output_record import OutputRecord
from lossgate.gate.gate_verdict import GateReason
from lossgate.reports.page.entries import Page
from lossgate.reports.page.render import render_page
from property_tests.meta.page.made import HOSTILE, blocker, failure, gate, gated, page, record

pytestmark = pytest.mark.xdist_group("browser")  # three browsers at once take three times as long

DESKTOP, PHONE = (1280, 900), (375, 812)

PLOTS_ARE_DRAWN = """() => {
  const shown = [...document.querySelectorAll('#cell .chart')].filter(c => !c.closest('details:not([open])'));
  return shown.length > 0 && shown.every(chart => chart.querySelector('svg'));
}"""


PLOTS_FIT = """() => [...document.querySelectorAll('#cell .chart svg')].every(
  plot => !plot.checkVisibility() || plot.getBoundingClientRect().right <= innerWidth
)"""


def browser_path() -> str:
    """Returns the path of a Chromium. Without one the test is skipped, or fails if it may not."""
    if path := find_browser():
        return path
    reason = "found no Chromium; install it (apt-get install chromium), so that `chromium` is on the PATH"
    if os.environ.get("LOSSGATE_NEEDS_BROWSER"):
        pytest.fail(f"LOSSGATE_NEEDS_BROWSER is set, but {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Starts the Chromium of this machine."""
    path = browser_path()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=browser_flags())
        yield chromium
        chromium.close()


@dataclass
class Reader:
    """A tab, and all that went wrong in it."""

    tab: Tab
    wrong: list[str] = field(default_factory=list)

    def watch(self, address: str) -> None:
        """Notes messages, errors, and requests for anything but the page itself."""
        self.tab.on("console", lambda message: self.wrong.append(f"{message.type}: {message.text}"))
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.tab.on(
            "request", lambda request: request.url.partition("#")[0] != address and self.wrong.append(request.url)
        )

    def cells(self) -> Locator:
        return self.tab.locator("#matrix td > button:visible")

    def has_focus(self, cell: Locator) -> bool:
        return bool(cell.evaluate("cell => cell === document.activeElement"))

    def wait_for_plots(self) -> None:
        """Waits until every plot that can be seen is drawn."""
        self.wait_until(PLOTS_ARE_DRAWN)

    def wait_until(self, condition: str) -> None:
        """Waits until an expression holds in the page, for half a minute at most."""
        for _ in range(300):  # Playwright would wait by eval, and the page's policy forbids that
            if self.tab.evaluate(condition):
                return
            self.tab.wait_for_timeout(100)
        raise AssertionError(f"this did not hold within 30 s: {condition}")

    def overflow(self) -> int:
        """Returns by how many pixels the page is wider than its window."""
        return int(self.tab.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


@dataclass
class Desk:
    """Opens pages for a reader."""

    browser: Browser
    folder: Path
    readers: list[Reader] = field(default_factory=list)

    def open(self, shown: Page, size: tuple[int, int] = DESKTOP, hash_: str = "", before: str = "") -> Reader:
        file = self.folder / f"page{len(self.readers)}.html"
        file.write_text(render_page(shown), encoding="utf-8")
        reader = Reader(self.browser.new_page(viewport={"width": size[0], "height": size[1]}))
        self.readers.append(reader)
        if before:
            reader.tab.add_init_script(before)
        reader.watch(file.as_uri())
        reader.tab.goto(file.as_uri() + hash_)
        reader.tab.wait_for_selector("html[data-ready]")
        return reader


@pytest.fixture
def desk(browser: Browser, tmp_path: Path) -> Iterator[Desk]:
    """Returns a desk. After the test nothing may have gone wrong on any page."""
    desk = Desk(browser, tmp_path)
    yield desk
    for reader in desk.readers:
        reader.tab.close()
    assert [wrong for reader in desk.readers for wrong in reader.wrong] == []


@pytest.mark.slow
def test_a_reader_filters_the_cells(desk: Desk, report: Page) -> None:
    reader = desk.open(report)
    tab = reader.tab
    assert reader.cells().count() == 40
    tab.get_by_label("Verdict", exact=True).select_option("disagrees")
    assert reader.cells().count() == 1
    assert tab.get_by_role("status").first.inner_text() == "1 of 40 cells shown."
    tab.get_by_label("Names contain").fill("BFLOAT16 dp=2")
    assert tab.get_by_role("status").first.inner_text().startswith("0 of 40 cells shown.")
    assert "text=BFLOAT16+dp%3D2" in tab.url
    tab.get_by_role("button", name="Show all").click()
    assert reader.cells().count() == 40
    assert "#" not in tab.url


@pytest.mark.slow
def test_a_link_shows_what_was_filtered(desk: Desk, report: Page) -> None:
    reader = desk.open(report, hash_="#verdict=disagrees&dtype=float32")
    assert reader.tab.get_by_label("Verdict", exact=True).input_value() == "disagrees"
    assert 0 < reader.cells().count() <= 2


def test_a_link_opens_a_cell(desk: Desk, report: Page) -> None:
    key = report.cells[0].key
    reader = desk.open(report, hash_=f"#cell={key.candidate}%7C{key.property}%7C{key.layout}%7C{key.dtype}%7C")
    assert reader.tab.get_by_role("dialog", name=key.candidate).is_visible()


def test_a_reader_opens_a_cell_with_the_mouse_and_sees_its_plots(desk: Desk, report: Page) -> None:
    reader = desk.open(report)
    tab = reader.tab
    wrong = tab.locator("#matrix td > button.disagrees").first
    wrong.click()
    dialog = tab.get_by_role("dialog")
    reader.wait_for_plots()
    for heading in (
        "The smallest problem that disagrees",
        "Pooled scale",
        "Trend of the pooled scale",
        "Errors against their limits",
        "Coverage",
        "Mutants",
        "Worst examples",
        "Where it comes from",
    ):
        assert dialog.get_by_role("heading", name=heading, exact=True).is_visible()
    plots = dialog.locator(".chart svg:visible").all()
    assert len(plots) >= 4
    for plot in plots:
        box = plot.bounding_box()
        assert box is not None
        assert box["width"] > 200
        assert box["height"] > 20
        assert plot.evaluate("plot => plot.querySelectorAll('path, rect, line').length") > 2
        assert plot.evaluate("plot => plot.closest('[role=graphics-document]').ariaLabel").endswith(".")
    tab.get_by_role("button", name="Close").click()
    assert not dialog.is_visible()
    assert reader.has_focus(wrong)


@pytest.mark.slow
def test_an_output_that_is_unfolded_draws_its_histogram(desk: Desk, report: Page) -> None:
    reader = desk.open(report)
    reader.cells().first.click()
    reader.wait_for_plots()
    before = reader.tab.locator("#cell .chart svg:visible").count()
    reader.tab.locator("#cell details.output:not([open]) > summary").first.click()
    reader.wait_for_plots()
    assert reader.tab.locator("#cell .chart svg:visible").count() == before + 1


@pytest.mark.slow
def test_a_reader_needs_no_mouse(desk: Desk, report: Page) -> None:
    reader = desk.open(report)
    tab = reader.tab
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    tab.keyboard.press("Enter")
    for _ in range(12):
        tab.keyboard.press("Tab")
        if reader.has_focus(reader.cells().first):
            break
    assert reader.has_focus(reader.cells().first)
    tab.keyboard.press("ArrowRight")
    second = reader.cells().nth(1)
    assert reader.has_focus(second)
    tab.keyboard.press("ArrowDown")
    below = tab.locator("#matrix td > button:focus")
    assert below.bounding_box()["y"] > second.bounding_box()["y"]
    assert abs(below.bounding_box()["x"] - second.bounding_box()["x"]) < 2
    tab.keyboard.press("ArrowUp")
    assert reader.has_focus(second)
    tab.keyboard.press("Enter")
    assert tab.get_by_role("dialog").is_visible()
    assert tab.evaluate("document.getElementById('cell').contains(document.activeElement)")
    reader.wait_for_plots()
    tab.keyboard.press("Escape")
    assert not tab.get_by_role("dialog").is_visible()
    assert reader.has_focus(second)


def test_tab_stops_at_one_cell_that_is_shown(desk: Desk, report: Page) -> None:
    reader = desk.open(report)
    for verdict in ("", "disagrees"):
        reader.tab.get_by_label("Verdict", exact=True).select_option(verdict)
        assert reader.tab.locator("#matrix button[tabindex='0']").count() == 1
        assert reader.tab.locator("#matrix button[tabindex='0']").is_visible()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_page_fits_its_window_and_cuts_no_number(
    desk: Desk, report: Page, size: tuple[int, int], scheme: str
) -> None:
    reader = desk.open(report, size)
    reader.tab.emulate_media(color_scheme=scheme)
    assert reader.overflow() <= 0
    cut = "cells => cells.filter(cell => cell.scrollWidth > cell.clientWidth + 1).map(cell => cell.textContent)"
    assert reader.cells().evaluate_all(cut) == []
    reader.tab.locator("#matrix td > button.disagrees").first.click()
    reader.wait_for_plots()
    assert reader.overflow() <= 0
    assert reader.tab.evaluate("cell.scrollWidth <= cell.clientWidth")
    reader.wait_until(PLOTS_FIT)  # seen to be a moment later than they are drawn, on a busy machine


CONTRAST = """() => {
  const linear = c => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const numbers = s => s.match(/[\\d.]+/g).map(Number);
  const light = s => { const [r, g, b] = numbers(s).map(linear); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const paper = e => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (numbers(colour)[3] !== 0) return light(colour);
    }
    return light('rgb(255, 255, 255)');
  };
  const low = [];
  for (const e of document.querySelectorAll('body *:not(svg *, script)')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility()) continue;
    const [a, b] = [light(getComputedStyle(e).color), paper(e)].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(`${e.tagName}.${e.className}: ${e.textContent.slice(0, 40)}`);
  }
  return low;
}"""
"""Returns the elements whose text has a lower contrast than WCAG AA asks for."""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_the_contrast_of_wcag_aa(desk: Desk, scheme: str) -> None:
    wrong = record("wrong", verdict="DISAGREE", reasons=("too large",), failure=failure("small"))
    unsure = record("unsure", verdict="INCONCLUSIVE", mde=None)
    cells = [
        gated(wrong, blocker(GateReason.DISAGREE, "wrong")),
        gated(unsure, blocker(GateReason.INCONCLUSIVE, "unsure")),
        gated("gone", blocker(GateReason.MISSING, "gone")),
        gated(record("right"), blocker(GateReason.STALE, "right")),
    ]
    reader = desk.open(page(wrong, unsure, record("right"), gate=gate(*cells)))
    reader.tab.emulate_media(color_scheme=scheme)
    assert reader.tab.evaluate(CONTRAST) == []
    reader.tab.locator("button.disagrees").first.click()
    reader.tab.get_by_role("heading", name="Where it comes from").wait_for()
    assert reader.tab.evaluate(CONTRAST) == []


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_do_nothing(desk: Desk, text: str, real: Sequence[CellRecord]) -> None:
    outputs = tuple(_renamed(output, text) for output in real[-1].outputs[:2])
    goals = {"coverage": {text: 1}, "required": (text,), "surviving": (text,), "resources": {text: {text: 1.0}}}
    cell = record(
        text, layout=text, verdict="DISAGREE", reasons=(text,), failure=failure(text), outputs=outputs, **goals
    )
    verdict = gate(gated(cell, blocker(GateReason.DISAGREE, message=text), excused=text))
    reader = desk.open(page(cell, gate=verdict, title=text, history={cell.key: [cell]}))
    reader.cells().first.click()
    reader.wait_for_plots()
    for summary in reader.tab.locator("#cell details:not([open]) > summary").all():
        if summary.is_visible():
            summary.click()
    reader.wait_for_plots()
    assert reader.tab.evaluate("window.hit") is None
    assert reader.tab.locator("#cell-name").text_content() == text
    assert reader.tab.locator("img").count() == 0


def _renamed(output: OutputRecord, name: str) -> OutputRecord:
    """Returns an output of another name, with one statistic of that name too."""
    return altered(output, name=name, shares=dict(zip([name], output.shares.values(), strict=False)))


def test_a_missing_cell_opens_and_says_so(desk: Desk) -> None:
    reader = desk.open(page(gate=gate(gated("gone", blocker(GateReason.MISSING, "gone", "No evidence tells of it.")))))
    reader.tab.get_by_role("listitem").get_by_role("button").first.click()
    dialog = reader.tab.get_by_role("dialog", name="gone")
    assert dialog.get_by_text("The cell is missing.").is_visible()
    assert dialog.get_by_text("No evidence tells of it.").is_visible()


TICKS_TOUCH = """() => {
  const axes = [...document.querySelectorAll('#cell .chart svg:not(details:not([open]) svg) .role-axis-label')];
  const boxes = axes.map(axis => [...axis.querySelectorAll('text')]
    .filter(t => t.textContent && getComputedStyle(t).opacity !== '0').map(t => t.getBoundingClientRect()));
  const near = (a, b) => a.left < b.right + 4 && b.left < a.right + 4 && a.top < b.bottom && b.top < a.bottom;
  return boxes.filter(all => all.some((a, i) => all.some((b, j) => i < j && near(a, b)))).length;
}"""
"""Returns how many axes have labels with less than 4 px between them."""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
@pytest.mark.parametrize(
    ("times", "names"),
    [
        (["2026-01-31T05:30:00", "2026-01-31T06:30:00", "2026-01-31T12:00:00"], ["05:30", "06:30", "12:00"]),
        (["2026-01-31T05:30:01", "2026-01-31T05:30:02"], ["05:30:01", "05:30:02"]),
        (["2026-01-30T05:30:00", "2026-01-31T05:30:00", "2026-01-31T06:30:00"], ["01-3005:30", "01-3106:30"]),
        (
            ["2025-12-31T05:30:00", "2026-01-31T05:30:00", "2026-01-31T06:30:00"],
            ["2025-12-3105:30", "2026-01-3106:30"],
        ),
        (["2026-01-31T05:30:00", "2026-01-31T05:30:00"], ["run\N{NO-BREAK SPACE}1", "run\N{NO-BREAK SPACE}2"]),
    ],
)
def test_runs_of_one_day_have_names_that_differ_and_do_not_touch(
    desk: Desk, real: Sequence[CellRecord], size: tuple[int, int], times: list[str], names: list[str]
) -> None:
    *older, now = [altered(real[0], time=f"{time}+00:00", run=f"run-{i}") for i, time in enumerate(times)]
    reader = desk.open(page(now, history={now.key: [now, *older]}), size)
    reader.cells().first.click()
    reader.wait_for_plots()
    trend = reader.tab.locator("#cell section", has=reader.tab.get_by_role("heading", name="Trend of the pooled scale"))
    shown = trend.locator(".chart svg .role-axis-label text").all_text_contents()
    assert [name for name in names if name not in shown] == []
    assert reader.tab.evaluate(TICKS_TOUCH) == 0


@pytest.mark.slow
def test_a_cell_that_fails_says_each_thing_once(desk: Desk, real: Sequence[CellRecord]) -> None:
    wrong = real[-1]
    command = wrong.replay
    wrong_why = "; ".join(wrong.told)
    message = f"it disagrees: {wrong_why}. Replay: {command}"
    closed = replace(blocker(GateReason.DISAGREE, message=message), cell=wrong.key)
    reader = desk.open(page(wrong, gate=gate(gated(wrong, closed, required=False))))
    reader.tab.locator("#matrix td > button").first.click()
    reader.wait_for_plots()
    said = reader.tab.locator("#cell").inner_text()
    assert {text: said.count(text) for text in (*wrong.reasons, command)} == dict.fromkeys((*wrong.reasons, command), 1)
    for sentence in (
        "A kernel that is wrong closes the gate whether a rule asks for the cell or not.",
        "These numbers are of the smallest problem that disagrees.",
    ):
        assert sentence in said
    assert ", limit \u00b1" in reader.tab.locator("#cell").text_content()


def test_a_cell_tells_to_which_properties_it_was_held(desk: Desk) -> None:
    held = (
        PropertyRecord(name="no-grad", problems=2, seconds=0.25),
        PropertyRecord(name="masked-nan", problems=1, findings=("wrong",)),
        PropertyRecord(name="idle-rank", problems=0),
        PropertyRecord(name="int32-ids", problems=0, exempt="it has none"),
    )
    broken = record(verdict="DISAGREE", numbers="AGREE", reasons=("property masked-nan: wrong",), properties=held)
    reader = desk.open(page(broken))
    reader.tab.locator("#matrix td > button").first.click()
    reader.tab.get_by_text("all properties").click()
    said = reader.tab.locator("#cell").inner_text()
    assert "The cell breaks a promise." in said
    assert "Numbers agree, 1 promise broken: masked-nan." in said
    assert "Broken: masked-nan." in said
    for row in (
        ("no-grad", "kept"),
        ("masked-nan", "broken"),
        ("idle-rank", "no problem says anything about it"),
        ("int32-ids", "exempt: it has none"),
    ):
        assert re.search(r"\s+".join(map(re.escape, row)), said)


def test_a_cell_says_which_known_mistakes_its_problems_show(desk: Desk) -> None:
    cell = record(mistakes_shown=2, mistakes_surviving=("the mask is ignored", "a sum is missing"))
    reader = desk.open(page(cell))
    reader.cells().first.click()
    section = reader.tab.locator("#cell section", has=reader.tab.get_by_role("heading", name="Known mistakes"))
    said = section.inner_text()
    assert "The problems would have shown 2 known mistakes." in said
    assert "These would have passed: the mask is ignored; a sum is missing." in said


def test_words_in_tables_do_not_break_on_a_phone(desk: Desk, report: Page) -> None:
    reader = desk.open(report, PHONE)
    reader.tab.locator("#matrix td > button.disagrees").first.click()
    reader.wait_for_plots()
    table = reader.tab.locator("#cell section", has=reader.tab.get_by_role("heading", name="Worst examples"))
    broken = """cells => cells.flatMap(cell => {
      const words = [];
      const walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
      for (let node; (node = walk.nextNode());) {
        for (const { 0: word, index } of node.data.matchAll(/[a-z]+/gi)) {
          const range = document.createRange();
          range.setStart(node, index);
          range.setEnd(node, index + word.length);
          if (range.getClientRects().length > 1) words.push(word);
        }
      }
      return words;
    })"""
    assert table.locator("th, td").evaluate_all(broken) == []
    assert reader.overflow() <= 0


def test_a_browser_that_cannot_unpack_the_details_gets_a_sentence(desk: Desk, report: Page) -> None:
    reader = desk.open(report, before="delete window.DecompressionStream")
    reader.cells().first.click()
    reader.tab.get_by_role("alert").wait_for()
    assert "because it has no DecompressionStream. Open the page in" in reader.tab.get_by_role("alert").inner_text()


def test_a_page_that_was_damaged_says_so(desk: Desk, report: Page) -> None:
    reader = desk.open(report, before="window.atob = () => 'damaged'")
    reader.cells().first.click()
    reader.tab.get_by_role("alert").wait_for()
    assert reader.tab.get_by_role("alert").inner_text().startswith("The page is damaged or was cut")


def test_the_command_is_copied(desk: Desk, report: Page) -> None:
    reader = desk.open(report)
    reader.tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    reader.tab.locator("#matrix td > button.disagrees").first.click()
    reader.tab.get_by_role("button", name="Copy").click()
    reader.tab.get_by_role("button", name="Copied").wait_for()
    assert reader.tab.evaluate("navigator.clipboard.readText()") == "lossgate replay .lossgate/failure.json"


def test_what_goes_wrong_on_a_page_is_noticed(browser: Browser, tmp_path: Path) -> None:
    """The desk's own check fails on a page that asks for the network and prints to the console."""
    file = tmp_path / "bad.html"
    file.write_text(
        "<script>console.log('hello'); new Image().src = 'http://127.0.0.1:9/x'; throw Error('bad')</script>"
    )
    reader = Reader(browser.new_page())
    reader.watch(file.as_uri())
    reader.tab.goto(file.as_uri())
    reader.tab.close()
    assert {"log: hello", "bad", "http://127.0.0.1:9/x"} <= set(reader.wrong)


@pytest.mark.slow
@pytest.mark.parametrize(("needed", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_without_a_browser_the_tests_say_how_to_get_one(
    needed: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("LOSSGATE_NEEDS_BROWSER", needed)
    with pytest.raises(outcome, match="apt-get install chromium"):
        browser_path()
