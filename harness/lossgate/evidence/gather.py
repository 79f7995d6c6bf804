# SPDX-License-Identifier: Apache-2.0
"""Gathers evidence of many files and runs, and redoes its verdicts on the way."""

import gc
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from sys import intern

from lossgate.errors import UsageError
from lossgate.evidence.reader import DamagedLine, Digested, GoodLine, Line, Where, read_lines
from lossgate.evidence.records import CellKey, CellRecord, EndRecord, RunRecord
from lossgate.evidence.redo import redo
from lossgate.evidence.summary import CellSummary, summarize

Keep = Callable[[CellRecord, Where], None]
"""Is given the full record of each cell. Records that are not kept are gone afterwards."""

_BATCH = 1_000
"""Verdicts that are redone at once: the judge works on arrays, which are slow for one record."""
_BATCH_COMPARISONS = 100_000
"""Comparisons in a batch at most. Each takes about 0.4 KB, and a cell can have thousands."""


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
        """What is told last of each cell."""
        return {key: told[-1] for key, told in self.cells.items()}


def gather(files: Sequence[Path], keep: Keep | None = None) -> Gathered:
    """Reads files of evidence. Lines that are exact copies of another count once.

    Args:
        files: files, or folders of which every ``*.jsonl`` is read, those in subfolders too.
        keep: is called with the record of each cell, damaged ones excepted.

    Raises:
        UsageError: if a file cannot be read, or a folder holds no evidence.
    """
    gatherer = _Gatherer(keep)
    with _without_collector():
        for file in files_in(files):
            gatherer.read(file)
        return gatherer.done()


def files_in(paths: Iterable[Path]) -> list[Path]:
    """Returns files, and for each folder its ``*.jsonl``, sorted. Each file is there once.

    Raises:
        UsageError: if a folder has no such file.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        for file in _in_folder(path) if path.is_dir() else [path]:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _in_folder(folder: Path) -> list[Path]:
    inside = sorted(file for file in folder.rglob("*.jsonl") if file.is_file())
    if not inside:
        raise UsageError(
            f"{folder}: no *.jsonl in this folder or below; name a folder with files that lossgate verify --evidence "
            "wrote, or the files"
        )
    return inside


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


class _Gatherer:
    """Takes lines one by one, and keeps little of them."""

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
        self._batch: list[tuple[GoodLine, CellRecord]] = []
        self._comparisons = 0

    def read(self, file: Path) -> None:
        digest = _give(self._take, read_lines(file))
        self._files.append(Digested(file=str(file), sha256=digest))

    def done(self) -> Gathered:
        self._redo()
        return Gathered(
            files=tuple(self._files),
            runs=self._runs,
            starts=self._starts,
            ends=self._ends,
            cells={key: tuple(sorted(told, key=lambda one: one.time)) for key, told in self._cells.items()},
            damaged=tuple(self._damaged),
            contradictory=self._contradictory,
            repeated=tuple(self._repeated),
        )

    def _take(self, line: Line) -> None:
        if isinstance(line, DamagedLine):
            self._damaged.append(line)
        elif line.digest not in self._seen:
            self._seen.add(line.digest)
            self._record(line)

    def _record(self, line: GoodLine) -> None:
        record, where = line.record, line.where
        if isinstance(record, CellRecord):
            self._cell(line, record)
        elif record.run in (self._runs if isinstance(record, RunRecord) else self._ends):
            self._repeated.append(where)
        elif isinstance(record, RunRecord):
            self._starts[intern(record.run)] = where
            self._runs[intern(record.run)] = record
        else:
            self._ends[intern(record.run)] = record

    def _cell(self, line: GoodLine, record: CellRecord) -> None:
        if self._keep is not None:
            self._keep(record, line.where)
        self._batch.append((line, record))
        self._comparisons += sum(len(output.cases) for output in record.outputs)
        if len(self._batch) >= _BATCH or self._comparisons >= _BATCH_COMPARISONS:
            self._redo()

    def _redo(self) -> None:
        """Redoes the verdicts of the cells that wait, and keeps their summaries."""
        redone = redo([record for _, record in self._batch])
        for (line, record), found in zip(self._batch, redone, strict=True):
            summary = summarize(record, line.where, line.digest, found.margin)
            self._cells.setdefault(summary.key, []).append(summary)
            if found.contradiction:
                self._contradictory[line.where] = found.contradiction
        self._batch, self._comparisons = [], 0


def _give(take: Callable[[Line], None], lines: Generator[Line, None, str]) -> str:
    """Gives each line to ``take``; returns what the lines return at their end."""
    while True:
        try:
            line = next(lines)
        except StopIteration as end:
            return end.value
        take(line)
