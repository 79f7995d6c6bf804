# SPDX-License-Identifier: Apache-2.0
"""``lossgate report``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from lossgate.cli.app import Exit, app

if TYPE_CHECKING:
    from lossgate.evidence.gather import Gathered
    from lossgate.evidence.reader import Where
    from lossgate.evidence.records import CellKey, CellRecord


@app.command
def report(
    *files: Path,
    cell: Annotated[list[str] | None, Parameter(negative=())] = None,
    html: Path | None = None,
) -> int:
    """Show what evidence says, without a policy.

    Args:
        files: Files that verify --evidence wrote, or folders with such files.
        cell: Show all that is known of the cells with this name, or of this candidate; * stands
            for any text. May be repeated.
        html: Write a page about all cells to this file.
    """
    from lossgate.errors import UsageError

    if not files:
        raise UsageError("report: nothing named; expected files or folders that verify --evidence wrote")
    if html is not None:
        _write_page(html, files)
    return _tell_cells(files, cell) if cell else _tell(files)


def _tell(files: Sequence[Path]) -> Exit:
    from lossgate.evidence.gather import gather
    from lossgate.evidence.troubles import troubles
    from lossgate.reports.console import make_console
    from lossgate.reports.evidence_table import print_report

    gathered = gather(files)
    found = troubles(gathered)
    print_report(make_console(), gathered, found)
    return exit_code(gathered, gathered.cells, found)


def _tell_cells(files: Sequence[Path], patterns: Sequence[str]) -> Exit:
    """Prints all that is known of the cells that any pattern names."""
    from lossgate.errors import UsageError
    from lossgate.evidence.gather import gather
    from lossgate.evidence.pattern import matches
    from lossgate.evidence.troubles import listed, troubles
    from lossgate.reports.cell_story import print_story
    from lossgate.reports.console import make_console
    from lossgate.reports.evidence_table import print_troubles

    kept: dict[Where, CellRecord] = {}

    def keep(record: CellRecord, where: Where) -> None:
        if any(matches(pattern, record.key) for pattern in patterns):
            kept[where] = record

    gathered = gather(files, keep)
    named = [key for key in gathered.cells if any(matches(pattern, key) for pattern in patterns)]
    if gathered.cells and not named:
        raise UsageError(
            f"--cell {' '.join(patterns)}: no cell has such a name; expected that of a candidate or of a cell, "
            f"where * stands for any text: {listed(list(gathered.cells))}"
        )
    console, found = make_console(), troubles(gathered)
    for key in named:
        told = gathered.cells[key]
        print_story(console, kept[told[-1].where], told)
    print_troubles(console, found)
    return exit_code(gathered, named, found)


def exit_code(gathered: Gathered, cells: Iterable[CellKey], troubles: Sequence[str]) -> Exit:
    """Returns the code of the worst of what is told last of cells.

    A line that contradicts its own numbers is no disagreement: it is no evidence.
    """
    from lossgate.evidence.troubles import trusted

    told = trusted(gathered)
    failing = [
        told[key].verdict
        for key in cells
        if key in told and not ((known := told[key].known_failure) is not None and known.expected)
    ]
    if "DISAGREE" in failing:
        return Exit.DISAGREE
    return Exit.INCONCLUSIVE if troubles or "INCONCLUSIVE" in failing else Exit.AGREE


def _write_page(html: Path, files: Sequence[Path]) -> None:
    """Writes the page of all cells.

    Raises:
        UsageError: if the file can't be written.
    """
    from lossgate.errors import UsageError
    from lossgate.evidence.gather import gather
    from lossgate.reports.page.page import Page
    from lossgate.reports.page.render import render_page

    records: dict[CellKey, list[CellRecord]] = {}
    gathered = gather(files, lambda record, _: records.setdefault(record.key, []).append(record))
    told = {key: sorted(of_cell, key=lambda one: one.time) for key, of_cell in records.items()}
    page = render_page(
        Page(
            title="lossgate report",
            cells=[of_cell[-1] for of_cell in told.values()],
            gate=None,
            history={key: of_cell[:-1] for key, of_cell in told.items() if len(of_cell) > 1},
            runs=list(gathered.runs.values()),
        )
    )
    try:
        html.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {html}: can't be written: {error.strerror}; name another file") from None
