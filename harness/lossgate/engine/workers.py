# SPDX-License-Identifier: Apache-2.0
"""Runs cells side by side, in other processes."""

import os
import traceback
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from lossgate.adequacy.deck import deck_key
from lossgate.declaration.loading import check_source, load_candidate
from lossgate.engine.cell import Cell, CellResult
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.fork_server import start_process, start_worker
from lossgate.layout import Layout
from lossgate.process_folder import new_folder, remove_folder, take_folder
from lossgate.properties import find_property
from lossgate.worlds.base import WorldLost


def run_side_by_side(cells: Sequence[Cell], settings: Settings, jobs: int) -> Generator[CellResult]:
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
    workers, queue, finished = [_Worker() for _ in range(jobs)], _Queue(cells), dict[int, CellResult]()
    idle, running = list(range(jobs)), dict[int, int]()
    try:
        for due, _ in enumerate(cells):
            while due not in finished:
                while idle and queue:
                    worker = idle.pop(0)
                    running[worker] = queue.take(worker)
                    workers[worker].start(names[running[worker]], sources, settings)
                ready = wait([workers[worker].connection for worker in running])
                for worker in [w for w in running if workers[w].connection in ready]:
                    number = running.pop(worker)
                    finished[number] = CellResult(cell=cells[number], **workers[worker].result())
                    idle.append(worker)
            yield finished.pop(due)
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process that verifies cells."""

    def __init__(self) -> None:
        self.connection, far = Pipe()
        self.folder = new_folder()
        self._process = start_process(_serve, far, dict(os.environ), self.folder, has_children=True)
        far.close()  # else the end of the process would not end the connection

    def start(self, name: "CellName", sources: Sequence[str], settings: Settings) -> None:
        self.connection.send((name, sources, settings))

    def result(self) -> dict[str, Any]:
        """Returns all of a cell's result but the cell. Raises what verifying it raised."""
        try:
            answer = self.connection.recv()
        except EOFError:
            self._process.join()
            raise WorldLost(
                f"the process of a worker ended with exit code {self._process.exitcode}; to see which cell ends it, "
                "run with one job"
            ) from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self.connection.close()
        remove_folder(self.folder)


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


def _serve(connection: Connection, environment: Mapping[str, str], folder: str) -> None:
    """Verifies the cells that the parent names, until it has no more."""
    start_worker(environment, lambda: remove_folder(folder))
    take_folder(folder)
    torch.set_num_threads(1)  # the processes share the cores
    with suppress(EOFError):
        while True:
            given = connection.recv()
            try:
                answer = _run_by_name(*given)
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = error
            connection.send(answer)
