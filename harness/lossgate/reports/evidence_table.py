# SPDX-License-Identifier: Apache-2.0
"""Shows evidence on one screen: its runs, what does not agree, the verdict table, what is wrong."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lossgate.base.spelling import counted
from lossgate.engine.cell_record import CellKey, CellRecord
from lossgate.evidence.gather import Gathered
from lossgate.evidence.summary import CellSummary
from lossgate.gate.gate_verdict import GateReason
from lossgate.gate.runs import incomplete, runs_of, wrong_matrix
from lossgate.reports.console import print_whole, printable
from lossgate.reports.describe import escaped, print_detail, print_remarks
from lossgate.reports.run_lines import moment, run_lines
from lossgate.reports.shown_verdict import ShownVerdict
from lossgate.reports.stories import Stories
from lossgate.reports.verdict_table import coloured_summary, rows_of, summary, verdict_table

_NAMED = 3
"""The most names that are listed."""
_LIKE = 5
"""The most troubles of a kind that are listed. The others usually have the same cause."""


def troubles(gathered: Gathered) -> list[str]:
    """Returns sentences that say why evidence is not whole; nothing if it is."""
    by_kind: dict[GateReason, list[str]] = {}
    for kind, message in _troubles(gathered):
        by_kind.setdefault(kind, []).append(message)
    return [line for messages in by_kind.values() for line in _first(messages)]


def trusted(gathered: Gathered) -> dict[CellKey, CellSummary]:
    """Returns the newest result of each cell, unless it contradicts its own numbers."""
    return {key: result for key, result in gathered.newest.items() if result.where not in gathered.contradictory}


def listed(names: Sequence[object]) -> str:
    """Returns the first names of a list, and how many more there are."""
    first = ", ".join(map(str, names[:_NAMED]))
    more = len(names) - _NAMED
    return f"{first} and {more} more" if more > 0 else first


def _troubles(gathered: Gathered) -> Iterator[tuple[GateReason, str]]:
    if not gathered.cells:
        yield GateReason.EMPTY, "there is no evidence of any cell; name files that lossgate verify --evidence wrote"
    for line in gathered.damaged:
        yield GateReason.DAMAGED, f"{line.where}: {line.message}"
    cells = {result.where: result.key for of_cell in gathered.cells.values() for result in of_cell}
    for where, how in gathered.contradictory.items():
        yield GateReason.CONTRADICTORY, f"{where}: {cells[where]} contradicts its own numbers: {how}. Verify it again"
    for where in gathered.repeated:
        yield GateReason.CONTRADICTORY, f"{where}: another line has started or ended this run differently"
    runs = runs_of(gathered)
    blockers = [blocker for run in runs for blocker in incomplete(run)]
    for blocker in (*blockers, *wrong_matrix(runs)):
        about = "" if blocker.cell is None else f"{blocker.cell}: "
        yield blocker.reason, f"{about}{blocker.message}"


def _first(messages: Sequence[str]) -> list[str]:
    more = len(messages) - _LIKE
    if more <= 0:
        return [*messages]
    return [*messages[:_LIKE], f"and {more} more like these"]


_CANDIDATES = 8
"""The most candidates whose failing cells are described. The table has the others, too."""
_ROWS = 60
"""The most rows of the verdict table that are shown. Only evidence of many libraries has more."""


def print_report(console: Console, gathered: Gathered, troubles: Sequence[str]) -> None:
    """Prints evidence on one screen. The newest result of a cell counts.

    Args:
        console: where to print.
        gathered: the evidence.
        troubles: what is wrong with it.
    """
    cells = list(gathered.newest.values())
    _print_runs(console, gathered)
    _print_failures(console, cells)
    _print_table(console, cells)
    print_remarks(console, cells)
    for line in _repeats(gathered):
        print_detail(console, escape(line))
    print_troubles(console, troubles)
    console.print(coloured_summary(summary(cells)), soft_wrap=not console.is_terminal)


def _print_runs(console: Console, gathered: Gathered) -> None:
    """Prints files, runs, commits, versions and hosts, a line for each."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for heading, line in run_lines(gathered):
        table.add_row(Text(heading, style="dim"), Text(line, overflow="fold"))
    print_whole(console, table)
    console.print()


def _print_failures(console: Console, cells: Iterable[CellRecord]) -> None:
    """Prints why cells do not agree: the first cells of a candidate, then the number of others."""
    by_candidate: dict[str, list[CellRecord]] = {}
    for cell in cells:
        by_candidate.setdefault(cell.candidate, []).append(cell)
    failing = [own for own in by_candidate.values() if not all(cell.passes for cell in own)]
    for of_candidate in failing[:_CANDIDATES]:
        stories = Stories(placed=True)
        for cell in of_candidate:
            for line in stories.of(cell, listed=False):
                print_detail(console, line)
        for line in stories.end():
            print_detail(console, line)
    if others := failing[_CANDIDATES:]:
        left = counted(sum(not cell.passes for own in others for cell in own), "more cell")
        console.print(f"and {left} of {counted(len(others), 'other candidate')}", soft_wrap=True)


def _print_table(console: Console, cells: Sequence[CellRecord]) -> None:
    """Prints the verdict table: all of it, or the worst rows of a very long one."""
    rows = rows_of(cells)
    if len(rows) > _ROWS:
        rows.sort(key=lambda row: min(ShownVerdict.of(cell).order for cell in row))
    shown = [cell for row in rows[:_ROWS] for cell in row]
    left = [cell for row in rows[_ROWS:] for cell in row]
    if shown:
        print_whole(console, verdict_table(shown, placed=True))
    if left:
        print_detail(console, f"and {counted(len(rows) - _ROWS, 'more row')}, none of them worse: {summary(left)}")
        console.print()


def print_troubles(console: Console, troubles: Sequence[str]) -> None:
    """Prints what is wrong with the evidence itself."""
    if troubles:
        console.print("[yellow]The evidence is not whole:[/]")
        for line in troubles:
            print_detail(console, f"  {escaped(line)}")
        console.print()


def _repeats(gathered: Gathered) -> Iterator[str]:
    """Yields lines about cells that were verified several times, and whose verdict changed."""
    several = {key: results for key, results in gathered.cells.items() if len(results) > 1}
    if not several:
        return
    every = [one for results in several.values() for one in results]
    times = sorted(one.time for one in every)
    runs = len({one.run for one in every})
    were = "was" if len(several) == 1 else "were"
    yield (
        f"{counted(len(several), 'cell')} {were} verified more than once, in "
        f"{counted(runs, 'run')} from {moment(times[0])} to {moment(times[-1])}; the newest counts."
    )
    changed = [key for key, results in several.items() if len({(one.outcome, one.expected) for one in results}) > 1]
    if changed:
        yield f"{counted(len(changed), 'cell')} had another verdict before: {printable(listed(changed))}."
    yield ""
