# SPDX-License-Identifier: Apache-2.0
"""Runs cells in other processes, side by side."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from time import perf_counter

from lossgate.adequacy.deck import deck_key
from lossgate.declaration.loading import check_source
from lossgate.engine.cell import Cell, CellResult, CellRun
from lossgate.engine.child import Child, ChildDied, News
from lossgate.engine.crash import result_of_crash
from lossgate.engine.events import CellAgrees, CellStarted
from lossgate.engine.first_import import take_child
from lossgate.engine.jobs import CellJob, CellName
from lossgate.engine.settings import Settings

_LOOK = 1.0
"""Seconds between two looks at processes that give no answer."""


@dataclass(frozen=True)
class Done:
    """A cell is due. It has no result if its candidate was given up before it began."""

    cell: Cell
    result: CellResult | None


def run_side_by_side(
    cells: Sequence[Cell], settings: Settings, jobs: int, given_up: Callable[[Cell], object] = lambda _: None
) -> Generator[CellStarted | CellAgrees | Done]:
    """Runs cells in other processes, which load the candidates again from their sources.

    Cells that share a deck run in one process, as far as possible, so that it is drawn once. A
    candidate that ends its process is a CRASH, and the next cells run in a new one.

    Args:
        cells: what to run.
        settings: how much is tried in each.
        jobs: the number of processes.
        given_up: returns something true for a cell that need not be run any more.

    Yields:
        Each cell as it starts and as it agrees, in any order, and what came of each in the order of
        the cells.

    Raises:
        UsageError: if a candidate is not the one that its source holds, because it was made in a
            function, say.
    """
    for cell in cells:
        check_source(cell.candidate)
    sources = tuple(dict.fromkeys(cell.candidate.source for cell in cells))
    given = [CellJob(CellName.of(cell), sources, settings) for cell in cells]
    workers, queue = [_Worker() for _ in range(jobs)], _Queue(cells)
    finished: dict[int, CellResult | None] = {}
    idle, running = list(range(jobs)), dict[int, int]()
    try:
        for due, cell in enumerate(cells):
            while due not in finished:
                while idle and queue:
                    number = queue.take(idle[0])
                    if given_up(cells[number]):
                        finished[number] = None
                        continue
                    worker = idle.pop(0)
                    running[worker] = number
                    workers[worker].start(cells[number], given[number])
                    yield CellStarted(cells[number])
                ready = wait([workers[worker].child.connection for worker in running], _LOOK if running else 0)
                for worker in list(running):
                    if workers[worker].child.connection not in ready:
                        workers[worker].child.check_alive(settings.timeout)
                    elif (result := workers[worker].result()) is None:
                        yield CellAgrees(cells[running[worker]])
                    else:
                        finished[running.pop(worker)] = result
                        idle.append(worker)
            yield Done(cell, finished.pop(due))
    finally:
        for worker in workers:
            worker.child.end()


class _Worker:
    """A process that verifies cells, or the next one if a candidate has spoilt it."""

    def __init__(self) -> None:
        self.child = take_child()
        self._cell: Cell | None = None
        self._started = 0.0

    def start(self, cell: Cell, job: CellJob) -> None:
        another = self._cell is not None and self._cell.candidate is not cell.candidate
        if another and self.child.threads_left:
            self._replace()
        self._cell, self._started = cell, perf_counter()
        self.child.start(job)

    def result(self) -> CellResult | None:
        """Returns what came of the cell, also if its candidate ended the process; None if it agrees
        with the reference, and is still held to its other properties.
        """
        assert self._cell is not None
        try:
            found = self.child.result()
            if found is News.AGREES:
                return None
            record, run = found
            return CellResult(run=CellRun(**run, cell=self._cell), record=record, printed=self.child.printed)
        except ChildDied as died:
            printed = self.child.printed
            self._replace()
            result = result_of_crash(self._cell, died, perf_counter() - self._started)
            return replace(result, printed=printed)

    def _replace(self) -> None:
        self.child.end()
        self.child = Child(captured=True)


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
