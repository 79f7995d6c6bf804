# SPDX-License-Identifier: Apache-2.0
"""Keeps a failure file for every cell that disagrees, and none for a cell that agrees."""

from collections.abc import Callable
from pathlib import Path
from shlex import quote

from lossgate.base.errors import UsageError
from lossgate.engine.cell import Cell, CellResult
from lossgate.engine.cell_record import Verdict
from lossgate.engine.earlier_failures import examples_of
from lossgate.engine.events import CellFinished, Event, RunStarted
from lossgate.engine.failure_files import failure_files_of, needs_trust, read_failure, write_failure


class FailureFiles:
    """Writes failure files into a folder, and removes those of earlier runs.

    The name of a file contains its cell. A cell that disagrees keeps only its new file. A cell that
    agrees on the problems of its earlier files loses these. Files of known failures stay. If the
    folder can't be written, it calls ``tell`` with the reason for each cell, and the run goes on.

    Raises:
        UsageError: if the folder is a file.
    """

    def __init__(self, folder: Path, tell: Callable[[str], object] = str) -> None:
        if folder.is_file():
            raise UsageError(f"--failures {folder}: that is a file; choose another folder with --failures")
        self._folder, self._tell = folder, tell
        self._written: dict[Cell, Path] = {}
        self._known: set[Path] = set()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._known = examples_of((*event.matrix, *event.cells))
        elif isinstance(event, CellFinished) and not event.result.is_of_known_failure:
            try:
                self._keep(event.result)
                for file in event.mended:
                    file.unlink(missing_ok=True)
            except OSError as error:
                place = f"{error.filename}: {error.strerror}"
                self._tell(f"can't keep the failure files of {event.result.cell}: {place}; choose another --failures")

    def _keep(self, result: CellResult) -> None:
        cell = result.cell
        if result.verdict is Verdict.DISAGREE:
            written = self._written[cell] = write_failure(result, self._folder)
            for file in self._earlier(cell, read_failure(written).property):
                if file != written:
                    file.unlink(missing_ok=True)

    def _earlier(self, cell: Cell, held_to: str) -> list[Path]:
        """Returns the files of a cell and property, without those of known failures."""
        files = failure_files_of(cell, held_to, self._folder)
        return [file for file in files if file.resolve() not in self._known]

    def of(self, cell: Cell) -> Path | None:
        """Returns the file of a cell, if it has one."""
        return self._written.get(cell)

    def replay(self, result: CellResult) -> str | None:
        """Returns the command that judges the failure of a cell again, if it has one."""
        cell = result.cell
        known = cell.candidate.known_failure
        file = self.of(cell)
        if file is None and known is not None:
            file = known.example
        if file is None:
            return None
        trust = " --trust" if needs_trust(cell.candidate.source) else ""
        return f"{_program(cell)} replay {quote(str(file))}{trust}"


def _program(cell: Cell) -> str:
    if cell.world != "torchrun":
        return "lossgate"
    return f"torchrun --nproc-per-node {cell.layout.ranks} -m lossgate"
