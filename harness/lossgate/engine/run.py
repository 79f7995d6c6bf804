# SPDX-License-Identifier: Apache-2.0
"""Runs cells and reports what happens.

A candidate is given up if it fails in the same way wherever it is called. The rest of its cells are
then skipped.
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
from lossgate.engine.earlier_failures import examples_of, hold_to_earlier
from lossgate.engine.events import CellAgrees, CellFinished, CellSkipped, CellStarted, Event, RunFinished, RunStarted
from lossgate.engine.matrix import Shard
from lossgate.engine.plan import Selection, left_out, plan
from lossgate.engine.run_cell import run_cell
from lossgate.engine.second_look import look_again
from lossgate.engine.settings import Settings
from lossgate.engine.workers import Done, run_side_by_side
from lossgate.worlds.base import WorldLost

_QUICK = "a quick look: one rank, and one layout that splits most axes, in one dtype; --profile ci sees more"
_LAYOUTS = 2
"""The number of layouts on which a candidate must fail before it is given up. The failure on a
single layout may be due to that layout.
"""


class SameFailures:
    """Remembers how the cells of each candidate failed.

    A candidate is given up if all its cells so far, on at least two layouts, failed in the same way
    before outputs were compared: by an exception of one type from one line, by a hang, or by a
    crash.
    """

    def __init__(self) -> None:
        self._failed: dict[Hashable, set[Hashable]] = {}
        self._layouts: dict[Hashable, set[str]] = {}
        self._first: dict[Hashable, str] = {}

    def add(self, result: CellResult) -> None:
        """Remembers the result of a cell. Call it with the cells of a candidate in their order."""
        key = _key(result.cell)
        kind, finding = _own_failure(result)
        self._failed.setdefault(key, set()).add(kind)
        self._layouts.setdefault(key, set()).add(str(result.cell.layout))
        self._first.setdefault(key, finding)

    def of(self, cell: Cell) -> str | None:
        """Returns the failure for which the candidate of a cell is given up; None if it is not."""
        key = _key(cell)
        all_alike = len(self._failed.get(key, ())) == 1 and len(self._layouts[key]) >= _LAYOUTS
        if not all_alike:
            return None
        return self._first[key] or None  # the cells may also be alike because none failed


def _key(cell: Cell) -> Hashable:
    return cell.candidate.source, cell.candidate.name


def _own_failure(result: CellResult) -> tuple[Hashable, str]:
    """Returns how the kernel failed in the property of the cell, and the first finding.

    They are None and "" if the cell agrees, if only numbers disagree, or if another property
    failed.
    """
    case = result.failure
    if case is None or not case.failure or case.held_to != result.cell.property.name:
        return None, ""
    return (case.failure, case.raised), case.findings[0]


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
    """Verifies candidates, or some of their cells. Yields events, with the cells in their order.

    Candidates on simulated ranks run in other processes, so that a crash does not end this one.
    Candidates that other processes can't load, such as those of a notebook, run in this process if
    there is one job. Ranks of torchrun verify one cell after another, whatever ``jobs`` says.

    Args:
        candidates: what to verify.
        settings: how much is tried.
        shard: the part of the cells to verify; all by default.
        selection: the cells of which ``shard`` is a part; all by default.
        fail_fast: whether the run ends with the first cell that disagrees.
        here: whether candidates run in this process. A candidate that crashes then ends the run.
        failures: a folder with failure files of earlier runs. Each cell is also held to the
            problems of its files.
    """
    candidates = tuple(candidates)
    start, matrix = perf_counter(), plan(candidates, settings)
    if selection is not None:
        matrix = selection.take(matrix)
    cells = matrix if shard is None else shard.take(matrix)
    is_quick = settings.matrix == "least" and not settings.layouts
    remarks = (*([_QUICK] if is_quick else []), *left_out(candidates, settings))
    yield RunStarted(tuple(cells), settings, tuple(matrix), shard, remarks)
    jobs = 1 if settings.world == "torchrun" else min(settings.jobs or os.cpu_count() or 1, len(cells))
    in_this_process = here or (jobs == 1 and not _can_move(cells, settings))
    known, alike = examples_of(matrix), SameFailures()
    results, stopped = list[CellResult](), ""
    if in_this_process:
        steps = _one_by_one(cells, settings, alike)
    else:
        steps = run_side_by_side(cells, settings, jobs, alike.of)
    with closing(steps):
        try:
            for step in steps:
                if isinstance(step, CellStarted | CellAgrees):
                    yield step
                    continue
                given_up_for = alike.of(step.cell)
                if given_up_for is not None or step.result is None:
                    yield CellSkipped(step.cell, given_up_for or "")
                    continue
                result = step.result
                if settings.world == "simulated":
                    result = look_again(result, settings.timeout, here=in_this_process)
                mended: tuple[Path, ...] = ()
                if failures is not None:
                    result, mended = hold_to_earlier(result, failures, settings.timeout, known)
                alike.add(result)
                results.append(result)
                yield CellFinished(result, mended)
                counts_as = result.record.counts_as(numbers_only=settings.numbers_only)
                if fail_fast and counts_as is Verdict.DISAGREE:
                    stopped = f"--fail-fast: {len(results)} of {counted(len(cells), 'cell')} were verified"
                    break
        except WorldLost as lost:
            stopped = str(lost)
    yield RunFinished(tuple(results), stopped, perf_counter() - start)


def _can_move(cells: Iterable[Cell], settings: Settings) -> bool:
    """Returns whether all cells can run in another process."""
    return settings.world == "simulated" and all(has_source(cell.candidate) for cell in cells)


def _one_by_one(cells: Iterable[Cell], settings: Settings, alike: SameFailures) -> Generator[CellStarted | Done]:
    """Runs cells in this process."""
    for cell in cells:
        if alike.of(cell) is not None:
            yield Done(cell, None)
            continue
        yield CellStarted(cell)
        yield Done(cell, run_cell(cell, settings))
