# SPDX-License-Identifier: Apache-2.0
"""Runs cells side by side, in other processes."""

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from lossgate.adequacy.deck import deck_key
from lossgate.declaration.loading import check_source, load_candidate
from lossgate.engine.cell import Cell, CellResult
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.fork_server import start_worker, worker_context
from lossgate.layout import Layout
from lossgate.properties import find_property


def run_side_by_side(cells: Sequence[Cell], settings: Settings, jobs: int) -> Iterator[CellResult]:
    """Runs cells in other processes, which load the candidates again from their sources.

    Cells that share a deck run in one process, as far as possible, so that it is drawn once.

    Raises:
        UsageError: if a candidate is not the one that its source holds, because it was made in a
            function, say.
    """
    sources = tuple(dict.fromkeys(cell.candidate.source for cell in cells))
    names = [CellName.of(cell) for cell in cells]
    for cell in cells:
        check_source(cell.candidate)
    start = partial(_start_process, dict(os.environ))
    pool = partial(ProcessPoolExecutor, 1, mp_context=worker_context(), initializer=start)
    workers = [pool() for _ in range(jobs)]
    queue, finished, idle = _Queue(cells), dict[int, CellResult](), list(range(jobs))
    running: dict[Future[dict[str, Any]], tuple[int, int]] = {}
    try:
        for due, _ in enumerate(cells):
            while due not in finished:
                for worker in [w for w in idle if queue]:
                    number = queue.take(worker)
                    running[workers[worker].submit(_run_by_name, names[number], sources, settings)] = worker, number
                    idle.remove(worker)
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    worker, number = running.pop(future)
                    finished[number] = CellResult(cell=cells[number], **future.result())
                    idle.append(worker)
            yield finished.pop(due)
    finally:
        for worker in workers:
            worker.shutdown(cancel_futures=True)


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


@dataclass(frozen=True)
class CellName:
    """A cell as data that any process can read."""

    source: str
    property: str
    layout: Layout
    dtype: str
    world: str
    device: str

    @classmethod
    def of(cls, cell: Cell) -> "CellName":
        source, held_to = cell.candidate.source, cell.property.name
        return cls(source, held_to, cell.layout, cell.dtype, cell.world, cell.device)

    def load(self) -> Cell:
        """Loads the candidate and finds the property."""
        candidate = load_candidate(self.source)
        return Cell(candidate, self.layout, self.dtype, find_property(self.property), self.world, self.device)


def _run_by_name(name: CellName, sources: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Runs a cell in a worker; returns all of its result but the cell, which the parent has."""
    for source in sources:
        load_candidate(source)  # whose file may also register a property
    result = run_cell(name.load(), settings)
    return {f.name: getattr(result, f.name) for f in fields(result) if f.name != "cell"}


def _start_process(environment: Mapping[str, str]) -> None:
    start_worker(environment)
    torch.set_num_threads(1)  # the processes share the cores
