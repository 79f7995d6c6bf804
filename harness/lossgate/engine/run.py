# SPDX-License-Identifier: Apache-2.0
"""Runs cells and reports what happens."""

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from time import perf_counter
from typing import Any

import torch

from lossgate.cases.case import Case
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.loading import load_candidate
from lossgate.engine.case_result import run_case
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.events import CellFinished, Event, RunFinished, RunStarted
from lossgate.engine.plan import plan, read_known_failure
from lossgate.engine.search import Search
from lossgate.engine.settings import Settings
from lossgate.engine.verdict import conclude, conclude_known
from lossgate.errors import UsageError
from lossgate.layout import Layout
from lossgate.properties import find_property
from lossgate.worlds import make_world


def run_cell(cell: Cell, settings: Settings) -> CellResult:
    """Verifies one cell. More problems are tried as long as they leave it inconclusive."""
    start = perf_counter()
    world = make_world(cell.world, cell.layout, settings.timeout)
    try:
        if known := cell.candidate.known_failure:
            frozen = read_known_failure(known).examples[0]
            now = run_case(Case(cell.candidate, frozen.problem, world), cell.property)
            return conclude_known(cell, known, frozen, now, perf_counter() - start)
        search = Search(cell, world, settings)
        search.run()
        result = _conclude(search, start)
        for round_ in range(1, settings.rounds):
            if result.verdict is Verdict.INCONCLUSIVE:
                search.fill_gaps(round_)
                result = _conclude(search, start)
            if result.verdict is Verdict.INCONCLUSIVE and result.gaps:
                search.run(round_)
                result = _conclude(search, start)
        return result
    finally:
        world.close()


def _conclude(search: Search, start: float) -> CellResult:
    return conclude(
        search.cell,
        search.cases,
        search.failure,
        search.calls_after_failure,
        perf_counter() - start,
        search.still_to_kill,
        search.equivalent & search.surviving.keys(),
    )


def run(candidates: Iterable[Candidate], settings: Settings) -> Iterator[Event]:
    """Verifies candidates; yields what happens, in the order of the plan."""
    cells = plan(candidates, settings)
    yield RunStarted(tuple(cells), settings)
    jobs = min(settings.jobs or os.cpu_count() or 1, len(cells))
    run_all = _run_here if jobs == 1 else partial(_run_side_by_side, jobs=jobs)
    results: list[CellResult] = []
    for result in run_all(cells, settings):
        results.append(result)
        yield CellFinished(result)
    yield RunFinished(tuple(results))


def _run_here(cells: Sequence[Cell], settings: Settings) -> Iterator[CellResult]:
    return (run_cell(cell, settings) for cell in cells)


def _run_side_by_side(cells: Sequence[Cell], settings: Settings, jobs: int) -> Iterator[CellResult]:
    """Runs cells in fresh processes, which load the candidates again from their sources."""
    sources = tuple(dict.fromkeys(cell.candidate.source for cell in cells))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_process) as pool:
        futures = [pool.submit(_run_by_name, CellName.of(cell), sources, settings) for cell in cells]
        try:
            for cell, future in zip(cells, futures, strict=True):
                yield CellResult(cell=cell, **future.result())
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class CellName:
    """A cell as data that any process can read."""

    source: str
    candidate: str
    property: str
    layout: Layout
    dtype: str
    world: str

    @classmethod
    def of(cls, cell: Cell) -> "CellName":
        candidate = cell.candidate
        return cls(candidate.source, candidate.name, cell.property.name, cell.layout, cell.dtype, cell.world)

    def load(self) -> Cell:
        """Loads the candidate and finds the property.

        Raises:
            UsageError: if the source has no such candidate, because it was made in a function, say.
        """
        candidate = load_candidate(self.source)
        if candidate.name != self.candidate:
            raise UsageError(
                f"{self.source} holds {candidate.name!r}, not {self.candidate!r}; "
                "define the candidate at the top of a module, or run with one job"
            )
        return Cell(candidate, self.layout, self.dtype, find_property(self.property), self.world)


def _run_by_name(name: CellName, sources: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Runs a cell in a worker; returns all of its result but the cell, which the parent has."""
    for source in sources:
        load_candidate(source)  # whose file may also register a property
    result = run_cell(name.load(), settings)
    return {f.name: getattr(result, f.name) for f in fields(result) if f.name != "cell"}


def _start_process() -> None:
    torch.set_num_threads(1)  # the processes share the cores
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without this each of them prints a traceback when interrupted
