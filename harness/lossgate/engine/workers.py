# SPDX-License-Identifier: Apache-2.0
"""Runs cells in other processes, side by side."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
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
    """A cell is done. It has no result if its candidate was given up before the cell began."""

    cell: Cell
    result: CellResult | None


def run_side_by_side(
    cells: Sequence[Cell], settings: Settings, jobs: int, given_up: Callable[[Cell], object] = lambda _: None
) -> Generator[CellStarted | CellAgrees | Done]:
    """Runs cells in other processes. These load the candidates again from their sources.

    Cells that share a deck run in one process as far as possible, so that each deck is drawn once.
    If a candidate ends its process, the cell fails as a CRASH, and a new process runs the next
    cells. If something outside may have ended it, the cell is run again, once.

    Args:
        cells: the cells to run.
        settings: how much is tried in each.
        jobs: the number of processes.
        given_up: whether a cell need not run any more.

    Yields:
        An event when a cell starts and when it agrees, in any order. One event with the result of
        each cell, in the order of the cells.

    Raises:
        UsageError: if the source of a candidate does not hold the same candidate. An example is a
            candidate that was made in a function.
    """
    for cell in cells:
        check_source(cell.candidate)
    workers = _Workers(cells, settings, jobs)
    try:
        for number, cell in enumerate(cells):
            while number not in workers.finished:
                yield from workers.start_idle(given_up)
                yield from workers.collect()
            yield Done(cell, workers.finished.pop(number))
    finally:
        workers.end()


class _Workers:
    """The workers of a run. Workers and cells are known by their numbers."""

    def __init__(self, cells: Sequence[Cell], settings: Settings, jobs: int) -> None:
        self._cells, self._settings, self._queue = cells, settings, _Queue(cells)
        self._sources = tuple(dict.fromkeys(cell.candidate.source for cell in cells))
        self._workers = [_Worker() for _ in range(jobs)]
        self._idle = list(range(jobs))
        self._running: dict[int, int] = {}
        """The cell of each worker that has one."""
        self.finished: dict[int, CellResult | None] = {}
        """The results of cells. None stands for a cell that was given up."""

    def start_idle(self, given_up: Callable[[Cell], object]) -> Iterator[CellStarted]:
        """Gives cells to workers that have none."""
        while self._idle and self._queue:
            number = self._queue.take(self._idle[0])
            cell = self._cells[number]
            if given_up(cell):
                self.finished[number] = None
                continue
            worker = self._idle.pop(0)
            self._running[worker] = number
            self._workers[worker].start(cell, CellJob(CellName.of(cell), self._sources, self._settings))
            yield CellStarted(cell)

    def collect(self) -> Iterator[CellAgrees]:
        """Waits a little for answers of workers, and keeps the results of cells."""
        connections = [self._workers[worker].child.connection for worker in self._running]
        ready = wait(connections, _LOOK if self._running else 0)
        for worker, number in list(self._running.items()):
            if self._workers[worker].child.connection not in ready:
                self._workers[worker].child.check_alive(self._settings.timeout)
            elif (answer := self._workers[worker].answer()) is News.AGREES:
                yield CellAgrees(self._cells[number])
            elif answer is not None:
                self.finished[number] = answer
                del self._running[worker]
                self._idle.append(worker)

    def end(self) -> None:
        for worker in self._workers:
            worker.child.end()


class _Worker:
    """A process that verifies cells. A new process takes its place if a candidate spoils it."""

    def __init__(self) -> None:
        self.child = take_child()
        self._cell: Cell | None = None
        self._job: CellJob | None = None
        self._killed: ChildDied | None = None
        """How the first process of the cell ended, if the cell runs again."""
        self._started = 0.0

    def start(self, cell: Cell, job: CellJob) -> None:
        other_candidate = self._cell is not None and self._cell.candidate is not cell.candidate
        if other_candidate and self.child.threads_left:  # threads of the last candidate may disturb this one
            self._replace()
        self._cell, self._job, self._killed, self._started = cell, job, None, perf_counter()
        self.child.start(job)

    def answer(self) -> CellResult | News | None:
        """Returns the result of the cell, also if its candidate ended the process, or news of the
        cell; None if the cell runs again.
        """
        assert self._cell is not None
        assert self._job is not None
        try:
            answer = self.child.result()
        except ChildDied as died:
            printed = self.child.printed
            self._replace()
            if died.from_outside and self._killed is None:
                self._killed = died
                self.child.start(self._job)
                return None
            result = result_of_crash(self._cell, died, perf_counter() - self._started, self._killed)
            return replace(result, printed=printed)
        if isinstance(answer, News):
            return answer
        record, run = answer
        if self._killed is not None:
            how = self._killed.ended.splitlines()[0].rstrip(",")
            run["remark"] = f"ran again, because its first process {how}"
        return CellResult(run=CellRun(**run, cell=self._cell), record=record, printed=self.child.printed)

    def _replace(self) -> None:
        self.child.end()
        self.child = Child(captured=True)


class _Queue:
    """The waiting cells, by the deck that they share."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._waiting: dict[str, deque[int]] = {}
        for number, cell in enumerate(cells):
            self._waiting.setdefault(deck_key(cell.candidate, cell.dtype), deque()).append(number)
        self._decks: dict[int, str] = {}

    def __bool__(self) -> bool:
        return any(self._waiting.values())

    def take(self, worker: int) -> int:
        """Returns the number of the next cell for a worker.

        While the worker's deck has cells, it is one of these. Then it is one of a deck that no
        worker has, or else of the deck with the most cells left.
        """
        deck = self._decks.get(worker, "")
        if not self._waiting.get(deck):
            left = [deck for deck, cells in self._waiting.items() if cells]
            free = [deck for deck in left if deck not in self._decks.values()]
            deck = free[0] if free else max(left, key=lambda deck: len(self._waiting[deck]))
            self._decks[worker] = deck
        return self._waiting[deck].popleft()
