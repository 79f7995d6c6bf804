# SPDX-License-Identifier: Apache-2.0
"""Measures the HTML page of many cells: its size, and how fast it opens in Chromium.

    python benchmarks/page.py --cells 1000 --runs 10
    python benchmarks/page.py --cells 1000 --keep page.html    # and look at it

The cells are synthetic: records of real cells, renamed and with their scales drawn anew.
"""

import argparse
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice, product
from pathlib import Path
from random import Random
from time import perf_counter
from typing import TYPE_CHECKING

from msgspec.structs import replace as altered
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lossgate import Candidate, Layout, candidate
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.cell import Cell
from lossgate.engine.cell_record import SCHEMA, CellKey, CellRecord
from lossgate.engine.output_record import OutputRecord, PooledRecord
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.evidence.records import RunRecord
from lossgate.losses import SPECS
from lossgate.reports.page.entries import Page
from lossgate.reports.page.render import render_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
LAYOUTS = ("single", "dp=2", "cp=2", "tp=2", "dp=2,cp=2", "dp=2,tp=2", "cp=2,tp=2", "dp=2,cp=2,tp=2", "tp=4", "cp=4")
DTYPES = ("float32", "bfloat16")
PROPERTIES = ("agreement", "shift invariance", "batch invariance", "accumulation", "determinism")
RUN = RunRecord(
    schema=SCHEMA,
    run="1f",
    started="2026-01-31T12:00:00+00:00",
    commit="4f" * 20,
    modified=False,
    host="host",
    versions={"lossgate": "0.1.0", "torch": "2.13.0", "python": "3.12.1", "machine": "x86_64"},
    settings={"examples": 12, "seed": 0},
)


def _too_large(inputs: object, options: object, mesh: object) -> Tensor:
    """A kernel whose loss is too large by 1%."""
    outputs = DENSE.kernel(inputs, options, mesh)
    return 1.01 * outputs.loss


DENSE = dense_candidate(SPECS["nll"], "hidden")
TOO_LARGE = candidate("nll", head="hidden", axes=("dp", "cp", "tp"), name="too_large")(_too_large)


