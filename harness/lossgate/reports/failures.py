# SPDX-License-Identifier: Apache-2.0
"""Writes a failure file for every cell that disagrees."""

from pathlib import Path

from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.events import CellFinished, Event
from lossgate.engine.failure_files import write_failure


class FailureFiles:
    """Writes into a folder, under names that contain the cell.

    Known failures have a file already.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[Cell, Path] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, CellFinished) and _is_new_failure(event.result):
            self._written[event.result.cell] = write_failure(event.result, self._folder)

    def of(self, cell: Cell) -> Path | None:
        """Returns the file of a cell, if it has one."""
        return self._written.get(cell)


def _is_new_failure(result: CellResult) -> bool:
    return result.verdict is Verdict.DISAGREE and result.cell.candidate.known_failure is None
