# SPDX-License-Identifier: Apache-2.0
"""Writes evidence: a consumer of the events of a run. It asks git about the sources."""

import os
import platform
import subprocess
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
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

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # there are no such locks on Windows
    fcntl = None


class EvidenceError(Exception):
    """Evidence could not be written; the message says where and why."""


class AppendedLines:
    """A file to which lines are added, each whole.

    A line that another run has left half-written stays alone: what is added begins on a new line.
    Several processes may add to one file. It is opened for each line, so that nothing is left open.
    """

    def __init__(self, path: Path, option: str = "--evidence") -> None:
        self._path, self._option = path, option

    def add(self, line: bytes) -> None:
        """Adds a line, and gives it its end.

        Raises:
            EvidenceError: if the file can't be written. What was written before stays.
        """
        try:
            with self._path.open("ab+", buffering=0) as file, _locked(file):
                left = memoryview(_before(file) + line + b"\n")
                while left:  # a write may take less than it is given
                    left = left[file.write(left) or 0 :]
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError) -> EvidenceError:
        return EvidenceError(f"{self._option} {self._path}: can't be written: {error.strerror}")


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
    """Returns what must stand before a new line: the end of a line that has none."""
    if not file.seekable() or not (size := file.seek(0, os.SEEK_END)):
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
            settings: how much is verified.
            cells: those of this run, if they are known.
            matrix: of all runs that share it.
            part: which part this run is.
        """
        commit, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
        self._add(
            RunRecord(
                schema=SCHEMA,
                run=self.run,
                started=now(),
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
            stopped: why not all cells were verified, if they were not.
            planned: the cells of this run, if they were not known at the start.
        """
        self._add(
            EndRecord(
                schema=SCHEMA,
                run=self.run,
                finished=now(),
                cells=len(self._digests),
                cells_digest=digest_of_cells(self._digests),
                stopped=stopped,
                planned=None if planned is None else tuple(planned),
            )
        )

    def _add(self, record: Record) -> None:
        self._file.add(seal(record))


class EvidenceFile:
    """Writes what happens in a run of ``lossgate verify``.

    If the file can't be written, ``tell`` is called once with the reason, and the run goes on.
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
            self._tell(f"{error}. The verdict will be printed, and this run leaves no evidence that a gate accepts")

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
            skipped = f"{counted(self._skipped, 'cell')} not verified, since others failed alike" * bool(self._skipped)
            self._writer.end(event.stopped or skipped)


def written(record: CellRecord, run: str, replay: str | None = None) -> CellRecord:
    """Returns the record of a cell as a line of a run has it.

    Args:
        record: what came of it.
        run: the name of the run.
        replay: the command that judges its disagreement again, if there is one.
    """
    return msgspec.structs.replace(
        record,
        run=run,
        replay=replay,
        time=now(),
        source_digest=digest_of_source(record.source),
        source_modified=is_source_modified(record.source),
    )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def git(*arguments: str, folder: Path | None = None) -> str | None:
    """Returns what git prints, or None if it fails: there is no checkout, say."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def digest_of_source(source: str) -> str | None:
    """Returns the SHA-256 of the file that declares a candidate, if it is a file."""
    file = _file_of(source)
    return None if file is None else _digest(file)


def is_source_modified(source: str) -> bool | None:
    """Returns whether the file that declares a candidate differs from the commit, or is not in it;
    None if git can't say.
    """
    file = _file_of(source)
    return None if file is None else _is_modified(file)


def _file_of(source: str) -> Path | None:
    location, _, _ = source.rpartition(":")
    return Path(location).resolve() if location.endswith(".py") else None


@cache
def _digest(file: Path) -> str | None:
    try:
        return sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


@cache
def _is_modified(file: Path) -> bool | None:
    changed = git("status", "--porcelain", "--ignored", "--", file.name, folder=file.parent)
    return None if changed is None else bool(changed)
