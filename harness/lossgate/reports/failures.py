# SPDX-License-Identifier: Apache-2.0
"""Writes a failure file for every cell that disagrees."""

from pathlib import Path
from shlex import quote

from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.events import CellFinished, Event
from lossgate.engine.failure_files import write_failure
from lossgate.errors import UsageError


class FailureFiles:
    """Writes into a folder, under names that contain the cell.

    Known failures have a file already.

    Raises:
        UsageError: if the folder is a file.
    """

    def __init__(self, folder: Path) -> None:
        if folder.is_file():
            raise UsageError(f"--failures {folder}: that is a file; choose another folder with --failures")
        self._folder = folder
        self._written: dict[Cell, Path] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, CellFinished) and _is_new_failure(event.result):
            self._written[event.result.cell] = write_failure(event.result, self._folder)

    def of(self, cell: Cell) -> Path | None:
        """Returns the file of a cell, if it has one."""
        return self._written.get(cell)

    def replay(self, result: CellResult) -> str | None:
        """Returns the command that judges the failure of a cell again, if it has one."""
        cell = result.cell
        file = self.of(cell) or (cell.candidate.known_failure.example if cell.candidate.known_failure else None)
        return f"{_program(cell)} replay {quote(str(file))}" if file is not None else None


def _program(cell: Cell) -> str:
    if cell.world != "torchrun":
        return "lossgate"
    return f"torchrun --nproc-per-node {cell.layout.ranks} -m lossgate"


def _is_new_failure(result: CellResult) -> bool:
    return result.verdict is Verdict.DISAGREE and result.cell.candidate.known_failure is None
