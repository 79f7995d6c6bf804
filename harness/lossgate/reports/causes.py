# SPDX-License-Identifier: Apache-2.0
"""Causes of disagreements, each said once: where several cells of a candidate have it, with the
layouts on which it shows.
"""

from collections.abc import Iterable, Iterator, Sequence

from lossgate.base.layout import AXES, Layout
from lossgate.base.spelling import counted
from lossgate.reports.shown_cell import ShownCell

IN_COMMON = "Causes that several cells have in common:"
_CAUSE, _HELD = "cause: ", "; this explains "


class CausesSoFar:
    """Remembers which causes were shown, so that each is shown once for a candidate."""

    def __init__(self) -> None:
        self._on: dict[tuple[str, str, str], str] = {}

    def lines(self, cell: ShownCell) -> tuple[str, ...]:
        """Returns the lines of a cell's cause; one line if an earlier cell has the same."""
        cause = cause_of(cell)
        if cause is None:
            return cell.causes
        key = cell.source, cell.candidate, cause
        if key in self._on:
            return (f"{_CAUSE}the same as {self._on[key]}",)
        self._on[key] = f"{cell.dtype}  {cell.layout}"
        return tuple(part for line in cell.causes for part in _one_idea_each(line))


def _one_idea_each(line: str) -> list[str]:
    """Returns a cause in one line, and what holds it up in another."""
    if not line.startswith(_CAUSE) or _HELD not in line:
        return [line]
    cause, held = line.rsplit(_HELD, 1)
    return [cause, f"  {_HELD.lstrip('; ')}{held}"]


def cause_of(cell: ShownCell) -> str | None:
    """Returns the cause of a cell without what holds it up; None if none is named."""
    first = next((line for line in cell.causes if line.startswith(_CAUSE)), "")
    return first.removeprefix(_CAUSE).rsplit(_HELD, 1)[0] if _HELD in first else None


def causes_in_common(cells: Sequence[ShownCell]) -> list[str]:
    """Returns a heading and a line for each cause that several cells of a candidate have."""
    of_candidates: dict[tuple[str, str], list[ShownCell]] = {}
    for cell in cells:
        of_candidates.setdefault((cell.source, cell.candidate), []).append(cell)
    lines = [line for own in of_candidates.values() for line in _of_candidate(own)]
    return [IN_COMMON, *lines] if lines else []


def _of_candidate(cells: Sequence[ShownCell]) -> Iterator[str]:
    causes = [cause_of(cell) for cell in cells]
    for cause in dict.fromkeys(cause for cause in causes if cause is not None):
        having = [cell for cell, own in zip(cells, causes, strict=True) if own == cause]
        if len(having) > 1:
            others = [cell for cell in cells if cell.verdict.word != "DISAGREE"]
            where = pattern(_layouts(having), _layouts(others))
            yield f"  {cells[0].candidate}: {cause}: {counted(len(having), 'cell')}, {where}"


def _layouts(cells: Iterable[ShownCell]) -> list[str]:
    return list(dict.fromkeys(cell.layout for cell in cells))


def pattern(wrong: Sequence[str], right: Sequence[str]) -> str:
    """Returns in words on which layouts something is wrong.

    Args:
        wrong: the layouts where it is.
        right: those where nothing is.
    """
    if not set(wrong) & set(right):
        if not right:
            return f"on every layout that was tried: {', '.join(wrong)}" if len(wrong) > 1 else f"on {wrong[0]}"
        for axis in AXES:
            if all(_split(layout, axis) for layout in wrong) and not any(_split(layout, axis) for layout in right):
                return f"on every layout with {axis} > 1 that was tried: {', '.join(wrong)}"
    return f"on {', '.join(wrong)}"


def _split(layout: str, axis: str) -> bool:
    return any(own == axis for own in Layout.parse(layout).axes)
