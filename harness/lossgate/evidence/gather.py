# SPDX-License-Identifier: Apache-2.0
"""Gathers evidence of many files and runs, and redoes its verdicts on the way."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lossgate.base.errors import UsageError
from lossgate.evidence.checked_lines import CellLine, CheckedLine, RunLine, checked_lines
from lossgate.evidence.reader import DamagedLine, Digested, Where
from lossgate.evidence.records import CellKey, CellRecord, EndRecord, RunRecord
from lossgate.evidence.summary import CellSummary

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
        lines = checked_lines(file, records=self._keep is not None)
        while True:
            try:
                self._take(next(lines))
            except StopIteration as end:
                self._files.append(end.value)
                return

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

    def _take(self, line: CheckedLine) -> None:
        if isinstance(line, DamagedLine):
            self._damaged.append(line)
            return
        digest = line.digest if isinstance(line, RunLine) else line.summary.digest
        if digest in self._seen:
            return
        self._seen.add(digest)
        if isinstance(line, RunLine):
            self._run(line)
        else:
            self._cell(line)

    def _run(self, line: RunLine) -> None:
        record = line.record
        if record.run in (self._runs if isinstance(record, RunRecord) else self._ends):
            self._repeated.append(line.where)
        elif isinstance(record, RunRecord):
            self._starts[record.run] = line.where
            self._runs[record.run] = record
        else:
            self._ends[record.run] = record

    def _cell(self, line: CellLine) -> None:
        summary = line.summary
        if self._keep is not None and line.record is not None:
            self._keep(line.record, summary.where)
        self._cells.setdefault(summary.key, []).append(summary)
        if line.contradiction:
            self._contradictory[summary.where] = line.contradiction
