# SPDX-License-Identifier: Apache-2.0
"""Runs cells and reports what happens. A candidate that fails alike wherever it is called is given
up, so that the rest of its cells need not be tried.
"""

import os
from collections.abc import Generator, Hashable, Iterable
from contextlib import closing
from pathlib import Path
from time import perf_counter

from lossgate.base.spelling import counted
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.loading import has_source
from lossgate.engine.cell import Cell, CellResult
from lossgate.engine.cell_record import Verdict
from lossgate.engine.cell_selection import Selection
from lossgate.engine.earlier_failures import examples_of, hold_to_earlier
from lossgate.engine.events import CellAgrees, CellFinished, CellSkipped, CellStarted, Event, RunFinished, RunStarted
from lossgate.engine.plan import left_out, plan
from lossgate.engine.run_cell import run_cell
from lossgate.engine.second_look import look_again
from lossgate.engine.settings import Settings
from lossgate.engine.shards import Shard
from lossgate.engine.workers import Done, run_side_by_side
from lossgate.worlds.base import WorldLost

_LAYOUTS = 2
"""A failure on one layout may be the fault of that layout."""


class SameFailures:
    """Remembers how the cells of each candidate failed.

    A candidate is given up if every cell of it so far ended in the same way, on two layouts: in an
    exception of one type from one line, a hang, a crash. Its outputs were then never compared.
    """

    def __init__(self) -> None:
        self._failed: dict[Hashable, set[Hashable]] = {}
        self._layouts: dict[Hashable, set[str]] = {}
        self._first: dict[Hashable, str] = {}

    def add(self, result: CellResult) -> None:
        """Remembers what came of a cell. Give the cells of a candidate in their order."""
        key = _key(result.cell)
        failure = result.failure
        own = failure is not None and failure.failure and failure.held_to == result.cell.property.name
        self._failed.setdefault(key, set()).add((failure.failure, failure.raised) if failure and own else None)
        self._layouts.setdefault(key, set()).add(str(result.cell.layout))
        self._first.setdefault(key, failure.findings[0] if failure and own else "")

    def of(self, cell: Cell) -> str | None:
        """Returns the failure for which the candidate of a cell is given up; None if it is not."""
        key = _key(cell)
        alike = len(self._failed.get(key, ())) == 1 and len(self._layouts[key]) >= _LAYOUTS
        return (self._first[key] or None) if alike else None


def _key(cell: Cell) -> Hashable:
    return cell.candidate.source, cell.candidate.name


def run(
    candidates: Iterable[Candidate],
    settings: Settings,
    shard: Shard | None = None,
    selection: Selection | None = None,
    *,
    fail_fast: bool = False,
    here: bool = False,
    failures: Path | None = None,
) -> Generator[Event]:
    """Verifies candidates, or some of their cells; yields what happens, in the order of the plan.

    Args:
        candidates: what to verify.
        settings: how much of it.
        shard: the part of the cells that is verified; all by default.
        selection: the cells of which it is a part; all by default.
        fail_fast: whether the run ends with the first cell that disagrees.
        here: whether candidates run in this process, which one that crashes then ends.
        failures: a folder with failure files of earlier runs, to whose problems each cell is held,
            too.

    Candidates on simulated ranks run in other processes, so that none ends this one. Those that
    were made in a function or a notebook, which no other process can load, run in this one if
    there is one job. Ranks of torchrun verify one cell after another, whatever ``jobs`` says.
    A candidate that fails alike on two layouts, before its outputs are compared, is given up.
    """
    candidates = tuple(candidates)
    start, matrix = perf_counter(), plan(candidates, settings)
    if selection is not None:
        matrix = selection.take(matrix)
    cells = matrix if shard is None else shard.take(matrix)
    yield RunStarted(tuple(cells), settings, tuple(matrix), shard, tuple(left_out(candidates, settings)))
    jobs = 1 if settings.world == "torchrun" else min(settings.jobs or os.cpu_count() or 1, len(cells))
    own = here or (
        jobs == 1 and (settings.world != "simulated" or not all(has_source(cell.candidate) for cell in cells))
    )
    alike, results, stopped, known = SameFailures(), list[CellResult](), "", examples_of(matrix)
    steps = _one_by_one(cells, settings, alike) if own else run_side_by_side(cells, settings, jobs, alike.of)
    with closing(steps):
        try:
            for step in steps:
                if isinstance(step, CellStarted | CellAgrees):
                    yield step
                    continue
                if (failure := alike.of(step.cell)) is not None or step.result is None:
                    yield CellSkipped(step.cell, failure or "")
                    continue
                again = not own and settings.world == "simulated"
                result = look_again(step.result, settings.timeout) if again else step.result
                mended: tuple[Path, ...] = ()
                if failures is not None:
                    result, mended = hold_to_earlier(result, failures, settings.timeout, known)
                alike.add(result)
                results.append(result)
                yield CellFinished(result, mended)
                if fail_fast and result.verdict is Verdict.DISAGREE and not result.record.passes:
                    stopped = f"--fail-fast: {len(results)} of {counted(len(cells), 'cell')} were verified"
                    break
        except WorldLost as lost:
            stopped = str(lost)
    yield RunFinished(tuple(results), stopped, perf_counter() - start)


def _one_by_one(cells: Iterable[Cell], settings: Settings, alike: SameFailures) -> Generator[CellStarted | Done]:
    """Runs cells in this process."""
    for cell in cells:
        if alike.of(cell) is not None:
            yield Done(cell, None)
            continue
        yield CellStarted(cell)
        yield Done(cell, run_cell(cell, settings))
