# SPDX-License-Identifier: Apache-2.0
"""Runs cells in other processes, side by side."""

from collections import deque
from collections.abc import Generator, Sequence
from multiprocessing.connection import wait
from time import perf_counter

from lossgate.adequacy.deck import deck_key
from lossgate.declaration.loading import check_source
from lossgate.engine.cell import Cell, CellResult
from lossgate.engine.child import Child, ChildDied
from lossgate.engine.crash import result_of_crash
from lossgate.engine.jobs import CellJob, CellName
from lossgate.engine.settings import Settings

_LOOK = 1.0
"""Seconds between two looks at processes that give no answer."""


def run_side_by_side(cells: Sequence[Cell], settings: Settings, jobs: int) -> Generator[CellResult]:
    """Runs cells in other processes, which load the candidates again from their sources.

    Cells that share a deck run in one process, as far as possible, so that it is drawn once. A
    candidate that ends its process is a CRASH, and the next cells run in a new one.

    Raises:
        UsageError: if a candidate is not the one that its source holds, because it was made in a
            function, say.
    """
    for cell in cells:
        check_source(cell.candidate)
    sources = tuple(dict.fromkeys(cell.candidate.source for cell in cells))
    given = [CellJob(CellName.of(cell), sources, settings) for cell in cells]
    workers, queue, finished = [_Worker() for _ in range(jobs)], _Queue(cells), dict[int, CellResult]()
    idle, running = list(range(jobs)), dict[int, int]()
    try:
        for due, _ in enumerate(cells):
            while due not in finished:
                while idle and queue:
                    worker = idle.pop(0)
                    number = running[worker] = queue.take(worker)
                    workers[worker].start(cells[number], given[number])
                ready = wait([workers[worker].child.connection for worker in running], _LOOK)
                for worker in list(running):
                    if workers[worker].child.connection in ready:
                        finished[running.pop(worker)] = workers[worker].result()
                        idle.append(worker)
                    else:
                        workers[worker].child.check_alive(settings.timeout)
            yield finished.pop(due)
    finally:
        for worker in workers:
            worker.child.end()


class _Worker:
    """A process that verifies cells, or the next one if a candidate has spoilt it."""

    def __init__(self) -> None:
        self.child = Child()
        self._cell: Cell | None = None
        self._started = 0.0

    def start(self, cell: Cell, job: CellJob) -> None:
        another = self._cell is not None and self._cell.candidate is not cell.candidate
        if another and self.child.threads_left:
            self._replace()
        self._cell, self._started = cell, perf_counter()
        self.child.start(job)

    def result(self) -> CellResult:
        """Returns what came of the cell, also if its candidate ended the process."""
        assert self._cell is not None
        try:
            return CellResult(cell=self._cell, **self.child.result())
        except ChildDied as died:
            self._replace()
            return result_of_crash(self._cell, died, perf_counter() - self._started)

    def _replace(self) -> None:
        self.child.end()
        self.child = Child()


class _Queue:
    """The cells that wait, by the deck that they share."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._waiting: dict[str, deque[int]] = {}
        for number, cell in enumerate(cells):
            self._waiting.setdefault(deck_key(cell.candidate, cell.dtype), deque()).append(number)
        self._decks: dict[int, str] = {}

    def __bool__(self) -> bool:
        return any(self._waiting.values())

    def take(self, worker: int) -> int:
        """Returns the next cell for a worker: of its deck, of one that nobody has, or of the one
        with the most cells left.
        """
        if not self._waiting.get(self._decks.get(worker, "")):
            left = [deck for deck, cells in self._waiting.items() if cells]
            free = [deck for deck in left if deck not in self._decks.values()]
            self._decks[worker] = free[0] if free else max(left, key=lambda deck: len(self._waiting[deck]))
        return self._waiting[self._decks[worker]].popleft()
