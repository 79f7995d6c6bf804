# SPDX-License-Identifier: Apache-2.0
"""Plans cells, runs them and tells what happens. Knows nobody who listens."""

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import cast

import torch

from lossgate.cases.examine import examine
from lossgate.declaration.candidate import Candidate, Finding
from lossgate.declaration.loading import load_candidates
from lossgate.engine.cell import Cell, CellResult, Verdict, conclude, conclude_known
from lossgate.engine.failure_files import Frozen, read_failure
from lossgate.engine.search import Search
from lossgate.engine.settings import Settings
from lossgate.errors import UsageError
from lossgate.layout import Layout
from lossgate.worlds import SimulatedWorld


@dataclass(frozen=True)
class RunStarted:
    cells: tuple[Cell, ...]
    settings: Settings


@dataclass(frozen=True)
class CellFinished:
    result: CellResult


@dataclass(frozen=True)
class RunFinished:
    results: tuple[CellResult, ...]


Event = RunStarted | CellFinished | RunFinished


def plan(candidates: Iterable[Candidate], settings: Settings) -> list[Cell]:
    """The cells to verify. Raises ``UsageError`` if a candidate has none."""
    cells: list[Cell] = []
    for candidate in candidates:
        if candidate.finding is not None:
            problem = _frozen(candidate.finding).problem
            cells.append(Cell(candidate, problem.layout, problem.dtype))
            continue
        own = [
            Cell(candidate, layout, dtype)
            for dtype in settings.dtypes_of(candidate)
            for layout in settings.layouts_of(candidate)
        ]
        if not own:
            raise UsageError(
                f"candidate {candidate.name!r}: nothing to verify, with axes {candidate.axes or 'none'} and dtypes "
                f"{', '.join(candidate.dtypes)}, on layouts {', '.join(settings.layouts) or f'of {settings.ranks} ranks'} "
                f"in {', '.join(settings.dtypes) or 'any dtype'}"
            )
        cells += own
    return cells


def run_cell(cell: Cell, settings: Settings) -> CellResult:
    """Verify one cell; more problems are tried while they leave it inconclusive."""
    start = perf_counter()
    world = SimulatedWorld(cell.layout, settings.timeout)
    try:
        if finding := cell.candidate.finding:
            frozen = _frozen(finding)
            return conclude_known(
                cell, finding, frozen, examine(cell.candidate, frozen.problem, world), perf_counter() - start
            )
        search = Search(cell, world, settings)
        search.run()
        result = _conclude(search, start)
        for round_ in range(1, settings.rounds):
            if result.verdict is Verdict.INCONCLUSIVE:
                search.fill_gaps(round_)
                result = _conclude(search, start)
            if result.verdict is Verdict.INCONCLUSIVE and result.doubts:
                search.run(round_)
                result = _conclude(search, start)
        return result
    finally:
        world.close()


def _conclude(search: Search, start: float) -> CellResult:
    return conclude(
        search.cell,
        search.examined,
        search.failure,
        search.calls_after_failure,
        perf_counter() - start,
        search.owed,
        search.idle & search.untold.keys(),
    )


def _frozen(finding: Finding) -> Frozen:
    failure = read_failure(finding.example)
    if failure.pooled:
        raise UsageError(
            f"finding {finding.name}: the problems of {finding.example} disagree only together; expected one that does so alone"
        )
    return failure.examples[0]


def run(candidates: Iterable[Candidate], settings: Settings) -> Iterator[Event]:
    """Verify candidates; yields what happens, in the order of the plan."""
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
    """In fresh processes, which load the candidates again by name: kernels can't be pickled."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_process) as pool:
        futures = [
            pool.submit(_run_by_name, cell.candidate.source, cell.layout, cell.dtype, settings) for cell in cells
        ]
        try:
            for cell, future in zip(cells, futures, strict=True):
                yield replace(future.result(), cell=cell)
        finally:
            pool.shutdown(cancel_futures=True)


def _start_process() -> None:
    torch.set_num_threads(1)  # the processes share the cores
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted user wants no traceback from each of them


def _run_by_name(source: str, layout: Layout, dtype: str, settings: Settings) -> CellResult:
    (candidate,) = load_candidates(source)
    result = run_cell(Cell(candidate, layout, dtype), settings)
    return replace(result, cell=cast("Cell", None))
