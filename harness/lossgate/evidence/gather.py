# SPDX-License-Identifier: Apache-2.0
"""Gathers evidence of many files and runs, and redoes its verdicts on the way."""

import gc
import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path

from lossgate.base.errors import UsageError
from lossgate.engine.cell_record import CellKey, CellRecord
from lossgate.evidence.reader import DamagedLine, Digested, GoodLine, Line, Where, read_lines
from lossgate.evidence.records import EndRecord, Record, RunRecord
from lossgate.evidence.redo import redo
from lossgate.evidence.summary import CellSummary, summarize

_AT_ONCE = 64
"""Lines that are checked at once: the judge's arithmetic is slow for one record alone."""

Keep = Callable[[CellRecord, Where], None]
"""Is given the full record of each cell. Records that are not kept are gone afterwards."""


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What files of evidence say, without the numbers of each problem."""

    files: tuple[Digested, ...]
    """In the order in which they were read."""
    runs: dict[str, RunRecord]
    """By name, in order of appearance."""
    starts: dict[str, Where]
    """The line of the record of each run."""
    ends: dict[str, EndRecord]
    """By the name of the run."""
    cells: dict[CellKey, tuple[CellSummary, ...]]
    """All that runs tell of each cell, the newest last; of one time, in order of appearance."""
    damaged: tuple[DamagedLine, ...]
    contradictory: dict[Where, str]
    """The lines that contradict their own numbers, and how."""
    repeated: tuple[Where, ...]
    """The lines that start or end a run that another line has started or ended differently."""

    @property
    def newest(self) -> dict[CellKey, CellSummary]:
        """The newest result of each cell."""
        return {key: results[-1] for key, results in self.cells.items()}


def gather(files: Sequence[Path], keep: Keep | None = None) -> Gathered:
    """Reads files of evidence. Lines that are exact copies of another count once.

    Args:
        files: files, or folders of which every ``*.jsonl`` is read, those in subfolders too.
        keep: is called with the record of each cell, damaged ones excepted.

    Raises:
        UsageError: if a file cannot be read, or a folder holds no evidence.
    """
    gatherer = _Gatherer(keep)
    for file in files_in(files):
        gatherer.read(file)
    return gatherer.done()


def files_in(paths: Iterable[Path]) -> list[Path]:
    """Returns files, and for each folder its ``*.jsonl``, sorted. Each file is there once.

    Raises:
        UsageError: if a folder has no such file, or a path can't be followed.
    """
    found: dict[str, Path] = {}
    for path in sorted(paths):
        try:
            is_folder = path.is_dir()
        except (OSError, ValueError) as error:  # its name is too long, or holds a null character
            raise UsageError(f"can't read {str(path)[:100]}: {getattr(error, 'strerror', None) or error}") from None
        for file in _in_folder(path) if is_folder else [path]:
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def _in_folder(folder: Path) -> list[Path]:
    inside = sorted(file for file in folder.rglob("*.jsonl") if file.is_file())
    if not inside:
        raise UsageError(
            f"{folder}: no *.jsonl in this folder or below; name a folder with files that lossgate verify --evidence "
            "wrote, or the files"
        )
    return inside


class KeptRecords:
    """Keeps the records that ``gather`` gives it."""

    def __init__(self) -> None:
        self._records: defaultdict[CellKey, list[CellRecord]] = defaultdict(list)

    def keep(self, record: CellRecord, where: Where) -> None:
        self._records[record.key].append(record)

    def by_cell(self) -> dict[CellKey, tuple[CellRecord, ...]]:
        """Returns all records of each cell, the oldest first, ordered as in ``Gathered``."""
        return {key: tuple(sorted(found, key=lambda r: r.time)) for key, found in self._records.items()}

    def newest(self) -> dict[CellKey, CellRecord]:
        """Returns the newest record of each cell."""
        return {key: found[-1] for key, found in self.by_cell().items()}


class _Gatherer:
    """Takes what lines tell, one by one, and keeps little of it."""

    def __init__(self, keep: Keep | None) -> None:
        self._keep = keep
        self._files: list[Digested] = []
        self._runs: dict[str, RunRecord] = {}
        self._starts: dict[str, Where] = {}
        self._ends: dict[str, EndRecord] = {}
        self._cells: dict[CellKey, list[CellSummary]] = {}
        self._damaged: list[DamagedLine] = []
        self._contradictory: dict[Where, str] = {}
        self._repeated: list[Where] = []
        self._seen: set[str] = set()

    def read(self, file: Path) -> None:
        digest = sha256()
        lines = read_lines(file, digest)
        while some := list(islice(lines, _AT_ONCE)):
            with _without_collector():
                self._take(some)
        self._files.append(Digested(file=str(file), sha256=digest.hexdigest()))

    def done(self) -> Gathered:
        return Gathered(
            files=tuple(self._files),
            runs=self._runs,
            starts=self._starts,
            ends=self._ends,
            cells={key: tuple(sorted(results, key=lambda one: one.time)) for key, results in self._cells.items()},
            damaged=tuple(self._damaged),
            contradictory=self._contradictory,
            repeated=tuple(self._repeated),
        )

    def _take(self, lines: Sequence[Line]) -> None:
        redone = iter(redo([record for line in lines if isinstance(record := _record_in(line), CellRecord)]))
        for line in lines:
            record = _record_in(line)
            contradiction = next(redone).contradiction if isinstance(record, CellRecord) else ""
            if isinstance(line, DamagedLine):
                self._damaged.append(line)
            elif line.digest not in self._seen:
                self._seen.add(line.digest)
                if isinstance(line.record, CellRecord):
                    self._cell(line.record, line, contradiction)
                else:
                    self._run(line.record, line.where)

    def _run(self, record: RunRecord | EndRecord, where: Where) -> None:
        if record.run in (self._runs if isinstance(record, RunRecord) else self._ends):
            self._repeated.append(where)
        elif isinstance(record, RunRecord):
            self._starts[record.run] = where
            self._runs[record.run] = record
        else:
            self._ends[record.run] = record

    def _cell(self, record: CellRecord, line: GoodLine, contradiction: str) -> None:
        if self._keep is not None:
            self._keep(record, line.where)
        summary = summarize(record, line.where, line.digest)
        self._cells.setdefault(summary.key, []).append(summary)
        if contradiction:
            self._contradictory[line.where] = contradiction


def _record_in(line: Line) -> Record | None:
    return line.record if isinstance(line, GoodLine) else None


@contextmanager
def _without_collector() -> Generator[None]:
    """Turns the garbage collector off.

    Records make no cycles, and what is not kept is freed at once. The collector would walk through
    all that is kept again and again: for 100,000 cells it took more than half of 39 s.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
