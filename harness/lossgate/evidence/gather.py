# SPDX-License-Identifier: Apache-2.0
"""Gathers evidence of many files and runs, and redoes its verdicts."""

import gc
import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path

from lossgate.base.errors import UsageError
from lossgate.engine.cell_record import CellKey, CellRecord
from lossgate.evidence.reader import DamagedLine, Digested, GoodLine, Line, Where, read_lines
from lossgate.evidence.records import EndRecord, RunRecord
from lossgate.evidence.redo import redo
from lossgate.evidence.summary import CellSummary, summarize

_AT_ONCE = 64
"""Lines that are redone together. One by one, the arithmetic of the judge is slow."""

Keep = Callable[[CellRecord, Where], None]
"""A function that is given the full record of each cell. ``Gathered`` has only summaries."""


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """The content of files of evidence, without the numbers of each problem."""

    files: tuple[Digested, ...]
    """The files in the order in which they were read."""
    runs: dict[str, RunRecord]
    """The runs by name, in order of appearance."""
    starts: dict[str, Where]
    """The line of the record of each run."""
    ends: dict[str, EndRecord]
    """The ends of runs, by the name of the run."""
    cells: dict[CellKey, tuple[CellSummary, ...]]
    """The results of each cell, the oldest first. Those of one time are in order of appearance."""
    damaged: tuple[DamagedLine, ...]
    contradictory: dict[Where, str]
    """How lines contradict their own numbers, by line."""
    repeated: tuple[Where, ...]
    """The lines that start or end a run although another line has started or ended it."""

    @property
    def newest(self) -> dict[CellKey, CellSummary]:
        """The newest result of each cell."""
        return {key: results[-1] for key, results in self.cells.items()}


def gather(files: Sequence[Path], keep: Keep | None = None) -> Gathered:
    """Reads files of evidence. Exact copies of a line count once.

    Args:
        files: files, or folders. Every ``*.jsonl`` in a folder and its subfolders is read.
        keep: a function that is called with the record of each cell, unless its line is damaged.

    Raises:
        UsageError: if a file cannot be read, or a folder holds no evidence.
    """
    gatherer = _Gatherer(keep)
    for file in files_in(files):
        gatherer.read(file)
    return gatherer.done()


def files_in(paths: Iterable[Path]) -> list[Path]:
    """Returns the given files, and every ``*.jsonl`` in the given folders, each file once.

    Raises:
        UsageError: if a folder has no such file, or a path can't be followed.
    """
    found: dict[str, Path] = {}
    for path in sorted(paths):
        try:
            is_folder = path.is_dir()
        except (OSError, ValueError) as error:  # its name is too long, or holds a null character
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"can't read {str(path)[:100]}: {why}") from None
        inside = _in_folder(path) if is_folder else [path]
        for file in inside:
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
        """Returns the records of each cell, in the order of ``Gathered.cells``."""
        return {key: tuple(sorted(found, key=lambda r: r.time)) for key, found in self._records.items()}

    def newest(self) -> dict[CellKey, CellRecord]:
        """Returns the newest record of each cell."""
        return {key: found[-1] for key, found in self.by_cell().items()}


class _Gatherer:
    """Collects what lines say, and keeps only summaries of cells."""

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

    def _take(self, lines: Iterable[Line]) -> None:
        cells: list[tuple[CellRecord, GoodLine]] = []
        for line in self._new(lines):
            if isinstance(line.record, CellRecord):
                cells.append((line.record, line))
            else:
                self._run(line.record, line.where)
        redone = redo([record for record, _ in cells])
        for (record, line), found in zip(cells, redone, strict=True):
            self._cell(record, line, found.contradiction)

    def _new(self, lines: Iterable[Line]) -> Iterator[GoodLine]:
        """Yields intact lines, each line once, and remembers damaged lines."""
        for line in lines:
            if isinstance(line, DamagedLine):
                self._damaged.append(line)
            elif line.digest not in self._seen:
                self._seen.add(line.digest)
                yield line

    def _run(self, record: RunRecord | EndRecord, where: Where) -> None:
        known = self._runs if isinstance(record, RunRecord) else self._ends
        if record.run in known:
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


@contextmanager
def _without_collector() -> Generator[None]:
    """Turns the garbage collector off.

    Records form no cycles, so they are freed without it. It would look at all kept records many
    times: for 100,000 cells it took more than half of 39 s.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
