# SPDX-License-Identifier: Apache-2.0
"""Chooses which cells that do not agree are described: of those that fail alike, the first."""

import re
from collections import Counter
from collections.abc import Hashable, Iterator

from rich.markup import escape

from lossgate.base.spelling import counted
from lossgate.reports.causes import CausesSoFar, cause_of
from lossgate.reports.describe import describe, heading
from lossgate.reports.shown_cell import ShownCell

_DESCRIBED = 3
"""How many cells of a candidate are described in full."""


class Stories:
    """Describes cells that do not agree, and counts those that are like one before.

    Args:
        whole: every cell is described.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._causes = CausesSoFar()
        self._described: dict[tuple[str, str], set[Hashable]] = {}
        self._candidate: tuple[str, str] | None = None
        self._name = ""
        self._listed = False
        self._more: Counter[bool] = Counter()
        """How many cells of the candidate were not described, by whether they are like another."""

    def of(self, cell: ShownCell, *, listed: bool) -> Iterator[str]:
        """Yields the lines of a cell that does not agree, in rich markup.

        Args:
            cell: what is shown.
            listed: whether a cell that is not described has a line all the same.
        """
        self._candidate, self._name = (cell.source, cell.candidate), cell.candidate
        before = self._described.setdefault(self._candidate, set())
        self._listed = listed
        own = _kind(cell)
        if self._whole or (own not in before and len(before) < _DESCRIBED):
            before.add(own)
            yield heading(cell)
            yield from describe(cell, self._causes)
            return
        self._more[own in before] += 1
        if listed:
            yield f"{heading(cell)}  {'like one above' if own in before else _first_reason(cell)}"

    def more_of_others(self, cell: ShownCell | None) -> Iterator[str]:
        """Yields how many cells were not described, once the cells of a candidate are over.

        Args:
            cell: the next one; None at the end.
        """
        if cell is not None and (cell.source, cell.candidate) == self._candidate:
            return
        like, unlike = self._more[True], self._more[False]
        if like and not self._listed:
            yield f"  and {like} more like these of {escape(self._name)}"
        if unlike:
            yield f"  and {counted(unlike, 'more cell')} of {escape(self._name)} with other reasons; -v describes them"
        self._more.clear()


def _kind(cell: ShownCell) -> Hashable:
    """Returns what cells that fail alike have in common: the cause, or else what is wrong."""
    cause = cause_of(cell)
    return cell.verdict, cause if cause is not None else tuple(map(_without_numbers, cell.reasons[:1]))


def _without_numbers(reason: str) -> str:
    return re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "#", reason)


def _first_reason(cell: ShownCell) -> str:
    return escape(cell.reasons[0]) if cell.reasons else ""
