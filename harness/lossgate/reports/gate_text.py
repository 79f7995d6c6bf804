# SPDX-License-Identifier: Apache-2.0
"""A gate's verdict on one screen."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from lossgate.gate.verdict import Blocker, GatedCell, GateVerdict, Kind
from lossgate.reports.printable import printable

_SHOWN = 3
"""How many reasons of each kind are shown. All kinds fit on a screen, and files have the rest."""

_HEADINGS = {
    Kind.DISAGREE: "disagree",
    Kind.KNOWN_FAILURE: "known failures that are none any more",
    Kind.CONTRADICTORY: "contradictory evidence",
    Kind.DAMAGED: "damaged evidence",
    Kind.EMPTY: "no evidence",
    Kind.MISSING: "missing",
    Kind.UNFINISHED: "unfinished runs",
    Kind.MIXED: "evidence of different code",
    Kind.STALE: "evidence of another time",
    Kind.INCONCLUSIVE: "inconclusive",
    Kind.WEAK: "seen too weakly",
}
"""The heading of each kind of reason, the gravest first."""


def print_gate(verdict: GateVerdict, console: Console) -> None:
    """Prints the verdict, what keeps the gate closed, and what was counted."""
    wide = console.is_terminal
    for line in _lines(verdict):
        if wide:
            indent = len(line.plain) - len(line.plain.lstrip(" "))
            console.print(Padding(line[indent:], (0, 0, 0, indent)))
        else:  # in a file each line stays whole, so that it can be searched
            console.print(line, soft_wrap=True)


def _lines(verdict: GateVerdict) -> Iterator[Text]:
    yield headline(verdict)
    yield Text(f"  {summary(verdict)}")
    yield Text(f"  policy {verdict.policy.file}, {_evidence(verdict)}")
    by_kind: defaultdict[Kind, list[Blocker]] = defaultdict(list)
    for blocker in verdict.blockers:
        by_kind[blocker.kind].append(blocker)
    for kind in sorted(by_kind, key=list(_HEADINGS).index):
        yield from _section(kind, by_kind[kind])


def headline(verdict: GateVerdict) -> Text:
    """Returns whether the gate is open, in a line."""
    if verdict.passes:
        return Text("OPEN: the evidence is what the policy asks for", style="green")
    count = len(verdict.blockers)
    return Text(f"CLOSED: {count} reason{'s' * (count > 1)}", style="bold red")


def summary(verdict: GateVerdict) -> str:
    """Counts the cells, in a line."""
    required = [cell for cell in verdict.cells if cell.required or not cell.passes]
    counts = Counter(map(_word, required))
    words = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    others = len(verdict.cells) - len(required)
    more = f"; {others} more that no rule asks for" if others else ""
    return f"{_count(len(required), 'cell')}{': ' * bool(words)}{words}{more}"


def _word(cell: GatedCell) -> str:
    return "known failure" if cell.excused else cell.verdict


def _evidence(verdict: GateVerdict) -> str:
    files = _count(len(verdict.evidence), "file")
    commits = f" of commit {', '.join(commit[:12] for commit in verdict.commits)}" if verdict.commits else ""
    versions = [f"{name} {' and '.join(found)}" for name, found in verdict.versions.items() if name != "machine"]
    return f"evidence in {files}{commits}{', ' * bool(versions)}{', '.join(versions)}"


def _section(kind: Kind, blockers: Sequence[Blocker]) -> Iterator[Text]:
    yield Text("")
    yield Text(f"{_HEADINGS[kind]} ({len(blockers)})", style="bold")
    for blocker in blockers[:_SHOWN]:
        about = f"{blocker.cell}: " if blocker.cell is not None else ""
        yield Text(f"  {printable(about + ' '.join(blocker.message.split()))}")
    if len(blockers) > _SHOWN:
        yield Text(f"  and {len(blockers) - _SHOWN} more like these")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
