# SPDX-License-Identifier: Apache-2.0
"""Shows the causes of disagreements. A cause that several cells of a candidate have is shown once,
with its layouts.
"""

from collections.abc import Iterable, Iterator, Sequence

from lossgate.base.layout import AXES, Layout
from lossgate.base.spelling import counted
from lossgate.engine.cell_record import CellRecord, Verdict
from lossgate.reports.console import printable, printable_lines

IN_COMMON = "Causes that several cells have in common:"


class CausesSoFar:
    """Remembers which causes were shown, so that each is shown once for a candidate."""

    def __init__(self) -> None:
        self._on: dict[tuple[str, str, str], str] = {}

    def lines(self, cell: CellRecord) -> tuple[str, ...]:
        """Returns lines about the cause of a cell: the mistake, what it explains, and what to do.

        If an earlier cell has the same cause, a single line names that cell.
        """
        if not cell.cause:
            return printable_lines(cell.causes)
        key = cell.source, cell.candidate, cell.cause
        if key in self._on:
            return (f"cause: the same as {self._on[key]}",)
        self._on[key] = printable(f"{cell.dtype}  {cell.layout}")
        return printable_lines((f"cause: {cell.cause}", f"  {cell.explains}", *cell.causes[1:]))


def causes_in_common(cells: Sequence[CellRecord]) -> list[str]:
    """Returns a heading and a line for each cause that several cells of a candidate have."""
    of_candidates: dict[tuple[str, str], list[CellRecord]] = {}
    for cell in cells:
        of_candidates.setdefault((cell.source, cell.candidate), []).append(cell)
    lines = [line for own in of_candidates.values() for line in _of_candidate(own)]
    return [IN_COMMON, *lines] if lines else []


def _of_candidate(cells: Sequence[CellRecord]) -> Iterator[str]:
    for cause in dict.fromkeys(cell.cause for cell in cells if cell.cause):
        having = [cell for cell in cells if cell.cause == cause]
        if len(having) > 1:
            others = [cell for cell in cells if cell.verdict != Verdict.DISAGREE]
            where = layouts_in_words(_layouts(having), _layouts(others))
            yield f"  {printable(cells[0].candidate)}: {cause}: {counted(len(having), 'cell')}, {where}"


def _layouts(cells: Iterable[CellRecord]) -> list[str]:
    return list(dict.fromkeys(cell.layout for cell in cells))


def layouts_in_words(wrong: Sequence[str], right: Sequence[str]) -> str:
    """Returns in words on which layouts a mistake shows.

    Args:
        wrong: the layouts on which it shows.
        right: the layouts with a cell that does not disagree.
    """
    listed = ", ".join(wrong)
    if set(wrong) & set(right):
        return f"on {listed}"
    if not right:
        return f"on every layout that was tried: {listed}" if len(wrong) > 1 else f"on {listed}"
    for axis in AXES:
        # Right layouts are read only where they must be: a later lossgate may write others.
        if all(_splits(layout, axis) for layout in wrong) and not any(_splits(layout, axis) for layout in right):
            return f"on every layout with {axis} > 1 that was tried: {listed}"
    return f"on {listed}"


def _splits(layout: str, axis: str) -> bool:
    return axis in Layout.parse(layout).axes
