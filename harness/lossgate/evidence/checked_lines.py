# SPDX-License-Identifier: Apache-2.0
"""Reads lines of evidence and checks each against its own numbers: all work that needs one line
alone. Several processes share a large file.
"""

import gc
import os
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from threading import active_count

from lossgate.evidence.reader import DamagedLine, Digested, GoodLine, Where, raw_lines, read_line
from lossgate.evidence.records import CellRecord, EndRecord, RunRecord
from lossgate.evidence.redo import redo
from lossgate.evidence.summary import CellSummary, summarize

_BATCH = 1 << 20
"""Bytes of lines that are worked on at once: the judge's arithmetic is slow for one record alone,
and a record takes some ten times its bytes."""

_LARGE = 1 << 25
"""Bytes of a file from which on several processes share it. To start them takes about as long as
to read so much."""

_MOST_PROCESSES = 8
"""More would wait for the one that reads the file."""

RawLines = Sequence[tuple[int, bytes]]
"""Lines with their numbers."""


@dataclass(frozen=True, slots=True)
class RunLine:
    """A line that starts or ends a run."""

    where: Where
    digest: str
    record: RunRecord | EndRecord


@dataclass(frozen=True, slots=True)
class CellLine:
    """A line about a cell."""

    summary: CellSummary
    contradiction: str
    """How the record contradicts its own numbers; empty if it does not."""
    record: CellRecord | None
    """The record, if it was asked for."""


CheckedLine = DamagedLine | RunLine | CellLine


def checked_lines(file: Path, *, records: bool) -> Generator[CheckedLine, None, Digested]:
    """Yields the lines of a file, checked, in their order; returns the file's digest.

    Args:
        file: the file.
        records: whether full records are asked for.

    Raises:
        UsageError: if the file cannot be read.
    """
    digest = sha256()
    batches = _batches(raw_lines(file, digest))
    one_by_one = map(partial(check_lines, str(file), records=records), batches)
    for batch in _shared(str(file), batches) if _is_large(file) and not records else one_by_one:
        yield from batch
    return Digested(file=str(file), sha256=digest.hexdigest())


def check_lines(file: str, lines: RawLines, *, records: bool = False) -> list[CheckedLine]:
    """Checks lines of a file. Returns them in their order."""
    # Records are freed when the inner function returns, so the collector wakes up to little.
    with _without_collector():
        return _check_lines(file, lines, records)


def _check_lines(file: str, lines: RawLines, records: bool) -> list[CheckedLine]:
    read = [line for number, text in lines if (line := read_line(Where(file, number), text)) is not None]
    redone = iter(
        redo([line.record for line in read if isinstance(line, GoodLine) and isinstance(line.record, CellRecord)])
    )
    checked: list[CheckedLine] = []
    for line in read:
        if isinstance(line, DamagedLine):
            checked.append(line)
        elif isinstance(line.record, CellRecord):
            found = next(redone)
            summary = summarize(line.record, line.where, line.digest, found)
            checked.append(CellLine(summary, found.contradiction, line.record if records else None))
        else:
            checked.append(RunLine(line.where, line.digest, line.record))
    return checked


def _batches(lines: Iterable[tuple[int, bytes]]) -> Iterator[RawLines]:
    """Yields lines in groups of about ``_BATCH`` bytes."""
    batch: list[tuple[int, bytes]] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += len(line[1])
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _is_large(file: Path) -> bool:
    """Returns whether several processes should share a file, and can."""
    try:
        size = file.stat().st_size
    except OSError:  # whoever opens it tells why
        return False
    # A copy of this process starts at once. It would lack what other threads hold.
    return size >= _LARGE and sys.platform == "linux" and active_count() == 1 and (os.cpu_count() or 1) > 1


def _shared(file: str, batches: Iterator[RawLines]) -> Iterator[list[CheckedLine]]:
    """Yields the checked lines of batches, in their order. Few wait at a time, so that memory
    stays small.
    """
    processes = min(os.cpu_count() or 1, _MOST_PROCESSES)
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:
        waiting: deque[Future[list[CheckedLine]]] = deque()
        for batch in batches:
            waiting.append(pool.submit(check_lines, file, batch))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


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
