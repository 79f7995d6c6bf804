# SPDX-License-Identifier: Apache-2.0
"""Describes cells that do not agree. Of cells that fail alike, only the first is described."""

import re
from collections import Counter
from collections.abc import Hashable, Iterator

from rich.markup import escape

from lossgate.base.spelling import counted
from lossgate.engine.cell_record import CellRecord
from lossgate.reports.causes import CausesSoFar
from lossgate.reports.console import printable_lines
from lossgate.reports.describe import describe, escaped, heading
from lossgate.reports.shown_verdict import ShownVerdict

_DESCRIBED = 3
"""The most cells of a candidate that are described in full."""


class Stories:
    """Describes cells that do not agree, and counts those that are not described.

    Args:
        whole: whether every cell is described.
        placed: whether an unusual world and device are shown.
    """

    def __init__(self, *, whole: bool = False, placed: bool = False) -> None:
        self._whole, self._placed = whole, placed
        self._causes = CausesSoFar()
        self._described: dict[tuple[str, str], set[Hashable]] = {}
        self._candidate: tuple[str, str] | None = None
        self._name = ""
        self._listed = False
        self._more: Counter[bool] = Counter()
        """Cells of the candidate without a description, by whether they are like another cell."""

    def of(self, cell: CellRecord, *, listed: bool) -> Iterator[str]:
        """Yields the lines of a cell that does not agree, in rich markup.

        Args:
            cell: what is shown.
            listed: whether a cell that is not described still has a line.
        """
        self._candidate, self._name = (cell.source, cell.candidate), cell.candidate
        before = self._described.setdefault(self._candidate, set())
        self._listed = listed
        own = _kind(cell)
        if self._whole or (own not in before and len(before) < _DESCRIBED):
            before.add(own)
            yield heading(cell, placed=self._placed)
            yield from describe(cell, self._causes)
            return
        self._more[own in before] += 1
        if listed:
            reason = "like one above" if own in before else _first_reason(cell)
            yield f"{heading(cell, placed=self._placed)}  {reason}"

    def more_of_others(self, cell: CellRecord | None) -> Iterator[str]:
        """Yields how many cells of a candidate were not described, after its last cell.

        Args:
            cell: the next cell; None at the end.
        """
        if cell is not None and (cell.source, cell.candidate) == self._candidate:
            return
        like, unlike = self._more[True], self._more[False]
        if like and not self._listed:
            yield f"  and {like} more like these of {escaped(self._name)}"
        if unlike:
            yield f"  and {counted(unlike, 'more cell')} of {escaped(self._name)} with other reasons; -v describes them"
        self._more.clear()


def _kind(cell: CellRecord) -> Hashable:
    """Returns a key that cells have in common if they fail alike: verdict, and cause or reason."""
    return ShownVerdict.of(cell), cell.cause or tuple(map(_without_numbers, cell.reasons[:1]))


def _without_numbers(reason: str) -> str:
    return re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "#", reason)


def _first_reason(cell: CellRecord) -> str:
    return "".join(map(escape, printable_lines(cell.reasons)[:1]))
