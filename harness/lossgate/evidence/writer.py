# SPDX-License-Identifier: Apache-2.0
"""Writes evidence of a run, from its events."""

import os
import platform
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from secrets import token_hex
from types import ModuleType
from typing import Any

import msgspec

from lossgate.base.spelling import counted
from lossgate.engine.cell import CellResult
from lossgate.engine.cell_record import SCHEMA, CellKey, CellRecord
from lossgate.engine.events import CellFinished, CellSkipped, Event, RunFinished, RunStarted
from lossgate.engine.failure_files import versions
from lossgate.engine.recorded import key_of
from lossgate.evidence.records import EndRecord, Matrix, Record, RunRecord
from lossgate.evidence.sealed import digest_in, digest_of_cells, matrix_of, seal
from lossgate.evidence.source_state import digest_of, file_of, git, is_modified

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None


class EvidenceError(Exception):
    """Evidence could not be written; the message says where and why."""


class AppendedLines:
    """A file to which whole lines are added.

    If another run left a line half-written, the next line still begins on a new line. Several
    processes may add to one file. It is opened for each line, so it never stays open.
    """

    def __init__(self, path: Path, option: str = "--evidence") -> None:
        self._path, self._option = path, option

    def add(self, line: bytes) -> None:
        """Adds a line and a line feed.

        Raises:
            EvidenceError: if the file can't be written. What was written before stays.
        """
        try:
            with self._path.open("ab+", buffering=0) as file, _locked(file):
                left = memoryview(_before(file) + line + b"\n")
                while left:
                    taken = file.write(left) or 0  # it may be less than is left
                    left = left[taken:]
        except OSError as error:
            raise EvidenceError(f"{self._option} {self._path}: can't be written: {error.strerror}") from None


@contextmanager
def _locked(file: FileIO) -> Generator[None]:
    if fcntl is None:
        yield
        return
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _before(file: FileIO) -> bytes:
    """Returns a line feed if the last line of a file has none, else nothing."""
    if not file.seekable():  # a pipe, say
        return b""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return b""
    file.seek(size - 1)
    return b"" if file.read(1) == b"\n" else b"\n"


class EvidenceWriter:
    """Writes the records of one run: its start, its cells, its end."""

    def __init__(self, file: AppendedLines, run: str | None = None) -> None:
        self.run = run or token_hex(8)
        self._file = file
        self._digests: list[str] = []

    def start(
        self,
        settings: dict[str, Any],
        cells: Iterable[CellKey] | None = None,
        matrix: Matrix | None = None,
        part: str | None = None,
    ) -> None:
        """Writes the record of the run.

        Args:
            settings: the settings of the run, and its seed.
            cells: the cells of this run, if they are known.
            matrix: the whole matrix, of which this run may be a part.
            part: the part of the matrix, such as "3/8"; None for the whole.
        """
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
        self._add(
            RunRecord(
                schema=SCHEMA,
                run=self.run,
                started=_now(),
                commit=commit,
                modified=None if changed is None else bool(changed),
                host=platform.node(),
                versions=versions(),
                settings=settings,
                part=part,
                matrix=matrix,
                cells=None if cells is None else tuple(cells),
            )
        )

    def cell(self, line: bytes) -> None:
        """Writes the sealed record of a cell."""
        digest = digest_in(line)
        assert digest is not None
        self._file.add(line)
        self._digests.append(digest)

    def end(self, stopped: str = "", planned: Iterable[CellKey] | None = None) -> None:
        """Writes the record of the end.

        Args:
            stopped: why not all cells were verified; empty if they were.
            planned: the cells of this run, if they were not known at the start.
        """
        self._add(
            EndRecord(
                schema=SCHEMA,
                run=self.run,
                finished=_now(),
                cells=len(self._digests),
                cells_digest=digest_of_cells(self._digests),
                stopped=stopped,
                planned=None if planned is None else tuple(planned),
            )
        )

    def _add(self, record: Record) -> None:
        self._file.add(seal(record))


class EvidenceFile:
    """Writes the evidence of a run of ``lossgate verify``.

    If the file can't be written, it calls ``tell`` once with the reason, and the run goes on.
    """

    def __init__(
        self, path: Path, tell: Callable[[str], None], replay: Callable[[CellResult], str | None] = lambda _: None
    ) -> None:
        self._tell, self._replay = tell, replay
        self._writer = EvidenceWriter(AppendedLines(path))
        self._skipped = 0
        self.error: EvidenceError | None = None

    def __call__(self, event: Event) -> None:
        if self.error is not None:
            return
        try:
            self._write(event)
        except EvidenceError as error:
            self.error = error
            self._tell(f"{error}. The verdict will be printed, but this run leaves no evidence that a gate accepts")

    def _write(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            part = str(event.shard) if event.shard else None
            matrix = matrix_of(map(key_of, event.matrix or event.cells))
            self._writer.start(event.settings.values, map(key_of, event.cells), matrix, part)
        elif isinstance(event, CellFinished):
            result = event.result
            self._writer.cell(seal(written(result.record, self._writer.run, self._replay(result))))
        elif isinstance(event, CellSkipped):
            self._skipped += 1
        elif isinstance(event, RunFinished):
            stopped = event.stopped
            if self._skipped and not stopped:
                stopped = f"{counted(self._skipped, 'cell')} not verified, since others failed alike"
            self._writer.end(stopped)


def written(record: CellRecord, run: str, replay: str | None = None) -> CellRecord:
    """Returns the record of a cell with the fields that are known when it is written.

    Args:
        record: the record of the cell.
        run: the name of the run.
        replay: the command that judges its disagreement again, if there is one.
    """
    file = file_of(record.source)
    return msgspec.structs.replace(
        record,
        run=run,
        replay=replay,
        time=_now(),
        source_digest=None if file is None else digest_of(file),
        source_modified=None if file is None else is_modified(file),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
