# SPDX-License-Identifier: Apache-2.0
"""Prints the verdict of a gate on one screen."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.markup import escape

from lossgate.base.spelling import counted
from lossgate.gate.gate_verdict import Committed, GatedCell, GateReason, GateVerdict
from lossgate.reports.console import printable_lines
from lossgate.reports.describe import escaped, print_detail, replay_line
from lossgate.reports.gate_files.findings import GateFinding, GateFindings

_SHOWN = 3
"""How many cells of each reason are shown. All reasons fit on a screen, and files have the rest."""


def print_gate(verdict: GateVerdict, console: Console) -> None:
    """Prints the verdict, the numbers of cells, and the reasons that keep the gate closed."""
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
    yield f"  {escaped(f'policy {verdict.policy.file}, {_evidence(verdict)}')}"
    for reason, found in findings.by_reason.items():
        yield from _section(reason, found)
    for heading, lines in findings.remarks:
        yield from ("", escaped(heading), *map(escaped, lines))


def _cells(verdict: GateVerdict) -> str:
    """Returns the number of cells with each verdict."""
    required = [cell for cell in verdict.cells if cell.required or not cell.passes]
    counts = Counter(map(_word, required))
    line = counted(len(required), "cell")
    if counts:
        line += f": {', '.join(f'{count} {word}' for word, count in sorted(counts.items()))}"
    others = len(verdict.cells) - len(required)
    return f"{line}; {others} more that no rule asks for" if others else line


def _word(cell: GatedCell) -> str:
    return "known failure" if cell.excused else cell.verdict


def _evidence(verdict: GateVerdict) -> str:
    files = counted(len(verdict.evidence), "file")
    commits = f" of commit {', '.join(commit[:12] for commit in verdict.commits)}" if verdict.commits else ""
    if verdict.committed is Committed.NO:
        commits += ", with changes that are not committed"
    versions = [f"{name} {' and '.join(found)}" for name, found in verdict.versions.items() if name != "machine"]
    return ", ".join([f"evidence in {files}{commits}", *versions])


def _section(reason: GateReason, findings: Sequence[GateFinding]) -> Iterator[str]:
    """Yields a heading, the first findings below it, and how many more there are.

    The heading is the word for the reason in the documentation and in the files.
    """
    groups = _by_cell(findings)
    yield ""
    yield f"[bold]{reason} ({len(findings)})[/]"
    for group in groups[:_SHOWN]:
        yield from _group(group)
        if replay := group[0].replay:
            yield replay_line(escaped(replay))
    if more := sum(map(len, groups[_SHOWN:])):
        yield f"  and {more} more like {'this' if len(findings) - more == 1 else 'these'}"


def _by_cell(findings: Sequence[GateFinding]) -> list[list[GateFinding]]:
    """Groups findings: first those of no single cell, each alone, then those of each cell."""
    alone = [[finding] for finding in findings if finding.cell is None]
    of_cells = [finding for finding in findings if finding.cell is not None]
    groups = groupby(of_cells, lambda finding: finding.blocker.cell)
    return [*alone, *(list(group) for _, group in groups)]


def _group(group: Sequence[GateFinding]) -> Iterator[str]:
    """Yields the findings of one cell, which is named once, or a finding of no single cell.

    Quotations from evidence have lines of their own.
    """
    cell = group[0].cell
    start = "  " if cell is None else f"  {escaped(f'{cell.key}: ')}"
    for finding in group:
        quoted = _quoted(finding)
        said = finding.blocker.message if quoted else finding.blocker.sentence
        yield f"{start}{escaped(' '.join(said.split()))}"
        yield from (f"    {escape(line)}" for line in quoted)
        start = "    also: "


def _quoted(finding: GateFinding) -> Sequence[str]:
    """Returns the lines that a finding quotes from the evidence of its cell."""
    if not finding.blocker.why or finding.cell is None or finding.cell.summary is None:
        return ()
    summary = finding.cell.summary
    return printable_lines(summary.told)
