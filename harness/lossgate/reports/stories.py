# SPDX-License-Identifier: Apache-2.0
"""Describes cells that do not agree. Of cells that fail alike, the first is described, and its
layouts are listed.
"""

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence

from lossgate.base.layout import AXES, Layout
from lossgate.base.spelling import counted, in_a_row
from lossgate.engine.cell_record import CellRecord, Verdict
from lossgate.reports.describe import describe, escaped, heading, place_of
from lossgate.reports.shown_verdict import ShownVerdict

_DESCRIBED = 3
"""The most cells of a candidate that are described in full."""


class Stories:
    """Describes cells that do not agree, and lists those that fail like one that is described.

    Args:
        whole: whether every cell is described, with statistics.
        placed: whether an unusual world and device are shown.
    """

    def __init__(self, *, whole: bool = False, placed: bool = False) -> None:
        self._whole, self._placed = whole, placed
        self._candidate: tuple[str, str] | None = None
        self._alike: dict[Hashable, list[CellRecord]] = {}
        """The cells of the candidate that do not agree, by how they fail."""
        self._right: list[str] = []
        """The layouts of its cells that do not disagree."""
        self._others = 0

    def of(self, cell: CellRecord, *, listed: bool) -> Iterator[str]:
        """Yields the lines of a cell in rich markup; none if it passes. The last lines of the
        candidate before come first.

        Args:
            cell: what is shown.
            listed: whether a cell that is not described still has a line.
        """
        if (cell.source, cell.candidate) != self._candidate:
            yield from self.end()
            self._candidate = cell.source, cell.candidate
        if cell.verdict != Verdict.DISAGREE:
            self._right.append(cell.layout)
        if cell.passes:
            return
        own = _kind(cell)
        if own in self._alike:
            first = self._alike[own][0]
            self._alike[own].append(cell)
            short = f"like {escaped(place_of(first))}"
        elif len(self._alike) < _DESCRIBED or self._whole:
            self._alike[own] = [cell]
            short = ""
        else:
            self._others += 1
            short = escaped(cell.first_told)
        if self._whole or not short:
            yield heading(cell, placed=self._placed)
            yield from describe(cell, whole=self._whole)
        elif listed:
            yield f"{heading(cell, placed=self._placed)}  {short}"

    def end(self) -> Iterator[str]:
        """Yields which cells of the last candidate fail alike, and how many were not described."""
        for alike in self._alike.values():
            if len(alike) > 1:
                described = f" with {place_of(alike[0])}" if len(self._alike) > 1 else ""
                where = _layouts_by_dtype(alike, self._right)
                yield escaped(f"  alike{described}: {len(alike)} cells, {where}")
        if self._others:
            name = escaped(self._candidate[1] if self._candidate is not None else "")
            yield f"  and {counted(self._others, 'more cell')} of {name} with other reasons; -v describes them"
        self._candidate, self._alike, self._right, self._others = None, {}, [], 0


def _kind(cell: CellRecord) -> Hashable:
    """Returns a key that cells have in common if they fail alike: verdict, property, and cause. If
    no cause is named: the outputs that are wrong, or else the first reason.
    """
    has_numbers = cell.failure is not None and cell.failure.statistics
    how = cell.cause or (cell.symptoms if has_numbers else tuple(map(_without_numbers, cell.reasons[:1])))
    return ShownVerdict.of(cell), cell.property, cell.broken, how


def _layouts_by_dtype(alike: Iterable[CellRecord], right: Sequence[str]) -> str:
    """Returns the dtypes and layouts of cells in words. Dtypes with the same layouts are one."""
    layouts: dict[str, list[str]] = {}
    for cell in alike:
        layouts.setdefault(cell.dtype, []).append(cell.layout)
    dtypes: dict[tuple[str, ...], list[str]] = {}
    for dtype, own in layouts.items():
        dtypes.setdefault(tuple(own), []).append(dtype)
    return ", ".join(f"{in_a_row(own)} {layouts_in_words(these, right)}" for these, own in dtypes.items())


def layouts_in_words(wrong: Sequence[str], right: Sequence[str]) -> str:
    """Returns in words on which layouts a mistake shows.

    Args:
        wrong: the layouts on which it shows.
        right: the layouts with a cell that does not disagree.
    """
    listed = "; ".join(wrong)
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


def _without_numbers(reason: str) -> str:
    return re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "#", reason)
