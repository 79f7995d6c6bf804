# SPDX-License-Identifier: Apache-2.0
"""Finds the candidates that fail alike wherever they are called, so that the rest need not be
tried.
"""

import re
from collections.abc import Hashable

from lossgate.engine.cell import Cell, CellResult

_LAYOUTS = 2
"""A failure on one layout may be the fault of that layout."""


class SameFailures:
    """Remembers how the cells of each candidate failed.

    A candidate is given up if every cell of it so far ended in the same exception, hang or crash,
    on two layouts. Its outputs were then never compared.
    """

    def __init__(self) -> None:
        self._failed: dict[Hashable, set[str]] = {}
        self._layouts: dict[Hashable, set[str]] = {}
        self._first: dict[Hashable, str] = {}

    def add(self, result: CellResult) -> None:
        """Remembers what came of a cell. Give the cells of a candidate in their order."""
        key = _key(result.cell)
        failure = result.failure
        own = failure is not None and failure.held_to == result.cell.property.name
        words = failure.findings[0] if failure is not None and own and failure.failure else ""
        self._failed.setdefault(key, set()).add(_without_numbers(words))
        self._layouts.setdefault(key, set()).add(str(result.cell.layout))
        self._first.setdefault(key, words)

    def of(self, cell: Cell) -> str | None:
        """Returns the failure for which the candidate of a cell is given up; None if it is not."""
        key = _key(cell)
        alike = len(self._failed.get(key, ())) == 1 and len(self._layouts[key]) >= _LAYOUTS
        return (self._first[key] or None) if alike else None


def _key(cell: Cell) -> Hashable:
    return cell.candidate.source, cell.candidate.name


def _without_numbers(words: str) -> str:
    """Returns a failure without its numbers: ranks and sizes differ from problem to problem."""
    return re.sub(r"\d+", "#", words.partition("\n")[0])
