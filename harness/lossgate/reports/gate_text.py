# SPDX-License-Identifier: Apache-2.0
"""A gate's verdict on one screen."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.markup import escape

from lossgate.base.spelling import counted
from lossgate.gate.gate_verdict import Committed, GatedCell, GateReason, GateVerdict
from lossgate.reports.causes import CausesSoFar
from lossgate.reports.describe import print_detail, replay_line
from lossgate.reports.gate_files.findings import GateFinding, GateFindings
from lossgate.reports.plain import printable, printable_lines

_SHOWN = 3
"""How many cells of each reason are shown. All reasons fit on a screen, and files have the rest."""


def print_gate(verdict: GateVerdict, console: Console) -> None:
    """Prints the verdict, what keeps the gate closed, and what was counted."""
    for line in _lines(verdict):
        print_detail(console, line)


def _lines(verdict: GateVerdict) -> Iterator[str]:
    """Yields lines of rich markup."""
    findings = GateFindings(verdict)
    if verdict.passes:
        yield "[green]OPEN: the evidence is what the policy asks for[/]"
    else:
        yield f"[bold red]CLOSED: {counted(len(findings.all), 'reason')}[/]"
    yield f"  {_cells(verdict)}"
    yield f"  {_text(f'policy {verdict.policy.file}, {_evidence(verdict)}')}"
    for reason, found in findings.by_reason.items():
        yield from _section(reason, found)
    for heading, lines in findings.remarks:
        yield from ("", _text(heading), *map(_text, lines))


def _cells(verdict: GateVerdict) -> str:
    """Counts the cells."""
    required = [cell for cell in verdict.cells if cell.required or not cell.passes]
    counts = Counter(map(_word, required))
    words = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    others = len(verdict.cells) - len(required)
    more = f"; {others} more that no rule asks for" if others else ""
    return f"{counted(len(required), 'cell')}{': ' * bool(words)}{words}{more}"


def _word(cell: GatedCell) -> str:
    return "known failure" if cell.excused else cell.verdict


def _evidence(verdict: GateVerdict) -> str:
    files = counted(len(verdict.evidence), "file")
    commits = f" of commit {', '.join(commit[:12] for commit in verdict.commits)}" if verdict.commits else ""
    if verdict.committed is Committed.NO:
        commits += ", with changes that are not committed"
    versions = [f"{name} {' and '.join(found)}" for name, found in verdict.versions.items() if name != "machine"]
    return f"evidence in {files}{commits}{', ' * bool(versions)}{', '.join(versions)}"


def _section(reason: GateReason, findings: Sequence[GateFinding]) -> Iterator[str]:
    """Yields a heading, the first findings below it, and how many more there are.

    The heading is the word that the documentation explains, and that other programs are given.
    """
    groups = _by_cell(findings)
    yield ""
    yield f"[bold]{reason} ({len(findings)})[/]"
    for group in groups[:_SHOWN]:
        yield from _group(group)
        if replay := group[0].replay:
            yield replay_line(_text(replay))
    if more := sum(map(len, groups[_SHOWN:])):
        yield f"  and {more} more like {'this' if len(findings) - more == 1 else 'these'}"


def _by_cell(findings: Sequence[GateFinding]) -> list[list[GateFinding]]:
    """Returns those of no single cell each alone, and those of one cell together."""
    alone = [[finding] for finding in findings if finding.cell is None]
    others = groupby((finding for finding in findings if finding.cell), lambda finding: finding.blocker.cell)
    return [*alone, *(list(group) for _, group in others)]


def _group(group: Sequence[GateFinding]) -> Iterator[str]:
    """Yields the findings of one cell, which is named once, or a finding of no single cell.

    What evidence says of the cell has lines of its own.
    """
    for number, finding in enumerate(group):
        about = f"{finding.cell.key}: " if finding.cell is not None else ""
        found = _of_evidence(finding)
        said = finding.blocker.message if found else finding.blocker.sentence
        yield f"{'    also: ' if number else f'  {_text(about)}'}{_text(' '.join(said.split()))}"
        yield from (f"    {escape(line)}" for line in found)


def _of_evidence(finding: GateFinding) -> Sequence[str]:
    """Returns in lines what a finding quotes of its cell's evidence."""
    if not finding.blocker.why or finding.cell is None or finding.cell.summary is None:
        return ()
    summary = finding.cell.summary
    return (*printable_lines(summary.reasons), *CausesSoFar().lines(summary))


def _text(text: str) -> str:
    """Returns text from files, fit for a line of rich markup."""
    return escape(printable(text))