def real_record(kernel: Candidate, layout: str, dtype: str, examples: int) -> CellRecord:
    """Returns the record of a cell that is verified now, with a fixed time and duration."""
    cell = Cell(kernel, Layout.parse(layout), dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = run_cell(cell, Settings(examples=examples, shrink_calls=20))
    command = "lossgate replay .lossgate/failure.json" if result.failure else None
    return altered(result.record, replay=command, seconds=1.0, run=RUN.run, time=RUN.started)


def real_records(examples: int = 12) -> list[CellRecord]:
    """Returns the records of a right kernel and of a wrong one."""
    return [real_record(DENSE, layout, "float32", examples) for layout in ("single", "dp=2,cp=2")] + [
        real_record(TOO_LARGE, "single", "float32", examples)
    ]


def keys(candidates: Sequence[str]) -> Iterator[CellKey]:
    for name, property_, layout, dtype in product(candidates, PROPERTIES, LAYOUTS, DTYPES):
        yield CellKey(name, property_, layout, dtype, "simulated", "cpu")


def as_cell(record: CellRecord, key: CellKey, random: Random) -> CellRecord:
    """Returns a record under another key, with other numbers of the same size."""
    outputs = tuple(_with_other_numbers(output, random) for output in record.outputs)
    worst = tuple(altered(one, problem=one.problem | {"seed": random.getrandbits(32)}) for one in record.worst)
    named = {"property": key.property, "layout": key.layout, "dtype": key.dtype}
    return altered(record, candidate=key.candidate, **named, outputs=outputs, worst=worst)


def _older(record: CellRecord, random: Random, day: int) -> CellRecord:
    """Returns a record of the same cell, with other pooled scales."""
    outputs = tuple(altered(output, pooled=_pooled(output, random)) for output in record.outputs)
    time = datetime(2026, 1, 31, 12, tzinfo=UTC) - timedelta(days=day)
    return altered(record, run=f"older-{day}", outputs=outputs, time=time.isoformat(), verdict="AGREE")


def _with_other_numbers(output: OutputRecord, random: Random) -> OutputRecord:
    drawn = {name: tuple(s and round(s * random.random(), 4) for s in found) for name, found in output.shares.items()}
    scale = tuple(s * random.uniform(0.2, 1) for s in output.scale)
    return altered(output, shares=drawn, scale=scale, pooled=_pooled(output, random))


def _pooled(output: OutputRecord, random: Random) -> PooledRecord | None:
    if output.pooled is None:
        return None
    limit = output.pooled.limit * random.uniform(0.9, 1.1)
    return altered(output.pooled, scale=limit * random.uniform(-0.9, 0.9), limit=limit)


def synthetic_page(real: Sequence[CellRecord], cells: int, runs: int) -> Page:
    """Returns a page of synthetic cells, one in 20 of which disagrees.

    Args:
        real: the last one disagrees.
        cells: how many.
        runs: how many records there are of each cell.
    """
    random = Random(0)
    *right, wrong = real
    per_candidate = len(PROPERTIES) * len(LAYOUTS) * len(DTYPES)
    names = [f"fused_linear_loss_{i:02d}" for i in range(-(-cells // per_candidate))]
    newest: list[CellRecord] = []
    history: dict[CellKey, list[CellRecord]] = {}
    for number, key in enumerate(islice(keys(names), cells)):
        source = right[number % len(right)]
        newest.append(as_cell(source if number % 20 else wrong, key, random))
        history[key] = [_older(newest[-1], random, day) for day in range(runs - 1, 0, -1)]
    return Page(title="A page of synthetic cells", cells=newest, gate=None, history=history, runs=[RUN])


@dataclass(frozen=True)
class Opening:
    """How fast a page opened."""

    interactive: float
    """Seconds from the start of navigation until the table was drawn and took clicks."""
    opened: float
    """Seconds from a click on a cell until its first plot was drawn."""


def find_browser() -> str | None:
    """Returns the path of a Chromium, or None if there is none."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def browser_flags() -> list[str]:
    """Returns the flags that Chromium needs: as root it has no sandbox."""
    return ["--no-sandbox"] if getattr(os, "geteuid", lambda: 1)() == 0 else []


WATCH = """
new MutationObserver((_, watch) => {
  if (!document.documentElement?.dataset.ready) return;
  watch.disconnect();
  requestAnimationFrame(() => setTimeout(() => { window.shownAt = performance.now(); }));
}).observe(document, { attributes: true, subtree: true });
"""
"""Notes when the page is ready and its next frame has been drawn."""


def open_page(browser: "Browser", file: Path) -> Opening:
    """Opens a page and one of its cells, in a fresh tab."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.add_init_script(WATCH)
    tab.goto(file.as_uri())
    while not tab.evaluate("window.shownAt"):  # Playwright would wait by eval, which the page forbids
        tab.wait_for_timeout(20)
    start = perf_counter()
    tab.locator("#matrix td button").first.click()
    tab.wait_for_selector("#cell .chart svg")
    opening = Opening(tab.evaluate("window.shownAt") / 1000, perf_counter() - start)
    tab.close()
    return opening


def measure(file: Path, times: int) -> Opening:
    """Returns the slowest of several openings, after one that warms the browser up."""
    from playwright.sync_api import sync_playwright

    path = find_browser()
    if path is None:
        raise SystemExit(f"found none of {', '.join(BROWSERS)}; install Chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=browser_flags())
        all_ = [open_page(browser, file) for _ in range(times + 1)][1:]
        browser.close()
    return Opening(max(one.interactive for one in all_), max(one.opened for one in all_))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--runs", type=int, default=10, help="records of each cell, for the trend")
    parser.add_argument("--times", type=int, default=5, help="how often to open the page; the slowest counts")
    parser.add_argument("--keep", type=Path, help="leave the last page here")
    arguments = parser.parse_args()
    table = Table("cells", "runs", "MiB", "rendered in s", "interactive in s", "cell opened in s")
    real = real_records()
    for cells in arguments.cells:
        page = synthetic_page(real, cells, arguments.runs)
        start = perf_counter()
        html = render_page(page)
        seconds = perf_counter() - start
        with tempfile.TemporaryDirectory() as folder:
            file = arguments.keep or Path(folder) / "page.html"
            file.write_text(html, encoding="utf-8")
            opening = measure(file.resolve(), arguments.times)
        figures = (len(html.encode()) / 2**20, seconds, opening.interactive, opening.opened)
        table.add_row(f"{cells:,}", str(arguments.runs), *(f"{figure:.2f}" for figure in figures))
    Console().print(table)


if __name__ == "__main__":
    main()
