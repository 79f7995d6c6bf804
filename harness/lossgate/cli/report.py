# SPDX-License-Identifier: Apache-2.0
"""``lossgate report``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from lossgate.cli.app import Exit, app, write_outputs

if TYPE_CHECKING:
    from lossgate.engine.cell_record import CellKey, CellRecord
    from lossgate.evidence.gather import Gathered, KeptRecords
    from lossgate.evidence.reader import Where


@app.command
def report(
    *files: Path,
    cell: Annotated[list[str] | None, Parameter(negative=())] = None,
    html: Path | None = None,
) -> int:
    """Show what evidence says, without a policy.

    Args:
        files: Files that verify --evidence wrote, or folders with such files (*.jsonl).
        cell: Show everything about the cells with this name, or about the cells of this candidate;
            * stands for any text; may be repeated.
        html: Write a page about the cells to this file.
    """
    from lossgate.base.errors import UsageError
    from lossgate.evidence.gather import KeptRecords, gather
    from lossgate.reports.evidence_table import troubles

    if not files:
        raise UsageError("report: nothing named; expected files or folders that verify --evidence wrote")
    kept, patterns = KeptRecords(), cell or ["*"]

    def is_named(key: CellKey) -> bool:
        return any(key.matches(pattern) for pattern in patterns)

    def keep(record: CellRecord, where: Where) -> None:
        if is_named(record.key):
            kept.keep(record, where)

    gathered = gather(files, keep if cell or html else None)
    named = [key for key in gathered.cells if is_named(key)]
    found = troubles(gathered)
    if cell:
        _print_cells(gathered, kept, named, found, patterns)
    else:
        _print_all(gathered, found)
    code = exit_code(gathered, named, found)
    if html is None:
        return code
    return write_outputs({"html": (html, lambda: _page(gathered, kept))}, code)


def _print_all(gathered: Gathered, troubles: Sequence[str]) -> None:
    from lossgate.reports.console import make_console
    from lossgate.reports.evidence_table import print_report

    print_report(make_console(), gathered, troubles)


def _print_cells(
    gathered: Gathered,
    kept: KeptRecords,
    named: Sequence[CellKey],
    troubles: Sequence[str],
    patterns: Sequence[str],
) -> None:
    """Prints everything that is known about the named cells.

    Raises:
        UsageError: if there are cells, but none of them is named.
    """
    from lossgate.base.errors import UsageError
    from lossgate.reports.cell_story import print_story
    from lossgate.reports.console import make_console
    from lossgate.reports.evidence_table import listed, print_troubles

    if gathered.cells and not named:
        raise UsageError(
            f"--cell {' '.join(patterns)}: no cell has such a name; expected the name of a candidate or of a cell, "
            f"where * stands for any text: {listed(list(gathered.cells))}"
        )
    console, newest = make_console(), kept.newest()
    for key in named:
        print_story(console, newest[key], gathered.cells[key])
    print_troubles(console, troubles)


def exit_code(gathered: Gathered, cells: Iterable[CellKey], troubles: Sequence[str]) -> Exit:
    """Returns the exit code of the worst of the newest results.

    A record that contradicts its own numbers counts as no evidence, and not as a disagreement.
    """
    from lossgate.reports.evidence_table import trusted

    newest = trusted(gathered)
    verdicts = {_counts_as(gathered, newest[key]) for key in cells if key in newest}
    if "DISAGREE" in verdicts:
        return Exit.DISAGREE
    return Exit.INCONCLUSIVE if troubles or "INCONCLUSIVE" in verdicts else Exit.AGREE


def _counts_as(gathered: Gathered, cell: CellRecord) -> str:
    """Returns the verdict that counts for a cell by the settings of its run."""
    run = gathered.runs.get(cell.run)
    return cell.counts_as(numbers_only=run is not None and run.settings.get("numbers_only") is True)


def _page(gathered: Gathered, kept: KeptRecords) -> str:
    """Returns a page about the cells that were kept."""
    from lossgate.reports.page.entries import Page
    from lossgate.reports.page.render import render_page

    results = kept.by_cell()
    page = Page(
        title="Evidence",
        cells=[of_cell[-1] for of_cell in results.values()],
        gate=None,
        history={key: of_cell[:-1] for key, of_cell in results.items() if len(of_cell) > 1},
        runs=list(gathered.runs.values()),
    )
    return render_page(page)
