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
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from threading import active_count

import msgspec

from lossgate.evidence.reader import DamagedLine, Digested, GoodLine, Where, raw_lines, read_line
from lossgate.evidence.records import CellRecord, EndRecord, RunRecord
from lossgate.evidence.redo import redo
from lossgate.evidence.summary import CellSummary, summarize

_AT_ONCE = 1 << 16
"""Bytes of lines that are checked at once: the judge's arithmetic is slow for one record alone. As
objects they take some ten times their bytes, and should stay in the processor's cache."""

_SHARE = 1 << 20
"""Bytes of lines that are sent to a process at once."""

_LARGE = 1 << 25
"""Bytes of a file from which on several processes share it. To start them takes about as long as
to read so much."""

_MOST_PROCESSES = 8
"""More would wait for the one that reads the file."""

RawLines = Sequence[tuple[int, bytes]]
"""Lines with their numbers."""


class RunLine(msgspec.Struct, frozen=True):
    """A line that starts or ends a run."""

    where: Where
    digest: str
    record: RunRecord | EndRecord


class CellLine(msgspec.Struct, frozen=True):
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
    lines = raw_lines(file, digest)
    if _is_large(file) and not records:
        yield from _shared(str(file), lines)
    else:
        yield from check_lines(str(file), lines, records=records)
    return Digested(file=str(file), sha256=digest.hexdigest())


def check_lines(file: str, lines: Iterable[tuple[int, bytes]], *, records: bool = False) -> Iterator[CheckedLine]:
    """Yields lines of a file, checked, in their order."""
    for batch in _batches(lines, _AT_ONCE):
        with _without_collector():
            checked = _check_lines(file, batch, records)
        yield from checked


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


def _batches(lines: Iterable[tuple[int, bytes]], most: int) -> Iterator[RawLines]:
    """Yields lines in groups of about so many bytes."""
    batch: list[tuple[int, bytes]] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += len(line[1])
        if size >= most:
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


def _shared(file: str, lines: Iterable[tuple[int, bytes]]) -> Iterator[CheckedLine]:
    """Yields lines in their order, checked by several processes. Few shares wait at a time, so that
    memory stays small.
    """
    processes = min(os.cpu_count() or 1, _MOST_PROCESSES)
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:
        waiting: deque[Future[list[CheckedLine]]] = deque()
        for share in _batches(lines, _SHARE):
            waiting.append(pool.submit(_check_share, file, share))
            if len(waiting) > 2 * processes:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def _check_share(file: str, lines: RawLines) -> list[CheckedLine]:
    return list(check_lines(file, lines))


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
