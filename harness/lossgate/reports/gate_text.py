# SPDX-License-Identifier: Apache-2.0
"""A gate's verdict on one screen."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.markup import escape

from lossgate.base.spelling import counted
from lossgate.evidence.records import CellKey
from lossgate.evidence.summary import CellSummary
from lossgate.gate.committed import Committed
from lossgate.gate.verdict import Blocker, GatedCell, GateVerdict, Kind
from lossgate.reports.causes import CausesSoFar
from lossgate.reports.describe import print_detail, replay_line
from lossgate.reports.gate_files.wording import remarks_of, replay_of
from lossgate.reports.printable import printable
from lossgate.reports.shown_cell import of_summary

_SHOWN = 3
"""How many cells of each kind of reason are shown. All kinds fit on a screen, and files have the
rest."""

_ORDER = (
    Kind.DISAGREE,
    Kind.KNOWN_FAILURE,
    Kind.CONTRADICTORY,
    Kind.DAMAGED,
    Kind.EMPTY,
    Kind.MISSING,
    Kind.UNFINISHED,
    Kind.MIXED,
    Kind.STALE,
    Kind.INCONCLUSIVE,
    Kind.WEAK,
)
"""The kinds of reasons, the gravest first."""


def print_gate(verdict: GateVerdict, console: Console) -> None:
    """Prints the verdict, what keeps the gate closed, and what was counted."""
    for line in _lines(verdict):
        print_detail(console, line)


def headline(verdict: GateVerdict) -> str:
    """Returns whether the gate is open, in a line."""
    if verdict.passes:
        return "OPEN: the evidence is what the policy asks for"
    return f"CLOSED: {counted(len(verdict.blockers), 'reason')}"


def summary(verdict: GateVerdict) -> str:
    """Counts the cells, in a line."""
    required = [cell for cell in verdict.cells if cell.required or not cell.passes]
    counts = Counter(map(_word, required))
    words = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    others = len(verdict.cells) - len(required)
    more = f"; {others} more that no rule asks for" if others else ""
    return f"{counted(len(required), 'cell')}{': ' * bool(words)}{words}{more}"


def _lines(verdict: GateVerdict) -> Iterator[str]:
    """Yields lines of rich markup."""
    yield f"[{'green' if verdict.passes else 'bold red'}]{headline(verdict)}[/]"
    yield f"  {summary(verdict)}"
    yield f"  {_text(f'policy {verdict.policy.file}, {_evidence(verdict)}')}"
    cells = {cell.key: cell for cell in verdict.cells}
    by_kind: defaultdict[Kind, list[Blocker]] = defaultdict(list)
    for blocker in verdict.blockers:
        by_kind[blocker.kind].append(blocker)
    for kind in sorted(by_kind, key=_ORDER.index):
        yield from _section(kind, by_kind[kind], cells)
    yield from _remarks(verdict)


def _word(cell: GatedCell) -> str:
    return "known failure" if cell.excused else cell.verdict


def _evidence(verdict: GateVerdict) -> str:
    files = counted(len(verdict.evidence), "file")
    commits = f" of commit {', '.join(commit[:12] for commit in verdict.commits)}" if verdict.commits else ""
    if verdict.committed is Committed.NO:
        commits += ", with changes that are not committed"
    versions = [f"{name} {' and '.join(found)}" for name, found in verdict.versions.items() if name != "machine"]
    return f"evidence in {files}{commits}{', ' * bool(versions)}{', '.join(versions)}"


def _section(kind: Kind, blockers: Sequence[Blocker], cells: Mapping[CellKey, GatedCell]) -> Iterator[str]:
    """Yields a heading, the first reasons below it, and how many more there are.

    The heading is the word that the documentation explains, and that other programs are given.
    """
    groups = _by_cell(blockers)
    yield ""
    yield f"[bold]{kind} ({len(blockers)})[/]"
    for group in groups[:_SHOWN]:
        cell = cells[group[0].cell] if group[0].cell is not None else None
        yield from _reasons(group, cell.summary if cell is not None else None)
        if kind is Kind.DISAGREE and cell is not None and (replay := replay_of(cell)):
            yield replay_line(_text(replay))
    if more := sum(map(len, groups[_SHOWN:])):
        yield f"  and {more} more like {'this' if len(blockers) - more == 1 else 'these'}"


def _remarks(verdict: GateVerdict) -> Iterator[str]:
    """Yields what was not seen, and what candidates were not held to, after empty lines."""
    for lines in remarks_of(verdict):
        yield from ("", *map(_text, lines)) if lines else ()


def _by_cell(blockers: Sequence[Blocker]) -> list[list[Blocker]]:
    """Returns the reasons of one kind, those of one cell together."""
    groups: dict[CellKey | int, list[Blocker]] = {}
    for number, blocker in enumerate(blockers):
        groups.setdefault(number if blocker.cell is None else blocker.cell, []).append(blocker)
    return list(groups.values())


def _reasons(group: Sequence[Blocker], summary: CellSummary | None) -> Iterator[str]:
    """Yields the reasons of one cell, which is named once, or a reason of no single cell.

    What evidence says of the cell has lines of its own.
    """
    about = f"{group[0].cell}: " if group[0].cell is not None else ""
    for number, blocker in enumerate(group):
        before = "    also: " if number else f"  {_text(about)}"
        said, found = _apart(blocker.message, summary)
        yield f"{before}{_text(' '.join(said.split()))}"
        yield from (f"    {escape(line)}" for line in found)


def _apart(message: str, summary: CellSummary | None) -> tuple[str, Sequence[str]]:
    """Returns a message without what it quotes of a cell's evidence, and that in lines."""
    if summary is None or not message.endswith(quoted := f": {summary.why}"):
        return message, ()
    shown = of_summary(summary)
    lines = (*shown.reasons, *CausesSoFar().lines(shown))
    return (message.removesuffix(quoted), lines) if lines else (message, ())


def _text(text: str) -> str:
    """Returns text from files, fit for a line of rich markup."""
    return escape(printable(text))
