# SPDX-License-Identifier: Apache-2.0
"""Keeps a failure file for every cell that disagrees, and none for those that agree."""

from pathlib import Path
from shlex import quote

from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.events import CellFinished, Event, RunStarted
from lossgate.engine.failure_files import failure_files_of, read_failure, write_failure
from lossgate.engine.replay import replay_failure
from lossgate.engine.trust import needs_trust
from lossgate.errors import UsageError
from lossgate.worlds.base import WorldLost


class FailureFiles:
    """Writes into a folder, under names that contain the cell, and removes what earlier runs wrote
    there of a cell: if it disagrees, for another problem; if it agrees, and on their problem, too.

    Known failures have a file already, which stays.

    Raises:
        UsageError: if the folder is a file.
    """

    def __init__(self, folder: Path) -> None:
        if folder.is_file():
            raise UsageError(f"--failures {folder}: that is a file; choose another folder with --failures")
        self._folder = folder
        self._written: dict[Cell, Path] = {}
        self._known: set[Path] = set()
        self.remarks: list[str] = []
        """What is to be said of files that disagree although their cell agrees."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            known = (cell.candidate.known_failure for cell in (*event.matrix, *event.cells))
            self._known = {one.example.resolve() for one in known if one is not None}
        elif isinstance(event, CellFinished) and event.result.cell.candidate.known_failure is None:
            self._keep(event.result)

    def _keep(self, result: CellResult) -> None:
        cell = result.cell
        if result.verdict is Verdict.DISAGREE:
            written = self._written[cell] = write_failure(result, self._folder)
            for file in self._earlier(cell, read_failure(written).property):
                if file != written:
                    file.unlink(missing_ok=True)
        elif result.verdict is Verdict.AGREE:
            for held_to in _kept_properties(result):
                for file in self._earlier(cell, held_to):
                    self._remove_if_mended(file)

    def _earlier(self, cell: Cell, held_to: str) -> list[Path]:
        files = failure_files_of(cell, held_to, self._folder)
        return [file for file in files if file.resolve() not in self._known]

    def _remove_if_mended(self, file: Path) -> None:
        """Removes a file if its problem agrees now. The run may not have tried one like it."""
        try:
            disagrees = replay_failure(read_failure(file)).disagrees
        except (UsageError, WorldLost):  # nothing is known of it
            return
        if disagrees:
            self.remarks.append(
                f"{file} still disagrees, although its cell agrees on the problems of this run: lossgate replay {file}"
            )
        else:
            file.unlink(missing_ok=True)

    def of(self, cell: Cell) -> Path | None:
        """Returns the file of a cell, if it has one."""
        return self._written.get(cell)

    def replay(self, result: CellResult) -> str | None:
        """Returns the command that judges the failure of a cell again, if it has one."""
        cell = result.cell
        file = self.of(cell) or (cell.candidate.known_failure.example if cell.candidate.known_failure else None)
        if file is None:
            return None
        trust = " --trust" if needs_trust(cell.candidate.source) else ""
        return f"{_program(cell)} replay {quote(str(file))}{trust}"


def _kept_properties(result: CellResult) -> list[str]:
    """Returns the properties that a cell was seen to keep."""
    own = result.cell.property.name
    return [own, *(one.name for one in result.properties if one.problems and one.holds and one.name != own)]


def _program(cell: Cell) -> str:
    if cell.world != "torchrun":
        return "lossgate"
    return f"torchrun --nproc-per-node {cell.layout.ranks} -m lossgate"
