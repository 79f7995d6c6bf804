# SPDX-License-Identifier: Apache-2.0
"""Writes a failure file for every cell that disagrees."""

import re
from pathlib import Path
from zlib import crc32

import msgspec

from lossgate.declaration.candidate import Candidate
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.failure_files import FailureFile, Frozen, versions
from lossgate.engine.run import CellFinished, Event
from lossgate.errors import UsageError


class FailureFiles:
    """Into ``folder``, under names that tell the cell; known findings have theirs already."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[Cell, Path] = {}

    def __call__(self, event: Event) -> None:
        if (
            isinstance(event, CellFinished)
            and event.result.verdict is Verdict.DISAGREE
            and event.result.cell.candidate.finding is None
        ):
            self._written[event.result.cell] = write_failure(event.result, self._folder)

    def of(self, cell: Cell) -> Path | None:
        return self._written.get(cell)


def write_failure(result: CellResult, folder: Path) -> Path:
    """Write the failure of ``result`` into ``folder`` under a name that tells the cell; returns the file."""
    examinations = (result.failure,) if result.failure is not None else result.examined
    content = FailureFile(
        candidate=_portable(result.cell.candidate),
        reasons=result.reasons,
        examples=tuple(Frozen.of(e) for e in examinations),
        pooled=result.failure is None,
        versions=versions(),
    )
    text = msgspec.json.format(msgspec.json.encode(content), indent=1)
    cell = result.cell
    stem = re.sub(r"[^\w=,.-]", "_", f"failure-{cell.candidate.name}-{cell.dtype}-{cell.layout}")
    file = folder / f"{stem}-{crc32(text):08x}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_bytes(text)
        partial.rename(file)
    except OSError as error:
        raise UsageError(f"can't write {file}: {error.strerror}; choose another folder with --failures") from None
    return file


def _portable(candidate: Candidate) -> str:
    file, _, name = candidate.source.rpartition(":")
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{name}"
