# SPDX-License-Identifier: Apache-2.0
"""Shows how evidence changed: the worst first, a line for each cell."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from lossgate.base.spelling import counted
from lossgate.evidence.differences import CellChange, Change
from lossgate.reports.describe import escaped, print_detail

_OF_A_CANDIDATE = 3
"""How many cells of a candidate are shown for each kind of change. The others are usually alike."""
_OF_A_KIND = 12
"""How many cells are shown for each kind of change: all kinds fit on a screen or two."""

_STYLES = {
    Change.DISAGREES: "bold red",
    Change.BREAKS: "magenta",
    Change.VANISHED: "bold red",
    Change.INCONCLUSIVE: "yellow",
    Change.EXCUSED: "yellow",
    Change.LESS_POWER: "yellow",
    Change.BETTER: "green",
}


def print_diff(
    console: Console,
    changed: Sequence[CellChange],
    around: Sequence[str],
    troubles: Sequence[tuple[str, str]],
    same: int,
) -> None:
    """Prints what differs.

    Args:
        console: where to print.
        changed: how cells changed, the worst first.
        around: what else differs, in words.
        troubles: what is wrong with the evidence, each time after the path of the side.
        same: how many cells did not change.
    """
    for change in Change:
        _section(console, change, [one for one in changed if one.change is change])
    _lines(console, "what else changed", around)
    _lines(console, "the evidence is not whole", [_named(*one) for one in troubles])
    console.print(escape(_summary(changed, same)), soft_wrap=not console.is_terminal)


def _summary(changed: Sequence[CellChange], same: int) -> str:
    """Counts the changes by kind, in one line."""
    counts = Counter(one.change for one in changed)
    words = {change.value.partition(",")[0]: counts[change] for change in Change} | {"unchanged": same}
    return ", ".join(f"{count} {what}" for what, count in words.items() if count) or "no cells to compare"


def _named(side: str, trouble: str) -> str:
    """Returns a trouble with the path of its side, unless it begins with a file of that side."""
    return trouble if trouble.startswith((f"{side}:", f"{side}/")) else f"{side}: {trouble}"


def _section(console: Console, change: Change, cells: Sequence[CellChange]) -> None:
    if not cells:
        return
    style = _STYLES.get(change, "bold")
    console.print(f"[{style}]{change.value} ({len(cells)})[/]", soft_wrap=True)
    for line in _of_cells(cells):
        print_detail(console, f"  {escaped(line)}")
    console.print()


def _of_cells(cells: Sequence[CellChange]) -> Iterator[str]:
    """Yields a line for the first cells of each candidate, and how many more there are."""
    by_candidate: dict[str, list[CellChange]] = {}
    for one in cells:
        by_candidate.setdefault(one.key.candidate, []).append(one)
    shown = 0
    for number, (candidate, of_candidate) in enumerate(by_candidate.items()):
        if shown >= _OF_A_KIND:
            left = list(by_candidate.values())[number:]
            more = counted(sum(map(len, left)), "more cell")
            yield f"and {more} of {counted(len(left), 'other candidate')}"
            return
        listed = of_candidate[:_OF_A_CANDIDATE]
        yield from (f"{one.key}: {one.message}" for one in listed)
        if len(of_candidate) > len(listed):
            yield f"and {len(of_candidate) - len(listed)} more like these of {candidate}"
        shown += len(listed)


def _lines(console: Console, heading: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    console.print(f"[bold]{heading}[/]")
    for line in lines:
        print_detail(console, f"  {escaped(line)}")
    console.print()
